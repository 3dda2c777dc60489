"""Hyper-parameters of every method of the XNN paper's table, chosen by cross-validation on the training images.

Heads are tried over beta, eta and q, Lasso over alpha; what is compared is F_reg on the fold left out, mean over the
classes. A weaker penalty always fits the logit a little better, so the strongest penalty within one standard error
(over folds) of the best is taken: that is the one the penalty is there for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from auditor.errors import OptionError
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.xnn.examples import Examples
from auditor.explainers.xnn.explainer import XnnConfig
from auditor.explainers.xnn.table_methods import HEADS, by_channel, fitted_heads, lasso
from auditor.subject.subject import Subject

BETAS, ETAS, QS = (0.01, 0.05, 0.2), (0.01, 0.05, 0.2), (1.0, 10.0)
ALPHA_SHARES = (0.3, 0.1, 0.03, 0.01)  # of the alpha from which Lasso keeps nothing
# what each variant's objective has; the others would be tried for nothing
GRIDS: dict[str, list[dict[str, float]]] = {
    "srae": [{"beta": b, "eta": e, "q": q} for b, e, q in itertools.product(BETAS, ETAS, QS)],
    "sae": [{"beta": b} for b in BETAS],
}


def tuned(
    subject: Subject, examples: Examples, classes: list[int], layer: str, method: str, config: XnnConfig, folds: int
) -> tuple[XnnConfig, float | None, str]:
    """Return the configuration, Lasso's alpha where it is Lasso, and the choice in words; NN, CAE and Z have none."""
    if folds < 2:
        raise OptionError(f"xnn table: a cross-validation needs at least 2 folds, got {folds}.")
    learned = examples.learned
    if method == "lasso":
        grid = [{"alpha": share * _largest_alpha(learned, classes)} for share in ALPHA_SHARES]
        best = choose(grid, lambda option: _lasso_errors(learned, classes, option["alpha"], folds))
        return config, best["alpha"], f"alpha {best['alpha']:.3g}"
    grid = GRIDS.get(method, []) if method in HEADS else []
    if not grid:
        return config, None, ""

    def errors(option: dict[str, float]) -> list[float]:
        trial = config.model_copy(update={**option, "variant": method})
        return [_head_error(subject, part, rest, classes, layer, trial) for part, rest in split(learned, folds)]

    best = choose(grid, errors)
    return config.model_copy(update=best), None, ", ".join(f"{k} {v:g}" for k, v in best.items())


def choose(grid: Sequence[dict[str, float]], errors: Callable[[dict[str, float]], list[float]]) -> dict[str, float]:
    """Return the option with the strongest penalties whose mean error is within one standard error of the least.

    >>> choose([{"beta": 0.1}, {"beta": 1.0}, {"beta": 10.0}], lambda o: [1.0, 1.2 + 0.01 * o["beta"] ** 2])
    {'beta': 1.0}
    """
    tried = [(option, torch.tensor(errors(option), dtype=torch.float64)) for option in grid]
    best = min(tried, key=lambda item: float(item[1].mean()))[1]
    limit = float(best.mean()) + (float(best.std()) / math.sqrt(len(best)) if len(best) > 1 else 0.0)
    fit = [option for option, each in tried if float(each.mean()) <= limit]
    return max(fit, key=lambda option: tuple(option.values()))


def split(examples: Examples, folds: int) -> list[tuple[Examples, Examples]]:
    """Return pairs of what to learn from and what is left out; each example is left out once."""
    n = len(examples.Z)
    fold = torch.arange(n) % folds
    pairs = []
    for f in range(folds):
        rows = (fold != f).nonzero()[:, 0]
        m = len(rows)
        choose_rows = torch.arange(m)[torch.arange(m) % 5 == 4]  # of these, to decide when the training stops
        learn_rows = torch.arange(m)[torch.arange(m) % 5 != 4]
        part = Examples(
            examples.Z[rows], examples.logits[rows], examples.labels[rows],
            FittedImages.of_rows(m, learn=learn_rows, choose=choose_rows),
        )  # fmt: skip
        pairs.append((part, examples.part(fold == f)))
    return pairs


def _head_error(
    subject: Subject, part: Examples, rest: Examples, classes: list[int], layer: str, config: XnnConfig
) -> float:
    heads, _ = fitted_heads(subject, part, classes, layer, config)
    with torch.no_grad():
        predicted = heads.predict(heads.encode(rest.Z))
    return float((predicted - rest.logits[:, classes].T).abs().mean())


def _lasso_errors(examples: Examples, classes: list[int], alpha: float, folds: int) -> list[float]:
    def error(part: Examples, rest: Examples) -> float:
        each = [(lasso(part.learned, k, alpha, 1), k) for k in classes]
        return sum(float((by_channel(rest.Z) @ w + c - rest.logits[:, k]).abs().mean()) for (w, c), k in each) / len(
            each
        )

    return [error(part, rest) for part, rest in split(examples, folds)]


def _largest_alpha(examples: Examples, classes: list[int]) -> float:
    Z: Tensor = by_channel(examples.Z).double()
    Z = Z - Z.mean(0)
    y: Any = examples.logits[:, classes].double()
    return float((Z.T @ (y - y.mean(0))).abs().max()) / len(Z)
