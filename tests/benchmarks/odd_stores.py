"""Damaged things of a store: models, artifacts, tags, policies, audits, key files; each read as the product reads it.

What has a checksum (model files, artifacts, audits) must be refused when it was changed; what has none (policies, key
files, tags) must be refused or read as what it says. Never anything but an ``AuditError``, never a verdict.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import odd_images as odd

from auditor.errors import AuditError

POLICY = """
[limits."model/accuracy"]
min = 0.9
max_absolute_loss = 0.02
[limits."explainer/nmf/f_cls"]
min = 0.8
"""
KEYS = """
[[keys]]
name = "app"
hash = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
routes = ["/explain", "/predict"]
models = ["digits"]
rate_per_minute = 60
expires = 2099-01-01

[[keys]]
key = "a-plain-key-of-some-length"
"""
Check = Callable[[random.Random], str]  # damages one thing and reads it; returns what is wrong, or nothing


class Refusals:
    """Counts how damaged things were answered."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def read(self, corpus: str, reader: Callable[[], Any], is_same: Callable[[Any], bool] | None = None) -> str:
        """Read; another error than ours, or damage that was believed, is what is wrong."""
        try:
            value = reader()
        except AuditError as error:
            self.counts[f"{corpus} refused"] += 1
            return "" if str(error).strip() else "an error without a sentence"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        if is_same is not None and not is_same(value):
            return "damaged input was believed"
        self.counts[f"{corpus} read"] += 1
        return ""


def checks(uri: str, folder: Path, refusals: Refusals) -> dict[str, Check]:
    """Return a check for each corpus, around one registered model with explainers."""
    return {
        "keys": lambda rng: check_keys(folder / "keys", rng, refusals),
        "policies": lambda rng: check_policy(rng, refusals),
        "audits": lambda rng: check_audit(rng, refusals),
        **_stored_checks(uri, folder, refusals),
    }


def text_of(source: str, rng: random.Random) -> bytes:
    """Return a text with damage: bytes, or whole lines and values."""
    if rng.random() < 0.5:
        return odd.mutate(source.encode(), rng)
    lines = source.splitlines()
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        name = lines[at].partition("=")[0]
        odd_values = [
            "",
            "-1",
            "nan",
            "inf",
            "1e999",
            '"x"',
            "[]",
            "{}",
            "true",
            "[[1]]",
            "0x7fffffffffffffff",
            "'\\0'",
        ]
        lines[at] = rng.choice([f"{name}= {rng.choice(odd_values)}", "", lines[at] * 2, "[" * 300, "[[keys]]", "[a.b]"])
    return "\n".join(lines).encode()


def check_keys(path: Path, rng: random.Random, refusals: Refusals) -> str:
    """Read a damaged file of keys, as the service does at its start and at every change."""
    from auditor.service.keys import read_keys

    path.write_bytes(text_of(KEYS, rng))
    return refusals.read("keys", lambda: read_keys(path), lambda content: len(content.entries) > 0)


def check_policy(rng: random.Random, refusals: Refusals) -> str:
    """Read a damaged policy and judge an audit by it that is far below: it must not pass."""
    from auditor.release.gate import judge
    from auditor.release.policy import parse_policy

    text = text_of(POLICY, rng).decode("utf-8", "replace")
    bad = an_audit(accuracy=0.1)

    def gated() -> Any:
        policy = parse_policy(text)
        return policy, judge(bad, policy, baseline=bad if policy.needs_baseline else None)

    def is_right(result: Any) -> bool:
        policy, gate = result
        limits = policy.limits.get("model/accuracy")
        still_limits = limits is not None and (limits.min or 0) > 0.1
        return len(policy.limits) > 0 and not (gate.verdict == "pass" and still_limits)

    return refusals.read("policies", gated, is_right)


def check_audit(rng: random.Random, refusals: Refusals) -> str:
    """Read a damaged audit: any change is noticed."""
    from auditor.auditing.audit import Audit

    sealed = an_audit().sealed()
    damaged = odd.mutate(sealed, rng)
    return refusals.read("audits", lambda: Audit.from_json(damaged).sealed(), lambda content: content == sealed)


