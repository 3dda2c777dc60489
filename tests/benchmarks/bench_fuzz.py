"""Bad input against a real server and against the readers of a store: 20,000 cases, and everything must stay whole.

    python tests/benchmarks/bench_fuzz.py [--n 20000] [--seed 0] [--url http://127.0.0.1:3000]

A third are mutated and odd image files, of every format that Pillow writes, with odd options over multipart, JSON and
raw bodies; then broken HTTP; then what schemathesis makes of the service's own OpenAPI document, valid and invalid;
then damaged models, artifacts, tags, policies, audits and key files (``odd_stores.py``). After each answer:

- no status of 500 and above but 503, every error as {"error": {"code", "message", "request_id"}}, no stack trace,
- an answer within a minute; every few hundred requests a good image gets the answer it got at the start,
- /livez, asked all the time, answers within 250 ms of what a bare echo process needs on the same machine,
- the server's processes together grow by less than 300 MB, and at the end its workers are those of the beginning,
- what is damaged is refused by one sentence: no verdict, nothing believed.

Without --url a server for the digits CNN is started on 127.0.0.1 and stopped at the end. Exit code 1 on any failure.
The figures go to ``results/fuzz.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import live_server as ls
import numpy as np
import odd_images as odd
import odd_stores as stores

RESULTS = Path(__file__).parent / "results" / "fuzz.json"
LIMIT_S = 60.0
STALL_MS, GROWTH_MB = 250, 300
TRACES = (b"Traceback", b'File "', b"site-packages")
Case = tuple[str, bytes]  # what it is, the whole HTTP request


class Judge:
    """Looks at every answer and keeps what is wrong."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.codes: Counter[str] = Counter()
        self.failures: list[str] = []
        self.n = 0
        self.weight_mb = self.grown_mb = 0.0

    def look(self, what: str, status: int, body: bytes, has_body: bool = True) -> None:
        self.n += 1
        self.statuses[status] += 1
        wrong = ""
        if status >= 500 and status != 503:
            wrong = "a 5xx"
        elif any(trace in body for trace in TRACES):
            wrong = "a stack trace"
        elif status >= 400 and has_body:
            try:
                error = json.loads(body)["error"]
                assert set(error) == {"code", "message", "request_id"}
                assert all(isinstance(v, str) and v for v in error.values())
                self.codes[error["code"]] += 1
            except (ValueError, KeyError, TypeError, AssertionError):
                wrong = "an error of another shape"
        if wrong:
            self.fail(f"{wrong}: {status} {body[:300]!r} for {what}")

    def fail(self, why: str) -> None:
        self.failures.append(why)
        if len(self.failures) <= 20:
            print(f"FAILED {why}", flush=True)


# cases


def some_options(rng: random.Random) -> dict[str, Any]:
    """Return options, mostly right and sometimes not."""
    values: dict[str, list[Any]] = {
        "explainers": [["nmf"], ["xnn"], ["nmf", "xnn"], ["*"], [], ["nosuch"], ["nmf", "nmf"], "nmf", [7], ["x" * 70]],
        "target": [0, "7", 9, 10, -1, "nosuch", 2.5, True, "", "x" * 300, 10**30, None, [1], "\ud800", "\0"],
        "top_k": [1, 3, 10_000, 0, -1, 1.5, "2", None, 10**40],
        "heatmaps": ["png", "array", "none", "jpeg", "", 1, None],
        "stability": ["off", "fast", "off", "off", "quick", None, 0],
        "samples": [1, 4, 64, 65, 0, "8"],
        "radius": [0.01, 0.5, 1, 0, -1, 1e309, "nan", 1e-320],
        "seed": [0, 1, 2**31 - 1, 2**31, -1],
        "timeout_s": [0.1, 0, "inf", 61],
        "max_steps": [1, 0, 10_001],
        "unknown": [1],
    }
    chosen = rng.sample(sorted(values), k=rng.choice([0, 0, 1, 1, 2, 3, 5]))
    return {name: rng.choice(values[name]) for name in chosen}


