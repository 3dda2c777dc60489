"""Engine: answers a batch of requests of different callers from one forward pass, noisy copies of images included.

Everything that reaches it has been validated, so a batch has one shape and known names. Explainers read the logits and
layers of the shared pass; each is called once per batch, for the rows that asked for it. Should it fail on a batch, its
rows are tried one by one, so that one image never hurts its neighbours.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from auditor.errors import AuditError
from auditor.explainers.base import Explainer
from auditor.explainers.explanation import Explanation
from auditor.service.answer_pictures import heat_layers
from auditor.service.served_version import SEARCHING, Loaded
from auditor.service.prometheus import BATCH_SIZE, EXPLAIN_DURATION, STABILITY
from auditor.service.problems import Problem, problem_of
from auditor.service.forward_pass import Runner
from auditor.service.types import Options
from auditor.stability.decision import MOST_NUMBERS, Sampler, Seen, make_sampler

log = logging.getLogger(__name__)

N_PROBABILITIES = 10


@dataclass
class Job:
    """One image to answer, with what was asked of it."""

    loaded: Loaded
    x: Tensor  # (channels, height, width), checked pixels
    options: Options
    names: list[str]  # explainers, known to be there
    target: int | None
    is_strict: bool  # the caller named explainer and target: what cannot be explained is an error
    search_timeout_s: float = 1.0
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def is_slow(self) -> bool:
        """Whether it takes seconds rather than one pass: it searches or iterates."""
        return self.options.stability == "full" or any(
            self.loaded.explainers[name].kind in SEARCHING for name in self.names
        )


Answer = dict[str, Any]


def answer_batch(jobs: Sequence[Job]) -> list[Answer | Problem]:
    """Answer jobs of the same model, in order; a job that fails gets its problem and the others their answers."""
    loaded = jobs[0].loaded
    BATCH_SIZE.observe(len(jobs))
    clock = _Clock(jobs)
    x = torch.stack([job.x for job in jobs])
    groups = _stability_groups(loaded, jobs, x)
    logits, activations = _pass(loaded.runner, x, groups)
    predicted: list[int] = logits.argmax(1).tolist()
    clock.stop("forward", "-")
    told: list[dict[str, Explanation | str]] = [{} for _ in jobs]
    problems: dict[int, Problem] = {}
    for name, explainer in loaded.explainers.items():
        rows = [i for i, job in enumerate(jobs) if name in job.names]
        if rows:
            _explain(name, explainer, jobs, rows, x, logits, activations, predicted, told, problems)
            clock.stop(name, explainer.kind, rows)
    targets = [job.target if job.target is not None else p for job, p in zip(jobs, predicted, strict=True)]
    stabilities = _stabilities(groups, x, targets)
    if stabilities:
        clock.stop("stability", "-", list(stabilities))
    scores = _scores(logits, loaded.subject.class_names)
    answers: list[Answer | Problem] = []
    for i, job in enumerate(jobs):
        if i in problems:
            answers.append(problems[i])
            continue
        t = targets[i]
        answers.append(
            {
                "prediction": scores[i],
                "target": {"index": t, "label": loaded.subject.class_names[t], "logit": float(logits[i, t])},
                "explanations": [_told(loaded, job, name, told[i][name]) for name in job.names],
                "stability": stabilities.get(i),
                "model": loaded.model,
                "timings": job.timings,
            }
        )
        clock.stop("draw", "-", [i])
    return answers


def _explain(
    name: str,
    explainer: Explainer,
    jobs: Sequence[Job],
    rows: list[int],
    x: Tensor,
    logits: Tensor,
    activations: dict[str, Tensor],
    predicted: list[int],
    told: list[dict[str, Explanation | str]],
    problems: dict[int, Problem],
) -> None:
    """Let one explainer speak of its rows; what it says, or why not, goes to ``told``."""
    groups: dict[tuple[bool, tuple[tuple[str, Any], ...]], list[int]] = defaultdict(list)
    for i in rows:
        job = jobs[i]
        wanted = job.target if job.target is not None else predicted[i]
        if not explainer.can_explain(wanted):
            reason = f"{name} cannot explain class {job.loaded.subject.class_names[wanted]!r}; GET /explainers tells."
            if job.is_strict:
                problems[i] = Problem(422, reason, code="bad_option")
            told[i][name] = reason
            continue
        groups[job.options.heatmaps != "none", _per_request(explainer, job)].append(i)
    for (heatmaps, options), group in groups.items():

        def explain(some: list[int], heatmaps: bool = heatmaps, options: Any = options) -> list[Explanation]:
            whole = len(some) == len(x)
            return explainer.explain_from(
                jobs[0].loaded.subject,
                x if whole else x[some],
                logits if whole else logits[some],
                activations if whole else {k: v[some] for k, v in activations.items()},
                [jobs[i].target for i in some],
                heatmaps=heatmaps,
                **dict(options),
            )

        for i, result in zip(group, _each(explain, group), strict=True):
            if isinstance(result, Problem):
                problems[i] = result
            else:
                told[i][name] = result


def _each(work: Callable[[list[int]], list[Any]], rows: list[int]) -> list[Any]:
    """Do the work on all rows at once; when that fails, row by row, with a problem for each that fails alone."""
    try:
        return work(rows)
    except Exception as error:
        if len(rows) > 1:
            return [_each(work, [row])[0] for row in rows]
        if isinstance(error, AuditError):
            log.warning("an explanation failed: %s", error)
            return [problem_of(error)]
        log.exception("an explanation failed")
        return [Problem(500)]


def _per_request(explainer: Explainer, job: Job) -> tuple[tuple[str, Any], ...]:
    found: dict[str, Any] = {}
    if "timeout_s" in explainer.per_request:
        found["timeout_s"] = job.search_timeout_s
    if "max_steps" in explainer.per_request and job.options.max_steps is not None:
        found["max_steps"] = job.options.max_steps
    return tuple(sorted(found.items()))


@dataclass
class _Group:
    """Jobs that ask for the stability with equal settings."""

    mode: str
    rows: list[int]
    sampler: Sampler
    seen: Seen | None = None


def _stability_groups(loaded: Loaded, jobs: Sequence[Job], x: Tensor) -> list[_Group]:
    asked: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, job in enumerate(jobs):
        o = job.options
        if o.stability != "off":
            asked[o.stability, o.samples, o.radius, o.seed].append(i)
    return [
        _Group(
            mode,
            rows,
            make_sampler(loaded.subject, loaded.stability_layer, mode=mode, samples=samples, radius=radius, seed=seed),
        )
        for (mode, samples, radius, seed), rows in asked.items()
    ]


def _pass(runner: Runner, x: Tensor, groups: Sequence[_Group]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and activations of the images; the noisy copies of the stability go through with them.

    Copies at which a gradient is needed do not: that is a pass of torch's own, whatever engine serves.
    """
    parts = [x]
    shared = [g for g in groups if g.sampler.layer in runner.layers and g.sampler.n_gradients < g.sampler.samples]
    parts += [group.sampler.copies(x[group.rows]).flatten(0, 1).to(x) for group in shared]
    everything = torch.cat(parts) if shared else x
    at_once = max(len(x), MOST_NUMBERS // max(1, x[0].numel()))
    passes = [runner.run(part) for part in torch.split(everything, at_once)]
    if not shared:
        return passes[0]
    logits = torch.cat([part for part, _ in passes])
    n, start = len(x), len(x)
    for group in shared:
        layer, m = group.sampler.layer, len(group.rows)
        a = torch.cat([found[layer] for _, found in passes])
        copies = slice(start, start := start + m * (group.sampler.samples - group.sampler.n_gradients))
        group.seen = Seen(
            torch.cat([a[group.rows][:, None], a[copies].reshape(m, -1, *a.shape[1:])], 1),
            torch.cat([logits[group.rows][:, None], logits[copies].reshape(m, -1, logits.shape[1])], 1),
        )
    return logits[:n], {key: value[:n] for key, value in passes[0][1].items()}


def _stabilities(groups: Sequence[_Group], x: Tensor, targets: list[int]) -> dict[int, dict[str, Any]]:
    """Return the stability of the jobs that asked for it."""
    found: dict[int, dict[str, Any]] = {}
    for group in groups:
        rows = group.rows
        measured = group.sampler.measure(x[rows], [targets[i] for i in rows], group.seen)
        for i, s in zip(rows, measured, strict=True):
            STABILITY.labels(group.mode).observe(s.score)
            found[i] = {"mode": group.mode, "layer": group.sampler.layer, "bound_reason": group.sampler.bound_reason}
            found[i] |= {k: getattr(s, k) for k in ("c1", "c2", "radius", "samples", "bound", "score")}
    return found


def _scores(logits: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return per row the prediction with the most probable classes."""
    scores = logits.double()
    probabilities = torch.sigmoid(scores) if scores.shape[1] == 1 else torch.softmax(scores, dim=1)
    best = probabilities.topk(min(N_PROBABILITIES, probabilities.shape[1]), dim=1)
    found = []
    for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        top = [{"index": k, "label": names[k], "probability": p} for p, k in zip(values, indices, strict=True)]
        found.append({**top[0], "probabilities": top})
    return found


def _told(loaded: Loaded, job: Job, name: str, said: Explanation | str) -> dict[str, Any]:
    """Return one explanation ready for JSON."""
    explainer = loaded.explainers[name]
    head = {"name": name, "kind": explainer.kind, "digest": explainer.digest_ or ""}
    if isinstance(said, str):
        nothing = {"index": 0, "label": "", "logit": 0.0}
        empty = {"target": nothing, "target_value": 0.0, "bias": None, "residual": None, "others": 0.0}
        return {**head, **empty, "concepts": [], "extra": {}, "problem": said}
    concepts, others = list(said.concepts), 0.0
    if job.options.top_k is not None:
        kept = said.ranked()[: job.options.top_k]
        others = sum(c.contribution or 0.0 for c in concepts) - sum(c.contribution or 0.0 for c in kept)
        concepts = kept
    pictures: list[Any] = [None] * len(concepts)
    if job.options.heatmaps != "none":
        pictures = _pictures(concepts, job)
    return {
        **head,
        "target": {"index": said.target.index, "label": said.target.label, "logit": said.target.logit},
        "target_value": said.target_value,
        "bias": said.bias,
        "residual": said.residual,
        "others": others,
        "concepts": [
            {
                "index": c.index,
                "label": c.label,
                "activation": c.activation,
                "contribution": c.contribution,
                "heatmap": pictures[j],
                "note": c.note,
            }
            for j, c in enumerate(concepts)
        ],
        "extra": said.extra,
        "problem": "",
    }


def _pictures(concepts: Sequence[Any], job: Job) -> list[Any]:
    """Draw the heatmaps of one explanation, those of one size together."""
    found: list[Any] = [None] * len(concepts)
    sizes: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for j, c in enumerate(concepts):
        if c.heatmap is not None:
            sizes[tuple(c.heatmap.shape)].append(j)
    for some in sizes.values():
        maps = torch.stack([concepts[j].heatmap for j in some])
        if job.options.heatmaps == "array":
            size = list(maps.shape[1:])
            drawn: list[Any] = [{"size": size, "values": grid} for grid in maps.double().round(decimals=6).tolist()]
        else:
            against = [(concepts[j].contribution or 0.0) < 0 for j in some]
            drawn = list(heat_layers(maps, against, (job.x.shape[1], job.x.shape[2])))
        for j, item in zip(some, drawn, strict=True):
            found[j] = item
    return found


class _Clock:
    """Writes how long each stage took into the jobs' timings and the metrics."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs, self.last = jobs, time.perf_counter()

    def stop(self, stage: str, kind: str, rows: Sequence[int] | None = None) -> None:
        """End a stage that was for the given rows, or for all."""
        now = time.perf_counter()
        took, self.last = now - self.last, now
        EXPLAIN_DURATION.labels("explain" if kind != "-" else stage, kind).observe(took)
        for i in range(len(self.jobs)) if rows is None else rows:
            self.jobs[i].timings[stage] = round(took * 1000, 3)
