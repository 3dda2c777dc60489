"""How faithful a predicted logit is: error, unchanged decisions, also near the boundary and on positives alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Faithfulness:
    """Figures of one class; NaN where no example qualifies."""

    f_reg: float  # mean |ybar - y|
    f_cls: float  # share of examples whose arg max stays when the class logit is replaced by ybar
    f_cls_boundary: float  # the same on examples whose two largest logits include the class
    f_reg_positive: float
    f_cls_positive: float
    f_reg_relative: float  # f_reg over the standard deviation of the logit

    def to_json(self) -> dict[str, float]:
        """Return the figures by name."""
        return asdict(self)


def faithfulness_of(ybar: Tensor, logits: Tensor, k: int, positive: Tensor) -> Faithfulness:
    """Measure the prediction ``ybar`` (examples,) of logit ``k`` against all ``logits`` (examples, classes).

    >>> logits = torch.tensor([[2.0, 1.0], [0.0, 3.0]])
    >>> f = faithfulness_of(torch.tensor([2.5, 0.0]), logits, 0, torch.tensor([True, False]))
    >>> f.f_reg, f.f_cls, f.f_reg_positive
    (0.25, 1.0, 0.5)
    """
    y = logits[:, k]
    error = (ybar - y).abs()
    replaced = logits.clone()
    replaced[:, k] = ybar
    same = (replaced.argmax(1) == logits.argmax(1)).float()
    near = (logits.topk(min(2, logits.shape[1]), 1).indices == k).any(1)
    spread = float(y.std()) if len(y) > 1 else float("nan")
    return Faithfulness(
        f_reg=_mean(error),
        f_cls=_mean(same),
        f_cls_boundary=_mean(same[near]),
        f_reg_positive=_mean(error[positive]),
        f_cls_positive=_mean(same[positive]),
        f_reg_relative=_mean(error) / spread if spread > 0 else float("nan"),
    )


def with_heads(ybar: Tensor, logits: Tensor, classes: list[int]) -> Tensor:
    """Return logits (examples, classes) with those of ``classes`` replaced by ``ybar`` (len(classes), examples).

    >>> with_heads(torch.tensor([[9.0]]), torch.tensor([[1.0, 2.0]]), [1]).tolist()
    [[1.0, 9.0]]
    """
    replaced = logits.clone()
    replaced[:, classes] = ybar.T.to(logits)
    return replaced


def _mean(x: Tensor) -> float:
    return float(x.double().mean()) if x.numel() else float("nan")


def mean_over(items: list[Faithfulness]) -> dict[str, float]:
    """Average the figures over classes, leaving out what could not be measured."""
    rows = torch.tensor([list(f.to_json().values()) for f in items], dtype=torch.float64)
    return dict(zip(items[0].to_json(), torch.nanmean(rows, 0).tolist(), strict=True))