def an_audit(accuracy: float = 0.97) -> Any:
    """Return a small audit."""
    from auditor.auditing.audit import Audit
    from auditor.metrics.measure import Measure

    metrics = {
        "model/accuracy": Measure(accuracy, accuracy - 0.01, accuracy + 0.01, 100, 0.1, "up"),
        "explainer/nmf/f_cls": Measure(0.9, 0.85, 0.95, 100, 0.1, "up"),
    }
    model = {"name": "digits", "version": "1", "digest": "m" * 64, "input_shape": [1, 8, 8], "classes": ["a", "b"]}
    data = {"spec": "sklearn:digits", "digest": "d" * 64, "n": 100, "n_explained": 20}
    return Audit(model=model, data=data, seed=0, metrics=metrics)


def _stored_checks(uri: str, folder: Path, refusals: Refusals) -> dict[str, Check]:
    from auditor.plugins.registry.attachments import load, names
    from auditor.plugins.registry.location import resolve
    from auditor.plugins.registry.subjects import load_subject

    version = resolve(uri)
    root = Path(unquote(urlsplit(version.root).path))
    subject = load_subject(version)
    digests = {name: load(version, name, subject=subject).digest_ for name in names(version)}
    model_files = [p for p in sorted((root / "data").rglob("*")) if p.is_file()]
    artifact_files = [p for p in sorted((root / "explainers").rglob("*")) if p.is_file()]

    def check_model(rng: random.Random) -> str:
        def loaded() -> str:
            fresh = load_subject(version)  # as the service does: the model, then everything attached to it
            for name in digests:
                load(version, name, subject=fresh)
            return fresh.digest

        with damaged(rng.choice(model_files), rng):
            return refusals.read("models", loaded, lambda digest: digest == subject.digest)

    def check_artifact(rng: random.Random) -> str:
        path = rng.choice(artifact_files)
        name = path.relative_to(root / "explainers").parts[0]
        with damaged(path, rng) as is_changed:
            read = refusals.read("artifacts", lambda: load(version, name, subject=subject).digest_)
            return read or ("damaged input was believed" if is_changed and _was_read(refusals, "artifacts") else "")

    def check_tag(rng: random.Random) -> str:
        name = rng.choice(sorted(digests))
        key = f"auditor.explainer.{name}"
        tags = {**version.tags, key: odd.mutate(version.tags[key].encode(), rng).decode("utf-8", "replace")}
        edited = dataclasses.replace(version, tags=tags)
        return refusals.read("tags", lambda: load(edited, name, subject=subject).digest_, lambda d: d == digests[name])

    return {"models": check_model, "artifacts": check_artifact, "tags": check_tag}


def _was_read(refusals: Refusals, corpus: str) -> bool:
    """Whether the last thing of a corpus was read; forgets it."""
    was = refusals.counts[f"{corpus} read"] > 0
    del refusals.counts[f"{corpus} read"]
    return was


class damaged:
    """A file with damage while the block runs; gives whether its bytes are others."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.path, self.content = path, path.read_bytes()
        self.fresh = self._changed(rng)

    def _changed(self, rng: random.Random) -> bytes:
        if len(self.content) > 100_000:  # mutate keeps the first part only: these are damaged in place
            out = bytearray(self.content)
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
            return bytes(out)
        return odd.mutate(self.content, rng)

    def __enter__(self) -> bool:
        self.path.write_bytes(self.fresh)
        return self.fresh != self.content

    def __exit__(self, *_: object) -> None:
        fresh = self.path.with_name(self.path.name + ".whole")
        fresh.write_bytes(self.content)
        shutil.move(fresh, self.path)


def plan(n: int) -> Iterator[str]:
    """Yield the corpora of n cases: what is quick to read more often."""
    shares = {"keys": 30, "policies": 30, "audits": 25, "tags": 8, "artifacts": 5, "models": 2}
    names = [name for name, share in shares.items() for _ in range(share)]
    for i in range(n):
        yield names[i * 37 % len(names)]
