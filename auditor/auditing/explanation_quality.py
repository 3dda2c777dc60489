"""How good the explanations of one explainer are, on held-out images and through its public face alone.

Every measure goes through ``Explainer.explain``, so it fits any kind; what does not fit is skipped with the reason.

=====================  ==========  =============================================================================
``f_cls``              up          share of images whose class survives when the explanation stands in for the model
``f_reg``              down        mean |value given by the concepts - value of the model|
``completeness_gap``   down        |bias + contributions + residual - target value|, relative: 0 up to rounding
``residual_share``     down        |residual| / max(1, |target value|): what the concepts leave unexplained
``flip_area``          down        change of the probability while the least relevant cells turn to noise first
``deletion_area``      up          the same while the most relevant go first
``flip_gain``          up          by how much ``flip_area`` beats a random map on the same image; null 0
``noise_c2``           down        largest change of the contributions per change of the image, within a radius
``noise_similarity``   up          mean correlation of explanations before and after that noise
``heatmap_overlap``    down        O1 of the concepts' heatmaps in one image; null: the same maps, shuffled
``heatmap_spread``     down        entropy of one image's heatmap over a 4 x 4 grid; null: evenly spread, log 16
``randomisation``      down        correlation of explanations with those of the model with all weights shuffled
``basis_stability``    up          how well a re-fit finds the same concepts
``grouping_purity``    up          purity of groups of images made from the contributions alone; null: shuffled
``group_…``            none        dominance of a class by its largest group of concepts, and what is left without it
=====================  ==========  =============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from auditor.attribution.heatmap import upsample
from auditor.auditing.case import Case, Effort, noted, relevance
from auditor.auditing.explanation_changes import basis, noise, randomisation
from auditor.auditing.group_ablation import NAMES as group_ablation_names
from auditor.auditing.group_ablation import group_ablation, group_ablation_passes
from auditor.auditing.grouping import NAMES as grouping_names
from auditor.auditing.grouping import grouping
from auditor.auditing.image_work import flipped
from auditor.auditing.images import AuditImages
from auditor.auditing.performance import both_sides, two_sided
from auditor.errors import AuditError
from auditor.explainers.explanation import Explanation
from auditor.metrics.locality import grid_parts, locality
from auditor.metrics.measure import Direction, Measure, of_items, skipped
from auditor.metrics.orthogonality import orthogonality
from auditor.metrics.sequential import is_settled
from auditor.perturbation.cells import Partition, grid
from auditor.perturbation.pixel_flipping import MaskedImages
from auditor.runners.runner import current
from auditor.subject.outputs import Output
from auditor.subject.subject import Subject

CELLS = 8  # per side of the grid that pixel flipping works on, at most
FLIP_CHUNK = 64  # images per forward pass: more only costs memory
LOCALITY_SIDE = 16
EXPLAINING = 3.0  # forward passes that one explanation takes at most, gradients through upper layers included
MAX_GAP = 1e-4  # what docs/design.md promises of every explanation
FAITHFULNESS: Mapping[str, Direction] = {
    "f_cls": "up",
    "f_reg": "down",
    "completeness_gap": "down",
    "residual_share": "down",
}
FLIPS: Mapping[str, Direction] = {"flip_area": "down", "deletion_area": "up", "flip_gain": "up"}


def faithfulness(case: Case) -> dict[str, Measure]:
    """Return f_cls, f_reg, completeness_gap and residual_share."""
    complete = [e for e in case.explanations if e.bias is not None and e.residual is not None]
    if len(complete) < len(case.explanations):
        reason = f"kind {case.explainer.kind} gives relevance without contributions"
        return {name: skipped(reason, direction) for name, direction in FAITHFULNESS.items()}
    seed = case.seed
    gaps = of_items([e.gap() for e in complete], "down", seed=seed)
    if gaps.status == "passed" and max(gaps.per_image) > MAX_GAP:
        worst = f"the parts miss the target value by {max(gaps.per_image):.2g} of it, beyond {MAX_GAP:g}"
        gaps = replace(gaps, status="failed", reason=worst)
    measures = {"completeness_gap": gaps}
    residual = [abs(e.residual or 0.0) for e in complete]
    scale = [max(1.0, abs(e.target_value)) for e in complete]
    if all(not r for r in residual) or case.explainer.adds_up_by_construction:
        measures["residual_share"] = skipped(f"contributions of kind {case.explainer.kind} leave no residual", "down")
    else:
        measures["residual_share"] = of_items([r / s for r, s in zip(residual, scale, strict=True)], "down", seed=seed)
    logits = case.sample.logits.double()
    if _is_surrogate(complete):
        p = both_sides(case.subject.probabilities(logits))
        agree = [
            float(e.target.index == e.prediction.index) if math.isfinite(e.target_value) else math.nan for e in complete
        ]
        miss = [abs(e.target_value - float(p[i, e.target.index])) for i, e in enumerate(complete)]
        measures["f_cls"] = of_items(agree, "up", null=_chance(logits), seed=seed)
        measures["f_reg"] = of_items(miss, "down", seed=seed)
    elif case.explainer.adds_up_by_construction:
        reason = f"contributions of kind {case.explainer.kind} add up to the logit by construction; see flip_area"
        measures |= {"f_cls": skipped(reason, "up"), "f_reg": skipped(reason, "down")}
    else:
        measures |= _stand_in(case, complete, logits)
    return measures


def _stand_in(case: Case, complete: Sequence[Explanation], logits: Tensor) -> dict[str, Measure]:
    """Judge the logits that the concepts alone give: of all classes where the kind gives them, else of the target."""
    hat = case.explainer.stand_in(case.subject, case.sample.images)
    targets = torch.tensor([e.target.index for e in complete])
    if hat is None:
        sums = torch.tensor([(e.bias or 0.0) + sum(c.contribution or 0.0 for c in e.concepts) for e in complete])
        hat = logits.clone()
        hat[torch.arange(len(complete)), targets] = sums.double()
        error = (hat - logits).abs().gather(1, targets[:, None])[:, 0]
    else:
        hat = hat.double().cpu()
        error = (hat - logits).abs().mean(1)
    same = (two_sided(hat).argmax(1) == two_sided(logits).argmax(1)).double()
    same[~hat.isfinite().all(1)] = torch.nan  # argmax takes NaN for the largest
    return {
        "f_cls": of_items(same, "up", null=_chance(logits), seed=case.seed),
        "f_reg": of_items(error, "down", null=float((logits - logits.mean(0)).abs().mean()), seed=case.seed),
    }


def _is_surrogate(explanations: Sequence[Explanation]) -> bool:
    """Whether the target value is not the model's own logit (a tree's value)."""
    finite = [e for e in explanations if math.isfinite(e.target_value)]
    return any(abs(e.target_value - e.target.logit) > 1e-3 * max(1.0, abs(e.target.logit)) for e in finite)


def _chance(logits: Tensor) -> float:
    """Return how often always answering the most frequent class would agree."""
    predicted = two_sided(logits).argmax(1)
    return float(predicted.bincount().max() / len(predicted))


def flips(case: Case) -> dict[str, Measure]:
    """Return flip_area, deletion_area and flip_gain; null: random maps under the same noise.

    Images are added until it is clear whether the gain over random maps is above or below zero.
    """
    masked = case.masked or masked_images(case.subject, case.effort, case.seed)
    assert masked.partition.layout is not None
    areas = torch.zeros(3, 0, dtype=torch.float64)  # least relevant first, most relevant first, random order
    rounds, n_explained = case.rounds(case.effort.flip_images), 0
    for k, rows in enumerate(rounds):
        sample, explanations = case.rows(rows)
        maps = [relevance(e, masked.partition.layout) for e in explanations]
        with_map = [i for i, m in enumerate(maps) if m is not None]
        n_explained += len(rows)
        if with_map:
            scores = torch.stack([m.flatten() for m in maps if m is not None])
            if not bool(scores.isfinite().all()):
                return {name: of_items([math.nan], direction) for name, direction in FLIPS.items()}
            targets = torch.tensor([explanations[i].target.index for i in with_map])
            areas = torch.cat([areas, _areas(case, masked, sample.rows(with_map), targets, scores)], 1)
        case.progress("flipping pixels", k + 1, len(rounds))
        if is_settled(areas[2] - areas[0], [0.0], len(rounds)):
            break
    forward, reverse, null = areas
    if not len(null):
        reason = f"kind {case.explainer.kind} gives no heatmaps of this layer"
        return {name: skipped(reason, direction) for name, direction in FLIPS.items()}
    left_out = (
        "" if len(null) == n_explained else f"{n_explained - len(null)} images have an empty map and are left out"
    )
    measures = {
        "flip_area": of_items(forward, "down", null=float(null.mean()), seed=case.seed),
        "deletion_area": of_items(reverse, "up", null=float(null.mean()), seed=case.seed),
        "flip_gain": of_items(null - forward, "up", null=0.0, seed=case.seed),
    }
    return {name: noted(m, left_out) for name, m in measures.items()}


def _areas(case: Case, masked: MaskedImages, sample: AuditImages, targets: Tensor, scores: Tensor) -> Tensor:
    """Return (3, images): the areas of the maps, of the maps turned around, and of random ones."""
    group = max(1, masked.partition.size // case.effort.flip_steps)
    random = torch.stack([masked.random_scores(k) for k in sample.index])
    maps = torch.stack([scores, -scores, random])
    return flipped(current(), masked, group, sample.images, targets, maps, list(sample.index))


@dataclass(frozen=True)
class TwoSidedLogits:
    """The logits of a model; one logit is given two sides."""

    subject: Subject

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits of pixels."""
        return two_sided(self.subject.logits(x).float().cpu())


