"""A study under load and under the null: agents by REST, the server killed in the middle; type-I error of the analysis.

python tests/benchmarks/bench_study.py STUDY [--participants 200] [--planted 60] [--studies 200] [--keep FILE]

STUDY is a folder that ``auditor study new`` wrote. First agents (study_agents), a third of them at random, take part by
a real server, ``auditor study serve``, which is killed (SIGKILL) once half of the answers are in and started again.
The same again on a study whose order of conditions is planted (planted_study): the analysis must find that order in
agents who group by what they see, and none in agents at random.
Then whole studies are simulated in which all conditions are alike, with every person as skilled as they happen to be,
and the shares of studies in which the analysis finds any difference are printed with their binomial intervals.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
from scipy.stats import binomtest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from auditor.metrics.grouping_purity import purity
from auditor.study.answers import AnswerStore
from auditor.study.folder import read_study, write_study
from auditor.study.order_effects import data_effect, order_effect
from auditor.study.results import comparisons_of, results_of
from auditor.study.scores import Score
from tests.benchmarks.planted_study import planted_study
from tests.benchmarks.study_agents import Agent, lost_answers
from tests.free_port import free_port


def serve(folder, answers, port):
    command = [sys.executable, "-c", "from auditor.cli import main; main()", "study", "serve", str(folder)]
    options = ["--answers", str(answers), "--port", str(port), "--open", "agents", "--key", "owner-of-the-bench"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        try:
            httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5)
            return process
        except httpx.TransportError:
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
    raise SystemExit("the server did not come up")


def under_load(folder, participants):
    """Let agents take part, kill the server once, and return what became of the answers and what was found."""
    study, _, digest = read_study(folder)
    with tempfile.TemporaryDirectory() as temporary:
        answers, port = Path(temporary) / "answers.db", free_port()
        server, count, lock = serve(folder, answers, port), [0], threading.Lock()
        n_steps = 3 + 2 * len(study.data) * len(study.config.conditions)
        killed = threading.Event()

        def on_answer():
            nonlocal server
            with lock:
                count[0] += 1
                if not killed.is_set() and count[0] >= participants * n_steps // 2:
                    killed.set()
                    server.kill()
                    server.wait(30)
                    server = serve(folder, answers, port)

        seen = {}
        agents = [
            Agent(f"http://127.0.0.1:{port}", i, code="agents", is_random=i % 3 == 0, seen=seen)
            for i in range(participants)
        ]
        began = time.perf_counter()
        with ThreadPoolExecutor(16) as pool:
            codes = list(pool.map(lambda agent: agent.take_part(on_answer), agents))
        seconds = time.perf_counter() - began
        server.terminate()
        server.wait(30)
        store = AnswerStore(answers, study, digest, create=False)
        everybody = store.everybody()
        store.close()
    counts = lost_answers(dict(zip(codes, agents, strict=True)), everybody)
    honest = {code for i, code in enumerate(codes) if i % 3}
    found = {}
    for name, group in (("agents", honest), ("random", set(codes) - honest)):
        results = results_of(study, digest, [p for p in everybody if p.code in group])
        found[name] = {
            "n": len(group),
            "purity": {k: round(m.value, 3) for k, m in results.metrics.items() if "/purity/" in k},
            "significant": [
                f"{c.a} - {c.b} {c.difference:+.3f}"
                for c in results.comparisons
                if c.what == "purity" and not c.data and c.is_significant
            ],
        }
        for d, of_data in results.by_data().items():
            found[name][d] = {k: round(m["value"], 3) for k, m in of_data.items() if "/purity/" in k}
    return {
        "participants": participants,
        "finished": sum(p.is_finished for p in everybody),
        "answers": sum(counts.values()),
        "lost": counts["lost"],
        "killed": killed.is_set(),
        "seconds": round(seconds, 1),
        "found": found,
    }


def simulated(study, people, rng):
    """Return the scores of people who see alike whatever is shown: each has a skill of their own, and a mood."""
    conditions, names, rows = study.config.conditions, [d.name for d in study.data], []
    for number in range(people):
        skill, mood = rng.beta(2, 2), rng.integers(0, 5)
        for k, batch in enumerate(study.order_of(number).batches):
            classes = study.classes_of(batch.data, batch.drawn)
            right = {c: i for i, c in enumerate(study.data[batch.data].classes)}
            groups = [right[c] if rng.random() < skill else int(rng.integers(study.config.n_classes)) for c in classes]
            rows.append(
                Score(
                    code=str(number),
                    condition=conditions[batch.condition],
                    data=names[batch.data],
                    drawn=batch.drawn,
                    stage=1 + k // len(names),
                    batch=k + 1,
                    purity=purity(groups, classes),
                    purity_of_labels=None,
                    chance=0.5,
                    ceiling=1.0,
                    seconds=0.0,
                    confidence=(mood + rng.integers(0, 3)) / 6,
                    cell=0,
                )
            )
    return rows


def under_the_null(study, studies, people, seed=0):
    """Return how often the analysis of `auditor study results` finds anything where there is nothing to be found."""
    hits = Counter()
    for s in range(studies):
        rows = simulated(study, people, np.random.default_rng([seed, s]))
        found = comparisons_of(study, rows, (), s)
        pooled = [c for c in found if c.what == "purity" and not c.data]
        hits["permutation"] += any(c.is_significant for c in pooled)
        hits["wilcoxon"] += any(c.p_wilcoxon_holm <= 0.05 for c in pooled)
        hits["within data sets"] += any(c.is_significant for c in found if c.what == "purity" and c.data)
        hits["confidence"] += any(c.is_significant for c in found if c.what == "confidence" and not c.data)
        hits["place"] += order_effect(rows, by="stage", seed=s).p <= 0.05
        if len(study.data) > 1:
            hits["data"] += data_effect(rows, seed=s)[0].p <= 0.05
    rates = {}
    for name, n in hits.items():
        interval = binomtest(int(n), studies).proportion_ci()
        rates[name] = {"rate": n / studies, "low": round(interval.low, 4), "high": round(interval.high, 4)}
    return {"studies": studies, "people": people, "seed": seed, "rates": rates}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--participants", type=int, default=200)
    parser.add_argument("--planted", type=int, default=60, help="participants of the study with a planted order")
    parser.add_argument("--studies", type=int, default=200)
    parser.add_argument("--people", type=int, default=30, help="of each simulated study")
    parser.add_argument("--seed", type=int, default=0, help="of the simulated studies")
    parser.add_argument("--keep", type=Path, help="file for the results (JSON)")
    args = parser.parse_args()
    study, _, _ = read_study(args.study)
    results = {}
    if args.participants:
        results["load"] = under_load(args.study, args.participants)
        print(json.dumps(results["load"], indent=1), flush=True)
    if args.planted:
        with tempfile.TemporaryDirectory() as folder:
            write_study(Path(folder) / "planted", *planted_study(args.seed))
            results["planted"] = under_load(Path(folder) / "planted", args.planted)
        print(json.dumps(results["planted"], indent=1), flush=True)
    if args.studies:
        results["null"] = under_the_null(study, args.studies, args.people, args.seed)
        print(json.dumps(results["null"], indent=1), flush=True)
    if args.keep:
        args.keep.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
