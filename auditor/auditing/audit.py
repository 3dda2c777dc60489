"""Audit: all metrics of a subject and its explainers on given data, with intervals, null models and reasons.

``audit(subject, data, {"concepts": explainer})`` measures; the result is sealed JSON (any edit is found) and one page
(see `auditor.reports.audit_report`). Parts that are finished are kept in a cache folder until the whole is. A caller
may ask for some checks, some explainers or some time only: what is then missing is skipped with that reason.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from auditor.auditing.cache import AuditCache
from auditor.auditing.case import Case, Effort
from auditor.auditing.checks import asked_for
from auditor.auditing.config import AuditConfig
from auditor.auditing.cost import Cost, Meter
from auditor.auditing.data_quality import data_quality
from auditor.auditing.deadline import Deadline
from auditor.auditing.explanation_quality import GROUPS, masked_images, take
from auditor.auditing.fit_metrics import fit_measures
from auditor.auditing.images import Answers, AuditImages, HeldOut, answers, choose, class_counts, held_out, shared
from auditor.auditing.model_quality import layer_names, layer_passes, model_metrics
from auditor.auditing.model_reliance import not_measured, reliance
from auditor.auditing.parts import Part, Runner, Say, Taken, unsaid
from auditor.auditing.performance import NAMES as PERFORMANCE
from auditor.auditing.performance import performance
from auditor.auditing.pictures import finding_pictures, pictures
from auditor.auditing.record import Audit
from auditor.auditing.shared_passes import SharedPasses
from auditor.data.source import Data, open_data
from auditor.explainers.base import Explainer, _versions
from auditor.metrics.measure import Measure
from auditor.progress import Progress, as_callback, silent
from auditor.subject.subject import Subject

RELIANCE_PASSES = 60.0  # per image it measures on, all sources of heat together


def audit(
    subject: Subject,
    data: Any,
    explainers: Mapping[str, Explainer] | None = None,
    config: AuditConfig | None = None,
    *,
    broken: Mapping[str, str] | None = None,
    cache: Path | None = None,
    progress: Progress | bool = silent,
    say: Say = unsaid,
    command: str = "",
) -> Audit:
    """Measure a subject and its explainers on data: ``audit(subject, data, {"concepts": concepts}).metrics``.

    ``data`` is whatever `open_data` opens: a ``DataLoader``, ``(images, labels)``, ``"photos/"``. ``broken`` names
    explainers that did not verify, with the reason: they count as failed. ``cache`` is a folder in which finished parts
    wait for an interrupted audit to be run again. ``say`` gets one line per check before it starts: how many forward
    passes it may take.
    """
    data, progress = open_data(data), as_callback(progress)
    attached, config, broken = dict(explainers or {}), config or AuditConfig(), dict(broken or {})
    names = asked_for(config.explainers, {*attached, *broken})
    explainers = {name: e for name, e in sorted(attached.items()) if name in names}
    meter, deadline = Meter(), Deadline(config.budget_s)
    began = time.monotonic()
    with meter.on(subject.module):
        model_answers = answers(subject, data, batch_size=config.batch_size, progress=progress)
        held = {name: held_out(e, data, model_answers) for name, e in explainers.items()}
        chosen = choose(subject, data, model_answers, held, config.images, config.batch_size)
        watched = deadline.watching(progress)
        store = _cache(cache, subject, data, explainers, config)
        runner = Runner(store, meter, deadline, progress, say, meter.seconds_per_pass)
        work = _Work(subject, data, model_answers, chosen, explainers, config, watched)
        runner.run([*work.parts(), *_not_asked(attached, explainers)])
    if not any(deadline.reason == reason for reason in runner.missing.values()):
        store.clear()
    metrics, about = runner.metrics, runner.records["reliance"]
    metrics |= fit_measures(attached)
    for name in attached:
        metrics[f"explainer/{name}/verified"] = Measure(1.0, direction="up")
    for name, reason in broken.items():
        metrics[f"explainer/{name}/verified"] = Measure(0.0, direction="up", status="failed", reason=reason)
    return Audit(
        model=_about_model(subject),
        data=_about_data(subject, data, model_answers, explainers, held, chosen),
        seed=config.seed,
        metrics=metrics,
        explainers={name: _about(e, held.get(name)) for name, e in sorted(attached.items())}
        | {name: {"problem": reason} for name, reason in broken.items()},
        config=config.model_dump(mode="json"),
        versions=_versions(),
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - began, 1),
        command=command,
        reliance=about,
        cost=[cost.to_json() for cost in runner.costs],
        not_measured=dict(runner.missing),
        pictures=pictures(subject, explainers, chosen, config.slow_images),
        finding_pictures=finding_pictures(subject, data, about["findings"]),
    )


@dataclass(frozen=True, eq=False)
class _Work:
    """What every part of one audit measures on."""

    subject: Subject
    data: Data
    said: Answers
    chosen: AuditImages
    explainers: Mapping[str, Explainer]
    config: AuditConfig
    progress: Progress

    def parts(self) -> list[Part]:
        """Return every check, those that were not asked for included: the ones that say most for their time first."""
        groups = [self._of_explainers(check) for check in GROUPS] if self.explainers else []
        return [self._performance(), *groups, self._reliance(), self._layers()]

    def _of_explainers(self, check: str) -> Part:
        group, cases = GROUPS[check], self._cases
        passes = [group.passes(case) for case in cases.values()]
        budget = sum(p for p in passes if p is not None) if None not in passes else None
        note = "" if budget is not None else "every explainer is fitted again, so its passes are not known beforehand"
        cost = Cost(check, tuple(cases), len(self.chosen), budget, note=note)

        def taken(name: str) -> Taken:
            return Taken(_prefixed(f"explainer/{name}", take(check, cases[name])))

        return Part(cost, taken, group.names, self.config.left_out(check))

    @cached_property
    def _cases(self) -> dict[str, Case]:
        c, usable = self.config, self.explainers
        passes = SharedPasses(layer for e in usable.values() for layer in e.layers())
        efforts = {name: Effort.of(e, c.images, c.refits, c.slow_images, c.exhaustive) for name, e in usable.items()}
        masked = {
            draws: masked_images(self.subject, effort, c.seed)
            for draws, effort in {effort.flip_draws: effort for effort in efforts.values()}.items()
        }
        return {
            name: Case(
                self.subject,
                explainer,
                self.chosen,
                self.data,
                efforts[name],
                c.seed,
                _named(name, self.progress),
                passes,
                masked[efforts[name].flip_draws],
            )
            for name, explainer in usable.items()
        }

    def _performance(self) -> Part:
        cost = Cost("performance", (), len(self.said.ids), 0.0)  # of the one pass that has been made already
        names = {name: "down" if name in ("nll", "ece") else "up" for name in sorted(PERFORMANCE)}
        measures = performance(self.subject, self.said, seed=self.config.seed)
        return Part(cost, lambda _: Taken(_prefixed("model", measures)), names)  # type: ignore[arg-type]

    def _layers(self) -> Part:
        labels = self.chosen.labels if bool((self.chosen.labels >= 0).all()) else None

        def taken(_: str) -> Taken:
            images, seed = self.chosen.images, self.config.seed
            measures = model_metrics(self.subject, images, labels, seed=seed, progress=self.progress)
            # what was measured on all of the data counts, not what was measured on the chosen images
            return Taken({k: m for k, m in measures.items() if k.removeprefix("model/") not in PERFORMANCE})

        cost = Cost("layers", (), len(self.chosen), layer_passes(self.subject, len(self.chosen)))
        return Part(cost, taken, layer_names(self.subject), self.config.left_out("layers"))

    def _reliance(self) -> Part:
        def taken(_: str) -> Taken:
            metrics, about = reliance(
                self.subject,
                self.data,
                self.said,
                self.explainers,
                n_images=self.config.reliance_images,
                seed=self.config.seed,
                batch_size=self.config.batch_size,
                regions=self.config.regions,
                progress=self.progress,
            )
            return Taken(metrics, about)

        cost = Cost("reliance", (), min(len(self.said.ids), self.config.reliance_images), RELIANCE_PASSES)
        left_out = self.config.left_out("reliance")
        return Part(cost, taken, {}, left_out, missing=lambda reason: Taken(*not_measured(reason)))


def _not_asked(attached: Mapping[str, Explainer], chosen: Mapping[str, Explainer]) -> list[Part]:
    """Return every check of the explainers that were not asked for, as left out."""
    rest = tuple(sorted(set(attached) - set(chosen)))
    reason = "the audit was asked for other explainers (--explainers)"

    def never(owner: str) -> Taken:
        raise AssertionError(f"{owner} was left out")

    return [Part(Cost(check, rest, 0, 0.0), never, GROUPS[check].names, reason) for check in GROUPS] if rest else []


def _cache(
    folder: Path | None, subject: Subject, data: Data, explainers: Mapping[str, Explainer], config: AuditConfig
) -> AuditCache:
    """Return the cache of this very audit; without a folder where an explainer was never saved and has no digest.

    Which checks were asked for, and in what time, is no part of its name: another command goes on where one stopped.
    """
    selection = {"checks", "budget_s", "layers", "reliance", "explainers"}
    return AuditCache(
        folder if all(e.digest_ for e in explainers.values()) else None,
        {
            "model": subject.digest,
            "data": data.digest + data.labels_digest,
            "explainers": {name: e.digest_ for name, e in sorted(explainers.items())},
            "config": config.model_dump(mode="json", exclude=selection),
            "versions": _versions(),
        },
    )


def _about_data(
    subject: Subject,
    data: Data,
    model_answers: Answers,
    explainers: Mapping[str, Explainer],
    held: Mapping[str, HeldOut],
    chosen: AuditImages,
) -> dict[str, Any]:
    n_held_out = int(shared(held, len(model_answers.ids)).sum())
    return {
        "spec": data.spec,
        "digest": data.digest,
        **({"labels_digest": data.labels_digest} if data.labels_digest else {}),
        "n": len(model_answers.ids),
        "n_held_out": n_held_out,
        "n_explained": len(chosen),
        "explained": chosen.words(n_held_out),
        **({} if data.limit is None else {"limit": data.limit, "seed": data.seed, "sample": data.sample.words}),
        "unreadable": len(data.skipped),
        **(class_counts(model_answers, subject) | data_quality(subject, model_answers, explainers, held)),
    }


def _about_model(subject: Subject) -> dict[str, Any]:
    return {
        "name": subject.name,
        "version": subject.version,
        "digest": subject.digest,
        "identity": subject.identity.to_json(),
        "input_shape": list(subject.input_shape),
        "classes": list(subject.class_names),
        "output": subject.output.name,
        "parameters": sum(p.numel() for p in subject.module.parameters()),
    }


def _prefixed(prefix: str, metrics: Mapping[str, Measure]) -> dict[str, Measure]:
    return {f"{prefix}/{name}": measure for name, measure in metrics.items()}


def _named(name: str, progress: Progress) -> Progress:
    def report(stage: str, done: int, total: int | None) -> None:
        progress(f"{name}: {stage}", done, total)

    return report


def _about(explainer: Explainer, held: HeldOut | None) -> dict[str, Any]:
    """Return what the audit's JSON says of an explainer; without ``held_out`` where it was not asked for."""
    return {
        "kind": explainer.kind,
        "digest": explainer.digest_,
        "layer": explainer.layer_,
        "target": explainer.config.target,
        "fitted_on": explainer.data_digest_,
        **({} if held is None else {"held_out": held.to_json()}),
        "metrics": {k: float(v) for k, v in explainer.metrics.items()},
    }