def masked_images(subject: Subject, effort: Effort, seed: int) -> MaskedImages:
    """Return the images with noise in some cells, of which every mask is run once for all explainers."""
    output = subject.output if subject.n_classes > 1 else Output()  # one logit is given two sides
    cells = flip_cells(subject.input_shape)
    return MaskedImages(
        TwoSidedLogits(subject), cells, draws=effort.flip_draws, seed=seed, chunk=FLIP_CHUNK, output=output
    )


def flip_cells(shape: tuple[int, int, int]) -> Partition:
    """Return the grid that pixel flipping works on."""
    return grid(shape, min(shape[1], CELLS), min(shape[2], CELLS))


def shape_of_maps(case: Case) -> dict[str, Measure]:
    """Return overlap and spread of the concepts' heatmaps, per image (those of [XNN] are of a whole data set)."""
    parts = grid_parts((LOCALITY_SIDE, LOCALITY_SIDE))
    generator = torch.Generator().manual_seed(case.seed)
    overlap, null, spread = [], [], []
    for e in case.explanations:
        maps = [c.heatmap.float() for c in e.concepts if c.heatmap is not None and float(c.heatmap.sum()) > 0]
        if not maps or maps[0].numel() < 4:
            continue
        weights = [c.strength for c in e.concepts if c.heatmap is not None and float(c.heatmap.sum()) > 0]
        entropies = [locality([upsample(m, (LOCALITY_SIDE, LOCALITY_SIDE))], parts) for m in maps]
        mass = sum(w for w, h in zip(weights, entropies, strict=True) if h is not None)
        if mass > 0:
            spread.append(sum(w * h.entropy for w, h in zip(weights, entropies, strict=True) if h is not None) / mass)
        cosines = orthogonality(torch.stack(maps)[None]) if len({m.shape for m in maps}) == 1 else None
        if cosines is not None:
            overlap.append(cosines.o1 / math.sqrt(cosines.n))
            shuffled = torch.stack([m.flatten()[torch.randperm(m.numel(), generator=generator)] for m in maps])
            other = orthogonality(shuffled[None, :, None])
            null.append(other.o1 / math.sqrt(other.n) if other is not None else math.nan)
    reason = f"kind {case.explainer.kind} gives no heatmaps of this layer"
    n = len(case.explanations)
    chance = sum(null) / len(null) if null else None
    results = {}
    for name, values, base in (("heatmap_overlap", overlap, chance), ("heatmap_spread", spread, math.log(16))):
        if not values:
            results[name] = skipped(reason if not spread else "fewer than two concepts have a heatmap", "down")
        else:
            left = "" if len(values) == n else f"{n - len(values)} images have no maps to compare and are left out"
            results[name] = noted(of_items(values, "down", null=base, seed=case.seed), left)
    return results