def as_request(port: int, path: str, file: bytes, options: dict[str, Any], rng: random.Random) -> bytes:
    """Send a file in one of the ways the service takes, or nearly so."""
    way = rng.randrange(6)
    if way <= 1:
        fields = [(k, ",".join(map(str, v)) if isinstance(v, list) else str(v)) for k, v in options.items()]
        return ls.multipart(port, path, file, [(k, v.encode("utf-8", "replace").decode()) for k, v in fields])
    if way <= 3:
        text = base64.b64encode(file).decode()
        text = rng.choice(
            [text, text, text, f"data:image/png;base64,{text}", text[:-1], text + "=", "data:image/png," + text]
        )
        body: Any = {"image": text, **options}
        if path == "/explain_batch":
            body = {"images": [text] * rng.randint(0, 3), **options}
        elif path.startswith("/v1"):
            body = {
                "instances": [rng.choice([{"b64": text}, {"image": text}, text, [[0.5]], 3, None])],
                **({"parameters": options} if options else {}),
            }
        return ls.http("POST", port, path, json.dumps(body).encode())
    kind = rng.choice(
        [b"image/png", b"image/jpeg", b"application/octet-stream", b"text/plain", b"application/x-pickle", b""]
    )
    return ls.http("POST", port, path, file, kind)


def image_cases(port: int, rng: random.Random) -> Iterator[Case]:
    """Yield every odd file in every way once, then mutations without end."""
    good, bad = odd.good_files() | odd.every_format(), odd.bad_files() | odd.bombs()
    paths = [
        "/explain",
        "/explain",
        "/explain",
        "/predict",
        "/explain_batch",
        "/v1/models/digits:explain",
        "/v1/models/digits:predict",
    ]
    for name, file in {**good, **bad}.items():
        yield f"{name} as a form", ls.multipart(port, "/explain", file, [("stability", "off")])
        yield (
            f"{name} as JSON",
            ls.http(
                "POST",
                port,
                "/explain",
                json.dumps({"image": base64.b64encode(file).decode(), "stability": "off"}).encode(),
            ),
        )
        yield f"{name} raw", ls.http("POST", port, "/predict", file, b"image/png")
    names = list(good)
    while True:
        name, path = rng.choice(names), rng.choice(paths)
        file = odd.mutate(good[name], rng) if rng.random() < 0.8 else good[name]
        yield f"mutated {name} to {path}", as_request(port, path, file, some_options(rng), rng)


def http_cases(port: int, rng: random.Random) -> Iterator[Case]:
    """Yield requests whose HTTP, JSON or form is odd."""
    png = odd.good_files()["png"]
    text = base64.b64encode(png).decode()
    jsons = [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b"{}",
        b'{"image": null}',
        b'{"image": 3}',
        b'{"image": ""}',
        b"\xff\xfe",
        b'{"image": "\xff"}',
        b'{"image": "AAAA", "image": "BBBB"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"image": NaN}',
        b'{"top_k": 1e400}',
        b"{" + b'"a":1,' * 20_000 + b'"b":2}',
        json.dumps({"image": "A" * 3_000_000}).encode(),
        json.dumps({"images": [text] * 65}).encode(),
        json.dumps({"instances": [[[[0.1] * 8] * 8] * 2]}).encode(),
        json.dumps({"instances": [[[0.1] * 8] * 8]}).encode(),
        json.dumps({"instances": [[["a"]]]}).encode(),
        json.dumps({"instances": [[[1e400]]]}).encode(),
    ]
    forms = [
        (b"multipart/form-data", b""),
        (b"multipart/form-data; boundary=", b"--\r\n"),
        (b"multipart/form-data; boundary=x", b"--x--"),
        (b"multipart/form-data; boundary=x", b"--x\r\n\r\n\r\n--x--"),
        (b"multipart/form-data; boundary=x", b'--x\r\ncontent-disposition: form-data; name="image"\r\n\r\n--x--\r\n'),
        (
            b"multipart/form-data; boundary=x",
            b'--x\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n'
            b"content-type: image/png; charset=nosuch\r\n\r\nabc\r\n--x--\r\n",
        ),
        (
            b"multipart/form-data; boundary=x; charset=nosuch",
            b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\nabc\r\n--x--\r\n',
        ),
        (b"multipart/form-data; boundary=" + b"x" * 300, b"--x--"),
        (b"application/x-www-form-urlencoded", b"image=abc"),
        (b"application/json; charset=nosuch", b"{}"),
        (b"application/xml", b"<a/>"),
        (b"\xff\xff", b"{}"),
        (b"multipart/mixed; boundary=x", b"--x--"),
    ]
    paths = ["/explain", "/predict", "/explain_batch", "/v1/models/digits:explain", "/v1/models/digits:predict"]
    gets = [
        "/",
        "/ui",
        "/ui/",
        "/ui/nosuch",
        "/ui/../service.py",
        "/ui/%2e%2e/%2e%2e/etc/passwd",
        "/gallery/nosuch",
        "/gallery/",
        "/gallery/%00",
        "/gallery/..%2f..",
        "/gallery/nmf",
        "/v1/models/nosuch",
        "/model?x=1",
        "/explainers",
        "/samples",
        "/openapi.json",
        "/docs.json",
        "/livez",
        "/readyz",
        "/metrics",
        "/explain",
        "//explain",
        "/explain/",
        "/%ff",
        "/" + "a" * 5000,
        "/schema.json",
        "/.env",
    ]
    while True:
        way = rng.randrange(5)
        if way <= 1:
            body = rng.choice(jsons)
            if rng.random() < 0.3:
                body = odd.mutate(body[:5000], rng)
            yield f"odd JSON {body[:40]!r}", ls.http("POST", port, rng.choice(paths), body)
        elif way == 2:
            kind, body = rng.choice(forms)
            yield f"odd form {kind[:60]!r}", ls.http("POST", port, rng.choice(paths), body, kind)
        elif way == 3:
            path = rng.choice(gets)
            yield f"GET {path[:60]}", ls.http("GET", port, path)
        else:
            method = rng.choice(["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NOSUCH", "GET", "HEAD"])
            yield f"{method} on a route", ls.http(method, port, rng.choice(paths + gets))


