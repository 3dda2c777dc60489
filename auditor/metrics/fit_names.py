"""What the metrics of fits are called and which way is better: the names after ``explainer/<name>/fit/``.

A metric may have a detail after a slash (``relative_error/layer3``): the part before it has the words. A kind of
another package may measure what is not here; such a metric has no better direction and its own name as its title.
"""

from __future__ import annotations

from typing import Literal

# metric: (which way is better, title)
FIT: dict[str, tuple[Literal["up", "down", "none"], str]] = {
    "f_cls": ("up", "class kept"),
    "f_cls_positive": ("up", "class kept, images of the class"),
    "f_cls_contested": ("up", "class kept among the bases of all classes"),
    "f_cls_without": ("down", "class kept without its own basis"),
    "f_cls_runner_up": ("down", "class of the runner-up by its basis"),
    "f_reg": ("down", "value missed"),
    "f_reg_positive": ("down", "value missed, images of the class"),
    "f_reg_relative": ("down", "value missed, by the spread of the logit"),
    "f_reg_warm": ("none", "value missed before training"),
    "relative_error": ("down", "relative error, held-out images"),
    "relative_error_warm": ("none", "relative error before training"),
    "fit_relative_error": ("down", "relative error, images of the fit"),
    "integration_error": ("down", "error of the integral of gradients"),
    "basis_stability": ("up", "same concepts again"),
    "pull_away": ("down", "likeness of x-features"),
    "pull_away_live": ("down", "likeness of x-features that fire"),
    "alive": ("up", "x-features that fire, per class"),
    "dead": ("down", "x-features that never fire"),
    "diverged": ("down", "training diverged"),
    "purity": ("up", "label purity of the top images"),
    "cka_lambda": ("up", "CKA when the penalty is scaled"),
    "top_eigenvalues": ("down", "top eigenvalues of the cosines between concepts"),
    "off_diagonal": ("down", "cosines between different concepts"),
    "n_dead": ("down", "concepts that no image has"),
    "kkt": ("down", "distance from a stationary point"),
    "agreement": ("up", "tree and network agree"),
    "agreement_model": ("up", "tree and model agree"),
    "accuracy": ("up", "accuracy"),
    "accuracy_tree": ("up", "accuracy of the tree"),
    "accuracy_network": ("up", "accuracy of the network"),
    "accuracy_model": ("none", "accuracy of the model"),
    "accuracy_before": ("none", "accuracy before training"),
    "accuracy_warm": ("none", "accuracy of the warm start"),
    "classes_without_leaf": ("down", "classes without a leaf"),
    "zero_codes": ("none", "share of zero codes"),
    "fidelity": ("up", "attribute fidelity by F1"),
    "fidelity_honest": ("up", "attribute fidelity by F1, chosen on other images"),
    "fidelity_floor": ("none", "attribute fidelity of a constant"),
    "fidelity_honest_floor": ("none", "attribute fidelity of a constant, other images"),
    "fidelity_accuracy": ("up", "attribute fidelity by accuracy"),
    "fidelity_accuracy_floor": ("none", "attribute fidelity of a constant, by accuracy"),
    "probe_deepfacto": ("up", "probe on the factors"),
    "probe_nmf": ("none", "probe on plain NMF"),
    "probe_pca": ("none", "probe on PCA"),
    "probe_majority": ("none", "probe: most frequent answer"),
    "residual_layer": ("down", "residual of the layer's constraint"),
    "residual_product": ("down", "residual of the product's constraint"),
    "export_error": ("down", "error of the exported projection"),
    "sparsity": ("none", "share of zero activations"),
    "flip_area": ("down", "pixel-flip area"),
    "flip_area_random": ("none", "pixel-flip area of a random map"),
    "smallest_share": ("down", "smallest share of the image that keeps the value"),
    "gap_share": ("down", "Frank-Wolfe gap, by the distortion of a blank mask"),
    "distortion_share": ("down", "distortion, by that of a blank mask"),
    "surrogate_error": ("down", "error of the surrogate of the distortion"),
}


def direction_of(metric: str) -> Literal["up", "down", "none"]:
    """Return which way a metric of a fit is better.

    >>> direction_of("relative_error/layer3"), direction_of("rank")
    ('down', 'none')
    """
    return FIT.get(metric.partition("/")[0], ("none", ""))[0]


def fit_words(metric: str) -> tuple[str, str]:
    """Return title and sentence of a metric of a fit.

    >>> fit_words("cka_lambda/0.1")
    ('fit: CKA when the penalty is scaled, 0.1', 'measured by the fit itself, on images it held out')
    """
    base, _, detail = metric.partition("/")
    title = FIT.get(base, ("none", base.replace("_", " ")))[1] or base.replace("_", " ")
    return f"fit: {title}{f', {detail}' if detail else ''}", "measured by the fit itself, on images it held out"