def no_passes(case: Case) -> float | None:
    """Return the budget of a check that reads what other checks have computed."""
    return 0.0


def _faithfulness_passes(case: Case) -> float | None:
    return None if case.explainer.searches else EXPLAINING + 1


def _flip_passes(case: Case) -> float | None:
    e = case.effort
    alone = 2 * e.flip_draws * (e.flip_steps - 1)  # the two ends and the random order are shared
    shared = 1 + e.flip_draws * e.flip_steps
    return e.share(e.flip_images) * (alone + shared)


def _noise_passes(case: Case) -> float | None:
    e = case.effort
    return None if case.explainer.searches else e.share(e.noise_images) * e.noise_samples * EXPLAINING


def _randomisation_passes(case: Case) -> float | None:
    e = case.effort
    return None if case.explainer.searches else e.share(e.random_images) * e.random_stages * EXPLAINING


def _basis_passes(case: Case) -> float | None:
    return None if case.effort.refits else 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """Measures taken together: the function, the names it gives with the direction that is better, and its budget.

    ``passes`` gives the forward passes per chosen image that it takes at most; None: not known beforehand.
    """

    take: Callable[[Case], dict[str, Measure]]
    names: Mapping[str, Direction]
    passes: Callable[[Case], float | None] = no_passes


GROUPS: Mapping[str, Group] = {
    "faithfulness": Group(faithfulness, FAITHFULNESS, _faithfulness_passes),
    "flipping": Group(flips, FLIPS, _flip_passes),
    "randomisation": Group(randomisation, {"randomisation": "down"}, _randomisation_passes),
    "noise": Group(noise, {"noise_c2": "down", "noise_similarity": "up"}, _noise_passes),
    "heatmaps": Group(shape_of_maps, {"heatmap_overlap": "down", "heatmap_spread": "down"}),
    "basis": Group(basis, {"basis_stability": "up"}, _basis_passes),
    "groups": Group(group_ablation, group_ablation_names, group_ablation_passes),
    "grouping": Group(grouping, grouping_names),
}

NAMES = frozenset(name for group in GROUPS.values() for name in group.names) | {"verified"}


def take(name: str, case: Case) -> dict[str, Measure]:
    """Take one group's measures; when it cannot be done they have failed, with the reason, and pass no gate."""
    group = GROUPS[name]
    try:
        return group.take(case)
    except AuditError as error:
        reason = " ".join(str(error).split())
        return {k: Measure(math.nan, n=0, direction=d, status="failed", reason=reason) for k, d in group.names.items()}