# sending


async def send_all(port: int, cases: Iterator[Case], n: int, judge: Judge, concurrency: int, again: Any) -> None:
    """Send n cases over some connections; ``again`` is called now and then to see that the server is well."""
    left = [n]

    async def caller() -> None:
        reader = writer = None
        while left[0] > 0 and len(judge.failures) < 100:
            left[0] -= 1
            if left[0] % 500 == 0:
                await asyncio.get_running_loop().run_in_executor(None, again)
            what, request = next(cases)
            is_head = request.startswith(b"HEAD")
            for second in (False, True):
                try:
                    if writer is None:
                        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
                    assert reader is not None
                    writer.write(request)
                    with contextlib.suppress(ConnectionError):  # refused before all was sent: the answer is there
                        await writer.drain()
                    status, body, closes = await asyncio.wait_for(answer(reader, is_head), LIMIT_S)
                    judge.look(what, status, body, not is_head)
                    if closes:
                        writer.close()
                        writer = None
                    break
                except (ConnectionError, asyncio.IncompleteReadError):
                    if writer is not None:
                        writer.close()
                    writer = None
                    if second:  # the first may be a kept connection that the server has closed by now
                        judge.look(what, 0, b"")
                        if not refused_by_http(request):
                            judge.fail(f"the connection broke: {what}")
                except asyncio.TimeoutError:
                    judge.fail(f"no answer in {LIMIT_S:.0f} s: {what}")
                    writer = None
                    break
        if writer is not None:
            writer.close()

    await asyncio.gather(*(caller() for _ in range(concurrency)))


def refused_by_http(request: bytes) -> bool:
    """Whether the server may close a connection without an answer: the body was refused while it was being sent."""
    return len(request) > 1_000_000


async def answer(reader: asyncio.StreamReader, is_head: bool) -> tuple[int, bytes, bool]:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(b":") for line in lines[1:] if line)}
    status, body = int(lines[0].split()[1]), b""
    if headers.get(b"transfer-encoding") == b"chunked" and not is_head:
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    elif not is_head and status not in (204, 304):
        body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
    return status, body, headers.get(b"connection", b"").lower() == b"close"


class Document:
    """The OpenAPI document, to hold answers against (schemathesis's own check stumbles over 3.1's ``prefixItems``)."""

    def __init__(self, url: str) -> None:
        with ls.OPENER.open(f"{url}/openapi.json", timeout=LIMIT_S) as answer:
            self.whole = json.load(answer)
        self.known: dict[tuple[str, str, int], Any] = {}

    def misfit(self, path: str, method: str, status: int, body: bytes) -> str:
        """Return what does not fit, or nothing."""
        import jsonschema_rs

        responses = self.whole["paths"][path].get(method.lower(), {}).get("responses", {})
        if str(status) not in responses:
            return "" if status in (404, 405) else f"status {status} is not documented"
        content = responses[str(status)].get("content", {}).get("application/json")
        if content is None or method.upper() == "HEAD":
            return ""
        key = (path, method, status)
        if key not in self.known:
            schema = {**content["schema"], "components": self.whole["components"]}
            self.known[key] = jsonschema_rs.Draft202012Validator(schema)
        return "; ".join(e.message[:200] for e in self.known[key].iter_errors(json.loads(body)))


