"""Answer: prediction, explanations and stability of images. The one place that assembles them.

The terminal, REST, the KServe route, the deployments client and Python all get their answers from ``answer``: the same
image, seed and options give the same numbers by every way. It answers a batch of questions, which may come from
different callers and ask for different things, from one forward pass that takes the noisy copies for the stability
with it. Explainers read the logits and layers of that pass; each is called once per batch, for the rows that asked for
it. Should it fail on a batch, its rows are tried one by one, so that one image never hurts its neighbours.

For every explanation that gives contributions

    bias + sum of contributions + others + residual == target_value

where ``others`` is what ``top_k`` left out (0 without it).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from auditor.attribution.heatmap_png import heat_layers
from auditor.data.python_objects import pixels_of_any
from auditor.errors import AuditError, OptionError, UnknownClassError, UnknownExplainerError
from auditor.explainers.answer_options import EVERY, AnswerOptions, options_of
from auditor.explainers.base import Explainer
from auditor.explainers.explanation import Concept, Explanation
from auditor.explainers.forward_pass import ForwardPass, TorchPass
from auditor.stability.decision import MOST_NUMBERS, Mode, Sampler, SharedPass, Stability, make_sampler
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

N_PROBABILITIES = 10
CLASSES_SHOWN = 12
SAMPLERS = 4  # settings of the stability whose noise is kept
OnStage: TypeAlias = Callable[[str, str, Sequence[int]], object]


def no_stage(stage: str, kind: str, rows: Sequence[int]) -> None:
    """Ignore the end of a stage."""


@dataclass(frozen=True)
class ExplainedModel:
    """A subject with the explainers attached to it and what runs its forward pass."""

    subject: Subject
    explainers: Mapping[str, Explainer]
    forward: ForwardPass
    stability_layer: str  # whose movement the stability measures
    search_limit_s: float | None = None  # the most that an explainer may search per image, whatever was asked for
    attestation: Mapping[str, str] | None = None  # who says that this version passed its gate; None: nobody asked
    _samplers: dict[tuple[Mode, int, float, int], Sampler] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        subject: Subject,
        explainers: Mapping[str, Explainer],
        *,
        forward: ForwardPass | None = None,
        stability_layer: str | None = None,
        search_limit_s: float | None = None,
        attestation: Mapping[str, str] | None = None,
    ) -> ExplainedModel:
        """Return the model as torch runs it; the stability is of the first explained layer, unless one is named."""
        layer = stability_layer or next((e.layer_ for e in explainers.values() if e.layer_), None)
        forward = forward or TorchPass(subject, explainers.values())
        return cls(subject, explainers, forward, layer or subject.default_layer(), search_limit_s, attestation)

    def sampler(self, mode: Mode, noise_samples: int, radius: float, seed: int) -> Sampler:
        """Return what measures the stability; those of the last few settings are kept with their noise."""
        key = (mode, noise_samples, radius, seed)
        made = self._samplers.get(key)
        if made is None:
            made = make_sampler(
                self.subject, self.stability_layer, mode=mode, noise_samples=noise_samples, radius=radius, seed=seed
            )
            for old in list(self._samplers)[: len(self._samplers) + 1 - SAMPLERS]:
                self._samplers.pop(old, None)
            self._samplers[key] = made
        return made

    @cached_property
    def default_names(self) -> list[str]:
        """Names of the explainers that answer when none is named: all that do not search, or else all."""
        quick = [name for name, explainer in self.explainers.items() if not explainer.searches]
        return quick or list(self.explainers)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What every answer says of the model."""
        about = {"name": self.subject.name, "version": self.subject.version, "digest": self.subject.digest}
        return {**about, "attestation": None if self.attestation is None else dict(self.attestation)}


