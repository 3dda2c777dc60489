"""What every metric of an audit is called, in words a release engineer understands, and which names can exist."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches

from auditor.metrics.fit_names import FIT, fit_words

# metric: (title, sentence)
WORDS: dict[str, tuple[str, str]] = {
    "accuracy": ("accuracy", "share of labelled images the model gets right"),
    "nll": ("log loss", "mean surprise at the true class; 0 is certain and right"),
    "ece": ("calibration error", "mean gap between how sure the model is and how often it is right"),
    "cross_entropy": ("log loss, chosen images", "mean surprise at the true class on the explained images"),
    "worst_class_accuracy": ("accuracy of the worst class", "share of images right in the class that does worst"),
    "c1_sampled": ("reaction of the layer, sampled", "largest change per pixel change among sampled pairs; no less"),
    "c1_local": (
        "reaction of the layer, local",
        "largest change per pixel change right at the images, by power iteration",
    ),
    "c1_certified": ("reaction of the layer, certified", "no image can make it change more than this per pixel change"),
    "c2_sampled": (
        "change of reasons, sampled",
        "largest change of the pixel gradient per pixel change, sampled; no less",
    ),
    "c2_local": ("change of reasons, local", "largest change of the pixel gradient right at the images"),
    "c2_certified": ("change of reasons, certified", "no image can make the gradient change more than this"),
    "mean_abs_weight": ("mean |w|", "mean absolute weight"),
    "near_zero_share": ("near zero", "share of weights below a thousandth of the largest"),
    "cosine_max": ("largest |cos|", "largest absolute cosine of two rows"),
    "cosine_median": ("median |cos|", "median absolute cosine of two rows"),
    "cosine_share_below": ("nearly apart", "share of pairs of rows that are nearly orthogonal"),
    "faithfulness": ("norm follows importance", "correlation of a row's norm with the loss when it is zeroed"),
    "verified": ("verified", "every byte of the explainer, and the model it was fitted to, are what was attached"),
    "f_cls": ("class kept", "share of images whose class survives when the explanation stands in for the model"),
    "f_reg": ("value missed", "mean distance between the value the concepts give and the model's own"),
    "completeness_gap": ("completeness gap", "how far bias, contributions and residual miss the value they add up to"),
    "residual_share": ("unexplained share", "part of the model's value that the concepts leave unexplained"),
    "flip_area": ("pixel-flip area", "change of the probability while the least relevant cells turn to noise first"),
    "deletion_area": ("deletion area", "change of the probability while the most relevant cells turn to noise first"),
    "flip_gain": ("gain over a random map", "by how much the pixel-flip area beats a random map on the same image"),
    "noise_c2": ("reaction to noise", "largest change of the contributions per small change of the image"),
    "noise_similarity": ("alike under noise", "correlation of explanations before and after a little noise"),
    "heatmap_overlap": ("overlap of heatmaps", "how much an image's heatmaps repeat each other; 0 not at all"),
    "heatmap_spread": ("spread of heatmaps", "entropy of one image's heatmap over a 4 x 4 grid; small is one place"),
    "randomisation": ("survives destroyed weights", "correlation with explanations of the model with shuffled weights"),
    "basis_stability": ("same concepts again", "how well re-fits from other starts find the same concepts"),
    "fidelity": ("attribute fidelity", "how well single codes of the tree's features stand for attributes, by F1"),
    "grouping_purity": (
        "grouped by an agent",
        "purity of groups of images that are made from the explanations alone, without people; beside: shuffled",
    ),
    "group_dominance": (
        "largest group of concepts",
        "share of what counts for a class that one group of concepts gives, in the class where it gives most",
    ),
    "group_ablation": (
        "lost without the group",
        "share of images that change class when the largest group of their class is taken out of the layer",
    ),
    "group_ablation_without_residual": (
        "lost without group and residual",
        "the same when what the concepts leave unexplained is taken out too; beside: only that",
    ),
    "similarity": ("similarity of concepts", "mean correlation of matched concepts of the two versions"),
    "null_low": ("re-fit noise", "similarity that re-fitting the same version falls below once in a hundred times"),
    "retraining_low": ("retraining noise", "similarity that an honest retraining falls below once in a hundred times"),
    "alarm": ("drift alarm", "1 when the concepts changed beyond what re-fitting and honest retraining change"),
    "regions": ("same deciding regions", "share of the deciding pixels that both versions have on the same images"),
    "reliance": ("rise of reliance", "by how much a class hangs more on one thing than in the baseline, at most"),
    "born": ("new concepts", "concepts without a counterpart in the baseline"),
    "died": ("lost concepts", "concepts of the baseline without a counterpart"),
}

STUDY: dict[str, tuple[str, str]] = {
    "purity": ("grouped by people", "purity of people's groups against the model's predictions; beside: chance"),
    "purity_of_labels": ("grouped by people, labels", "the same against the labels of the data"),
    "gain": ("helps people", "purity of people's groups less that of the same people who see the images alone"),
    "confidence": ("confidence of people", "how sure people are of their groups; 0 is not at all, 1 is 100%"),
    "rating": ("rated by people", "what people think of the assistant; 0 is very poor, 1 very good"),
    "seconds": ("seconds of people", "how long people take for a batch of images"),
}

RELIANCE: dict[str, tuple[str, str]] = {
    "found": ("classes that hang on one thing", "classes for which one thing was found that decides by itself"),
    "score": ("hangs on one thing", "how strongly a class follows one thing that is given to images of other classes"),
    "sameness": ("alike", "how alike the deciding regions of the class look"),
    "sameness_early": ("alike in an early layer", "how alike they are in a layer that knows nothing of classes"),
    "edge_distance": ("distance from the edge", "of the deciding regions, as a share of the frame; .5 is the middle"),
    "concept_leak": ("predicted by one concept", "how well one concept (or group) alone predicts the class"),
    "concept_area": ("area of that concept", "share of the image that this concept covers"),
    "place_entropy": ("spread over the frame", "entropy of where the deciding regions lie"),
    "colour_leak": ("predicted by colours", "how well the colours of the whole image predict the class; .5 is chance"),
    "spectrum_leak": (
        "predicted by texture",
        "how well the spectrum of the whole image predicts the class; .5 is chance",
    ),
    "pattern_leak": (
        "predicted by a fixed pattern",
        "how well the mean difference of the class predicts it; .5 is chance",
    ),
}

RELIANCE_FAMILIES = ("necessity_", "margin_without_", "sufficiency_", "transplant_", "heat_on_")

MODEL = frozenset(
    {
        *("accuracy", "nll", "ece", "worst_class_accuracy", "cross_entropy"),
        *("c1_sampled", "c1_local", "c1_certified", "c2_sampled", "c2_local", "c2_certified"),
    }
)
DRIFT = frozenset({"similarity", "null_low", "retraining_low", "alarm", "born", "died", "regions", "reliance"})
EXPLAINER = frozenset(
    {
        *("f_cls", "f_reg", "completeness_gap", "residual_share", "flip_area", "deletion_area", "flip_gain"),
        *("noise_c2", "noise_similarity", "heatmap_overlap", "heatmap_spread", "randomisation", "basis_stability"),
        *("group_dominance", "group_ablation", "group_ablation_without_residual", "grouping_purity", "fidelity"),
        "verified",
    }
)
DRIFT_DIRECTION = {
    "similarity": "up",
    "null_low": "none",
    "retraining_low": "none",
    "alarm": "down",
    "born": "down",
    "died": "down",
    "regions": "up",
    "reliance": "down",
}


def split(name: str) -> tuple[str, str, str]:
    """Return family, owner (layer, explainer or nothing) and metric of a name.

    >>> split("explainer/concepts/f_cls"), split("model/accuracy"), split("model/layer4.0/sparsity")
    (('explainer', 'concepts', 'f_cls'), ('model', '', 'accuracy'), ('model', 'layer4.0', 'sparsity'))
    """
    family, _, rest = name.partition("/")
    if family == "explainer":
        owner, _, metric = rest.partition("/")
        return family, owner, metric
    head, slash, tail = rest.rpartition("/")
    if family == "model" and slash and head != "accuracy" and head.partition("/")[0] != "reliance":
        return family, head, tail
    return family, "", rest


# What the papers call orthogonality and locality is of a whole data set (`auditor xnn-table`); an audit's is per image
FORMER = {"orthogonality": "heatmap_overlap", "locality": "heatmap_spread"}


def current(name: str) -> str:
    """Return what a metric is called now, of a name that a policy of an earlier release may have.

    >>> current("explainer/heads/locality"), current("model/accuracy")
    ('explainer/heads/heatmap_spread', 'model/accuracy')
    """
    family, owner, metric = split(name)
    return f"{family}/{owner}/{FORMER[metric]}" if family == "explainer" and metric in FORMER else name


def words(name: str) -> tuple[str, str]:
    """Return title and sentence of a metric; an unknown one is its own title.

    >>> words("model/accuracy/7")[0]
    'accuracy of class 7'
    """
    family, _, metric = split(name)
    base, _, detail = metric.partition("/")
    if family == "study" and name.count("/") == 3:
        _, study, base, condition = name.split("/")
        title, sentence = STUDY.get(base, (base.replace("_", " "), ""))
        return f"{title}: {condition}", f"{sentence}, in the study {study}"
    if base == "accuracy" and detail:
        return f"accuracy of class {detail}", "share of images of this class that are right"
    if base == "reliance":
        return _reliance_words(detail)
    if family == "explainer" and base == "fit" and detail:
        return fit_words(detail)
    if base == "randomisation" and detail:
        return f"survives shuffling down to {detail}", "the same with this layer and all above it shuffled"
    if base == "cka":
        return f"likeness of layer {detail}", "linear CKA of the layer in both versions; 1 is the same"
    return WORDS.get(base, (base.replace("_", " "), ""))


def _reliance_words(detail: str) -> tuple[str, str]:
    owner, _, measure = detail.rpartition("/")
    title, sentence = RELIANCE.get(measure, (measure.replace("_", " "), ""))
    base, _, rest = measure.partition("_")
    if base == "necessity":
        share, _, fill = rest.partition("_")
        title, sentence = f"lost when {share}% is hidden", f"share that changes class; the hottest {share}%, by {fill}"
        if fill == "scattered":
            title, sentence = f"lost when a random {share}% is hidden", f"share that changes class; {share}% at random"
    elif measure.startswith("margin_without_"):
        share, _, fill = measure.removeprefix("margin_without_").partition("_")
        title = f"margin without {share}%"
        sentence = f"logit of the class less the largest other one, the hottest {share}% hidden by {fill}"
    elif base == "sufficiency":
        title, sentence = f"kept by {rest}% alone", f"share that keeps its class when only the hottest {rest}% is left"
    elif base == "transplant":
        what = rest.replace("_", " ")
        title, sentence = f"follows the {what}", f"share of other images that become the class when given its {what}"
    elif measure.startswith("heat_on_"):
        part = measure.removeprefix("heat_on_")
        title, sentence = f"heat on {part}", f"share of the heat that lies on {part}, beside the share of the image"
    of = "" if not owner else ", worst class" if owner == "worst" else f", class {owner}"
    return title + of if owner != "x" else title, sentence


def plain(name: str) -> str:
    """Return a class name as it can stand in a metric's name.

    >>> plain("Bald Eagle (adult)")
    'Bald Eagle _adult_'
    """
    return re.sub(r"[^A-Za-z0-9_. -]", "_", name)


def can_exist(name: str, explainers: Collection[str]) -> bool:
    """Whether an audit could have measured a metric of this name, with these explainers attached.

    >>> [can_exist(f"explainer/concepts/fit/{metric}", {"concepts"}) for metric in ("f_cls", "f_clss")]
    [True, False]
    """
    family, owner, metric = split(name)
    base = metric.partition("/")[0]
    if family == "study":
        return name.count("/") == 3 and name.split("/")[2] in STUDY
    if family == "explainer" and base == "fit":
        return owner in explainers and metric.split("/")[1] in FIT
    if family == "explainer":
        return owner in explainers and base in EXPLAINER
    if family == "drift":
        return base in DRIFT or base == "cka"
    if family == "model" and base == "reliance":
        measure = metric.rpartition("/")[2]
        n_slashes = 1 if measure == "found" else 2  # slashes: reliance/found, reliance/CLASS/MEASURE
        return metric.count("/") == n_slashes and (measure in RELIANCE or measure.startswith(RELIANCE_FAMILIES))
    return family == "model" and not owner and base in MODEL


def nearest(name: str, names: Collection[str]) -> list[str]:
    """Return up to three known names that look like a wrong one."""
    return get_close_matches(name, sorted(names), n=3, cutoff=0.5)