def by_schema(url: str, n: int, judge: Judge, seed: int) -> None:
    """Send what schemathesis makes of the OpenAPI document; answers must also fit the document."""
    import hypothesis
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    document = Document(url)
    operations = [result.ok() for result in schema.get_all_operations()]
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    heavy = [op for op in operations if op.method.upper() == "POST"]
    light = len(operations) - len(heavy)
    share = max(1, (n - 20 * light) // (2 * max(1, len(heavy))))
    for operation in operations:
        for mode in modes:
            examples = share if operation in heavy else 10
            try:
                strategy = operation.as_strategy(generation_mode=mode)

                @hypothesis.seed(seed)
                @hypothesis.settings(
                    max_examples=examples,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(hypothesis.HealthCheck),
                    phases=[hypothesis.Phase.generate],
                )
                @hypothesis.given(strategy)
                def check(case: Any) -> None:
                    response = case.call(base_url=url, timeout=LIMIT_S)
                    what = f"schemathesis {case.method} {case.path} {str(case.body)[:200]}"
                    judge.look(what, response.status_code, response.content, case.method != "HEAD")
                    wrong = document.misfit(case.operation.path, case.method, response.status_code, response.content)
                    if wrong:
                        judge.fail(f"the answer does not fit the document: {what}: {wrong}")

                check()
            except hypothesis.errors.Unsatisfiable:
                continue  # nothing invalid can be made for an operation without parameters


class Heartbeat:
    """Asks for /livez all the time, from a process of its own: what this one does must not count."""

    def __init__(self, port: int) -> None:
        self.port, self.counts = port, {"n": 0, "late": 0, "worst_ms": 0.0, "worst_echo_ms": 0.0}

    def start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, __file__, "--heartbeat", str(self.port)]
        self.process = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]

    def stop(self) -> None:
        output, _ = self.process.communicate()
        self.counts = json.loads(output)


def heartbeat(port: int) -> None:
    """Ask until standard input ends; beside each question stands a bare echo, which is as slow as the machine is."""
    echo = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other = subprocess.Popen([sys.executable, "-c", echo], **pipes)  # type: ignore[call-overload]
    counts = {"n": 0, "late": 0, "worst_ms": 0.0, "worst_echo_ms": 0.0}

    def livez() -> None:
        with ls.OPENER.open(f"http://127.0.0.1:{port}/livez", timeout=LIMIT_S) as answer:
            answer.read()

    def echoed() -> None:
        other.stdin.write(b"x\n")
        other.stdin.flush()
        other.stdout.readline()

    echoed()
    before = _took_ms(echoed)
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        took, after = _took_ms(livez), _took_ms(echoed)
        counts["n"] += 1
        counts["late"] += took - max(before, after) > STALL_MS
        counts["worst_ms"] = max(counts["worst_ms"], took)
        counts["worst_echo_ms"] = max(counts["worst_echo_ms"], after)
        before = after
    other.kill()
    print(json.dumps(counts))


def _took_ms(function: Callable[[], None]) -> float:
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1000


def memory_mb(live: ls.Live) -> float:
    """Return the resident memory of all processes of the server."""
    return sum(ls.rss_mb(pid) for pid in live.processes())