@dataclass(frozen=True)
class Question:
    """One image with what is asked of it, checked against the model."""

    x: Tensor  # (channels, height, width), checked pixels
    options: AnswerOptions
    names: list[str]  # explainers, all of them attached
    target: int | None
    is_strict: bool  # explainer and target were named: what cannot be explained is an error

    @classmethod
    def of(cls, model: ExplainedModel, x: Tensor, options: AnswerOptions) -> Question:
        """Check the explainers and the target that options name; an unknown one is an error."""
        names = chosen_names(list(model.explainers), options.explainers, model.default_names)
        target = None if options.target is None else class_of(model.subject, options.target)
        named = options.explainers is not None and EVERY not in options.explainers
        return cls(x, options, names, target, named and target is not None)


def chosen_names(attached: Sequence[str], named: Sequence[str] | None, default: Sequence[str]) -> list[str]:
    """Return the explainers that were asked for, each once and in the order asked for.

    >>> chosen_names(["concepts", "heads"], ["heads", "heads"], ["concepts"])
    ['heads']
    """
    if named is None:
        return list(default)
    if EVERY in named:
        return list(attached)
    for name in named:
        if name not in attached:
            names = ", ".join(attached) or "none"
            raise UnknownExplainerError(f"explainers: there is no explainer {name!r}; attached are: {names}.")
    return list(dict.fromkeys(named))


def class_of(subject: Subject, target: int | str) -> int:
    """Return the index of the class that was asked for."""
    try:
        return subject.class_index(target)
    except (OptionError, ValueError) as error:
        raise UnknownClassError(" ".join(str(error).split())[:300]) from None


@dataclass(frozen=True)
class Answer:
    """The answer for one image. ``to_json`` draws the heatmaps and gives what REST and ``--json`` give."""

    subject: Subject
    question: Question
    prediction: dict[str, Any]
    target: dict[str, Any]
    explainers: Mapping[str, Explainer]  # by name, in the order asked for
    explanations: dict[str, Explanation]
    problems: dict[str, str]  # name of an explainer -> why it has nothing to say of this image
    stability: dict[str, Any] | None
    model: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        return {
            "prediction": self.prediction,
            "target": self.target,
            "explanations": [self._explanation(name, explainer) for name, explainer in self.explainers.items()],
            "stability": self.stability,
            "model": self.model,
        }

    def shown(self, name: str) -> tuple[list[Concept], float]:
        """Return the concepts that ``top_k`` leaves, the strongest first, and the sum of the other contributions.

        Without ``top_k`` they are all there, in the explainer's order.
        """
        explanation = self.explanations[name]
        concepts = list(explanation.concepts)
        if self.question.options.top_k is None:
            return concepts, 0.0
        strongest = explanation.ranked()[: self.question.options.top_k]
        others = sum(c.contribution or 0.0 for c in concepts) - sum(c.contribution or 0.0 for c in strongest)
        return strongest, others

    def _explanation(self, name: str, explainer: Explainer) -> dict[str, Any]:
        head = {"name": name, "kind": explainer.kind, "digest": explainer.digest_ or ""}
        head["target_value_of"] = explainer.target_value_of
        if name in self.problems:
            nothing = {"index": 0, "label": "", "logit": 0.0}
            empty = {"target": nothing, "target_value": 0.0, "bias": None, "residual": None, "others": 0.0}
            return {**head, **empty, "concepts": [], "lines": [], "extra": {}, "problem": self.problems[name]}
        explanation = self.explanations[name]
        concepts, others = self.shown(name)
        target = explanation.target
        return {
            **head,
            "target": {"index": target.index, "label": target.label, "logit": target.logit},
            "target_value": explanation.target_value,
            "bias": explanation.bias,
            "residual": explanation.residual,
            "others": others,
            "concepts": [
                {
                    "index": c.index,
                    "label": c.label,
                    "activation": c.activation,
                    "contribution": c.contribution,
                    "heatmap": heatmap,
                    "note": c.note,
                }
                for c, heatmap in zip(concepts, _heatmaps(concepts, self.question), strict=True)
            ],
            "lines": explainer.lines(explanation),
            "extra": explanation.extra,
            "problem": "",
        }