def stored(uri: str, n: int, seed: int, judge: Judge) -> Counter[str]:
    """Read n damaged things of a store."""
    refusals, rng = stores.Refusals(), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        checks = stores.checks(uri, Path(folder), refusals)
        for corpus in stores.plan(n):
            judge.n += 1
            if wrong := checks[corpus](rng):
                judge.fail(f"{corpus}: {wrong}")
    return refusals.counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=20_000, help="cases in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--url", help="a server on 127.0.0.1 that runs already")
    parser.add_argument("--dir", type=Path, help="keep the registered model here for the next run")
    parser.add_argument("--heartbeat", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.heartbeat:
        heartbeat(args.heartbeat)
        return 0
    os.environ.update(ls.QUIET)
    judge = Judge()
    folder = args.dir or Path(tempfile.mkdtemp(prefix="bench-fuzz-"))
    with contextlib.ExitStack() as stack:
        if args.dir is None:
            stack.callback(ls.remove, folder)
        if args.url:
            where = urlsplit(args.url)
            assert where.hostname == "127.0.0.1", "only a server on this machine"
            live, port, url = None, where.port or 3000, args.url.rstrip("/")
        else:
            store = ls.use_store(folder / "digits")
            done = folder / "digits" / "uri"
            if not done.exists():
                done.write_text(ls.register_digits())
            live = stack.enter_context(ls.serve(done.read_text(), store, folder / "fuzz", log_requests="false"))
            port, url = live.port, live.address
        workers = live.workers() if live else []
        n_stored = 0 if args.url else args.n * 3 // 10
        beats = Heartbeat(port)
        fuzz(port, url, args, judge, args.n - n_stored, live, beats)
        if n_stored:
            print(f"stored: {dict(sorted(stored(done.read_text(), n_stored, args.seed, judge).items()))}", flush=True)
        if live:
            if live.workers() != workers:
                judge.fail(f"the workers were {workers} and are {live.workers()}")
            log = live.log.read_text(errors="replace")
            if "Traceback" in log:
                judge.fail(f"a stack trace in the log: {log[log.index('Traceback') :][:1500]}")
    counts = beats.counts
    print(f"/livez: {counts['n']} times, worst {counts['worst_ms']:.0f} ms (an echo: {counts['worst_echo_ms']:.0f} ms)")
    print(f"{judge.n} cases, statuses {dict(sorted(judge.statuses.items()))}")
    print(f"codes {dict(judge.codes.most_common())}")
    print(f"{len(judge.failures)} failures" if judge.failures else "no failure")
    figures = {
        "n": judge.n,
        "seed": args.seed,
        "failures": judge.failures[:20],
        "statuses": {str(status): count for status, count in judge.statuses.items()},
        "livez": counts,
        "memory_mb": round(judge.weight_mb),
        "grown_mb": round(judge.grown_mb),
    }
    RESULTS.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    return 1 if judge.failures else 0


def fuzz(
    port: int, url: str, args: argparse.Namespace, judge: Judge, n: int, live: ls.Live | None, beats: Heartbeat
) -> None:
    """Send n requests of all sorts, with a heartbeat beside them, and weigh the server before and after."""
    good = {"image": base64.b64encode(ls.digit_files()[0]).decode(), "explainers": ["nmf", "xnn"], "stability": "fast"}
    probe = ls.Live(port, None, Path(os.devnull))  # type: ignore[arg-type]

    def heart() -> Any:
        status, body = probe.post("/explain", good)
        if status != 200:
            judge.fail(f"a good image got {status} {body}")
            return None
        parts = [c["contribution"] for e in body["explanations"] for c in e["concepts"]]
        return [body["prediction"]["index"], body["stability"]["score"], *parts]

    first = heart()
    assert first is not None, "a good image is not answered"

    def again() -> None:
        now = heart()
        if now is not None and not np.allclose(now, first, rtol=1e-3, atol=1e-3):  # sums differ a little with the batch
            judge.fail(f"a good image got another answer than at the start: {now} was {first}")

    rng, began = random.Random(args.seed), time.perf_counter()
    n_images, n_http = n // 2, n // 5
    asyncio.run(send_all(port, image_cases(port, rng), min(200, n_images), judge, args.concurrency, again))  # warm
    weight_mb = memory_mb(live) if live else 0.0
    beats.start()
    for name, cases, part in (("images", image_cases, n_images), ("http", http_cases, n_http)):
        asyncio.run(send_all(port, cases(port, rng), part, judge, args.concurrency, again))
        grown = f", {memory_mb(live) - weight_mb:+.0f} MB" if live else ""
        print(f"{name}: {judge.n} requests, {time.perf_counter() - began:.0f} s{grown}", flush=True)
    by_schema(url, n - n_images - n_http, judge, args.seed)
    while judge.n < n:  # schemathesis stops early where little can be made
        asyncio.run(send_all(port, image_cases(port, rng), n - judge.n, judge, args.concurrency, again))
    again()
    beats.stop()
    if late := beats.counts["late"]:
        judge.fail(f"/livez was more than {STALL_MS} ms later than an echo {late} times of {beats.counts['n']}")
    if live:
        grown_mb = memory_mb(live) - weight_mb
        judge.weight_mb, judge.grown_mb = weight_mb, grown_mb
        print(f"memory: {weight_mb:.0f} MB, then {grown_mb:+.0f} MB", flush=True)
        if grown_mb > GROWTH_MB:
            judge.fail(f"the server grew by {grown_mb:.0f} MB, from {weight_mb:.0f}")


if __name__ == "__main__":
    sys.exit(main())