def answer_images(subject: Subject, attached: Mapping[str, Explainer], images: Any, /, **options: Any) -> list[Answer]:
    """Answer for every image, in any usual form; the keywords are the fields of ``AnswerOptions``.

    ``answer_images(subject, {"concepts": concepts}, images, target="7", stability="full")[0].to_json()``
    """
    checked = options_of("answer_images", options)
    model = ExplainedModel.of(subject, attached)
    questions = [Question.of(model, x, checked) for x in pixels_of_any(subject, images)]
    return [raised(result) for result in answer(model, questions)] if questions else []


def explanations_of(
    explainer: Explainer,
    subject: Subject,
    images: Tensor,
    targets: Sequence[int | None],
    outputs: tuple[Tensor, dict[str, Tensor]] | None = None,
    **options: Any,
) -> list[Explanation]:
    """Return the explanations of pixels by one explainer, the part of an answer that an audit measures.

    ``targets`` has a class per image, None for the explainer's default; ``outputs`` are logits and layers of an earlier
    pass over them; ``options`` are keywords of ``explain_from``.
    """
    explainer.check_subject(subject)
    logits, activations = TorchPass(subject, [explainer]).run(images) if outputs is None else outputs
    return _one_each(
        explainer, explainer.explain_from(subject, images, logits, activations, targets, **options), images
    )


def _one_each(explainer: Explainer, explanations: list[Explanation], images: Tensor) -> list[Explanation]:
    """Return the explanations when there is one per image; anything else is a fault of the kind, whoever wrote it."""
    if len(explanations) != len(images):
        raise RuntimeError(
            f"kind {explainer.kind}: explain_from gave {len(explanations)} explanations for {len(images)} images; "
            "report this to its authors."
        )
    return explanations


def raised(result: Answer | Exception) -> Answer:
    """Return an answer; raise the error where there is one instead."""
    if isinstance(result, Exception):
        raise result
    return result


def answer(
    model: ExplainedModel, questions: Sequence[Question], on_stage: OnStage = no_stage
) -> list[Answer | Exception]:
    """Answer questions about one model, in order; one that fails gets its error and the others their answers.

    ``on_stage(stage, kind, rows)`` is called at the end of every stage (``forward``, an explainer's name,
    ``stability``) with the rows it was for; ``kind`` is that of the explainer, or ``-``.
    """
    everybody = range(len(questions))
    x = torch.stack([question.x for question in questions])
    groups = _stability_groups(model, questions)
    logits, activations = _run(model.forward, x, groups)
    predicted: list[int] = logits.argmax(1).tolist()
    on_stage("forward", "-", everybody)
    batch = _Batch(model, questions, x, logits, activations, predicted)
    for name, explainer in model.explainers.items():
        rows = [i for i in everybody if name in questions[i].names]
        if rows:
            batch.explain(name, explainer, rows)
            on_stage(name, explainer.kind, rows)
    targets = [p if q.target is None else q.target for q, p in zip(questions, predicted, strict=True)]
    stabilities = _stabilities(groups, x, targets)
    if stabilities:
        on_stage("stability", "-", list(stabilities))
    predictions = _predictions(logits, model.subject)
    return [
        batch.errors.get(i)
        or Answer(
            model.subject,
            question,
            predictions[i],
            {"index": t, "label": model.subject.class_names[t], "logit": float(logits[i, t])},
            {name: model.explainers[name] for name in question.names},
            batch.explanations[i],
            batch.problems[i],
            stabilities.get(i),
            model.identity,
        )
        for i, (question, t) in enumerate(zip(questions, targets, strict=True))
    ]


@dataclass
class _Batch:
    """Questions with what the shared pass gave for them, and what the explainers say."""

    model: ExplainedModel
    questions: Sequence[Question]
    x: Tensor
    logits: Tensor
    activations: dict[str, Tensor]
    predicted: list[int]
    errors: dict[int, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.explanations: list[dict[str, Explanation]] = [{} for _ in self.questions]
        self.problems: list[dict[str, str]] = [{} for _ in self.questions]

    def explain(self, name: str, explainer: Explainer, rows: Sequence[int]) -> None:
        """Let one explainer explain its rows, those of equal options together."""
        groups: dict[tuple[bool, tuple[tuple[str, Any], ...]], list[int]] = defaultdict(list)
        for i in rows:
            question = self.questions[i]
            problem = self._problem(name, explainer, i)
            if problem:
                if question.is_strict:
                    self.errors[i] = OptionError(problem)
                self.problems[i][name] = problem
            else:
                options = _per_request(explainer, question.options, self.model.search_limit_s)
                groups[question.options.heatmaps != "none", options].append(i)
        for (heatmaps, options), group in groups.items():

            def work(some: list[int], heatmaps: bool = heatmaps, options: Any = options) -> list[Explanation]:
                return self._explain_rows(explainer, some, heatmaps, dict(options))

            # a search draws its noise for a batch as a whole: alone, an image gets the same answer in any company
            results = [_each(work, [i])[0] for i in group] if explainer.searches else _each(work, group)
            for i, result in zip(group, results, strict=True):
                if isinstance(result, Exception):
                    self.errors[i] = result
                else:
                    self.explanations[i][name] = result

    def _problem(self, name: str, explainer: Explainer, i: int) -> str:
        """Return why an explainer has nothing to say of a row; empty when it has."""
        target = self.questions[i].target
        if target is None and explainer.config.target is not None:
            return ""  # it explains the class it was fitted for
        k = self.predicted[i] if target is None else target
        if explainer.can_explain(k):
            return ""
        names = self.model.subject.class_names
        classes = explainer.explainable_classes() or []
        fitted = ", ".join(names[c] for c in classes[:CLASSES_SHOWN]) + (", …" if len(classes) > CLASSES_SHOWN else "")
        return f"{name} cannot explain class {names[k]!r}; it was fitted for: {fitted or 'none'}."

    def _explain_rows(
        self, explainer: Explainer, rows: list[int], heatmaps: bool, options: dict[str, Any]
    ) -> list[Explanation]:
        whole = len(rows) == len(self.x)
        x = self.x if whole else self.x[rows]
        explanations = explainer.explain_from(
            self.model.subject,
            x,
            self.logits if whole else self.logits[rows],
            self.activations if whole else {key: value[rows] for key, value in self.activations.items()},
            [self.questions[i].target for i in rows],
            heatmaps=heatmaps,
            **options,
        )
        return _one_each(explainer, explanations, x)


def _each(work: Callable[[list[int]], list[Explanation]], rows: list[int]) -> list[Explanation | Exception]:
    """Do the work on all rows at once; when that fails, row by row, with the error of each that fails alone."""
    try:
        return list(work(rows))
    except Exception as error:
        if len(rows) > 1:
            return [_each(work, [row])[0] for row in rows]
        if isinstance(error, AuditError):
            log.warning("an explanation failed: %s", error)
        else:
            log.exception("an explanation failed")
        return [error]


def _per_request(explainer: Explainer, options: AnswerOptions, limit_s: float | None) -> tuple[tuple[str, Any], ...]:
    """Return the options that replace those of the explainer's fit for this request, its time within the limit."""
    values = {name: getattr(options, name) for name in explainer.per_request}
    if limit_s is not None and "timeout_s" in values:
        seconds = values["timeout_s"] or explainer.search_s
        values["timeout_s"] = limit_s if seconds is None or seconds > limit_s else values["timeout_s"]
    return tuple(sorted((name, value) for name, value in values.items() if value is not None))


@dataclass
class _Group:
    """Questions that ask for the stability with equal settings."""

    mode: Mode
    rows: list[int]
    sampler: Sampler
    shared: SharedPass | None = None


def _stability_groups(model: ExplainedModel, questions: Sequence[Question]) -> list[_Group]:
    rows_of: dict[tuple[Mode, int, float, int], list[int]] = defaultdict(list)
    for i, question in enumerate(questions):
        o = question.options
        if o.stability != "off":
            rows_of[o.stability, o.noise_samples, o.radius, o.seed].append(i)
    return [_Group(settings[0], rows, model.sampler(*settings)) for settings, rows in rows_of.items()]


def _run(forward: ForwardPass, x: Tensor, groups: Sequence[_Group]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and activations of the images; the noisy copies of the stability go through with them.

    Copies at which a gradient is needed do not: that is a pass of torch's own, whatever engine serves.
    """
    parts = [x]
    sharing = [
        g for g in groups if g.sampler.layer in forward.layers and g.sampler.n_gradients < g.sampler.noise_samples
    ]
    parts += [group.sampler.copies(x[group.rows]).flatten(0, 1).to(x) for group in sharing]
    everything = torch.cat(parts) if sharing else x
    at_once = max(len(x), MOST_NUMBERS // max(1, x[0].numel()))
    passes = [forward.run(part) for part in torch.split(everything, at_once)]
    if not sharing:
        return passes[0]
    logits = torch.cat([part for part, _ in passes])
    n, start = len(x), len(x)
    for group in sharing:
        layer, m = group.sampler.layer, len(group.rows)
        a = torch.cat([activations[layer] for _, activations in passes])
        copies = slice(start, start := start + m * (group.sampler.noise_samples - group.sampler.n_gradients))
        group.shared = SharedPass(
            torch.cat([a[group.rows][:, None], a[copies].reshape(m, -1, *a.shape[1:])], 1),
            torch.cat([logits[group.rows][:, None], logits[copies].reshape(m, -1, logits.shape[1])], 1),
        )
    return logits[:n], {key: value[:n] for key, value in passes[0][1].items()}


def _stabilities(groups: Sequence[_Group], x: Tensor, targets: list[int]) -> dict[int, dict[str, Any]]:
    """Return the stability by row, of the questions that asked for it."""
    by_row: dict[int, dict[str, Any]] = {}
    for group in groups:
        rows = group.rows
        measured: list[Stability] = group.sampler.measure(x[rows], [targets[i] for i in rows], group.shared)
        for i, s in zip(rows, measured, strict=True):
            by_row[i] = {
                "mode": group.mode,
                "layer": group.sampler.layer,
                "bound_reason": group.sampler.bound_reason,
                **s.to_json(),
            }
    return by_row


def _predictions(logits: Tensor, subject: Subject) -> list[dict[str, Any]]:
    """Return per row the prediction with the most probable classes."""
    probabilities, names = subject.probabilities(logits), subject.class_names
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :N_PROBABILITIES]  # of equals, argmax's first
    best = probabilities.gather(1, order)
    predictions: list[dict[str, Any]] = []
    for values, indices in zip(best.tolist(), order.tolist(), strict=True):
        top = [{"index": k, "label": names[k], "probability": p} for p, k in zip(values, indices, strict=True)]
        predictions.append({**top[0], "probabilities": top, "labels": None})
    if subject.output.name == "multilabel":
        for prediction, p in zip(predictions, probabilities, strict=True):
            likely = (p >= 0.5).nonzero()[:, 0].tolist()
            prediction["labels"] = [{"index": k, "label": names[k], "probability": float(p[k])} for k in likely]
    return predictions


def _heatmaps(concepts: Sequence[Concept], question: Question) -> list[Any]:
    """Return the heatmaps of one explanation in the style asked for, those of one size drawn together."""
    style = question.options.heatmaps
    heatmaps: list[Any] = [None] * len(concepts)
    if style == "none":
        return heatmaps
    sizes: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for j, c in enumerate(concepts):
        if c.heatmap is not None:
            sizes[tuple(c.heatmap.shape)].append(j)
    for size, some in sizes.items():
        maps = torch.stack([concepts[j].heatmap for j in some])  # type: ignore[misc]
        drawn: list[Any]
        if style == "array":
            drawn = [{"size": list(size), "values": grid} for grid in maps.double().round(decimals=6).tolist()]
        else:
            sides = [concepts[j].counts_for for j in some]
            painted = torch.tensor([side is not None for side in sides], device=maps.device)[:, None, None]
            against = [side is False for side in sides]
            drawn = list(heat_layers(maps * painted, against, (question.x.shape[1], question.x.shape[2])))
        for j, item in zip(some, drawn, strict=True):
            heatmaps[j] = item
    return heatmaps
