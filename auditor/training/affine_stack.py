"""A stack of affine layers with ReLU between, as the closed-form methods see it: matrices, biases, and a way back.

Full ADMM, Taylor's variant, BCD and dlADMM split every layer into its linear map and its ReLU; they need exactly this
architecture, while Block-ADMM takes any modules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as nf

from auditor.errors import ShapeError
from auditor.training.block_calculus import AffineCalculus, calculus_of
from auditor.training.block_variables import check_room
from auditor.training.cycle import check_blocks, check_labels


class AffineStack:
    """Layers  a_l = relu(W_l a_{l-1} + b_l),  the last without ReLU; ``x`` (samples, …) is flattened."""

    def __init__(self, blocks: Sequence[nn.Module], x: Tensor, y: Tensor, where: str, n_kept: int) -> None:
        shapes = check_blocks(blocks, x, where)
        check_labels(y, len(x), shapes[-1][0], where)
        maps = [calculus_of(block) for block in blocks]
        for t, f in enumerate(maps, 1):
            has_bias = len(list(f.block.parameters())) == 2
            if not isinstance(f, AffineCalculus) or not has_bias or f.has_relu != (t < len(maps)):
                raise ShapeError(
                    f"{where}: block {t} must be a Linear with bias{' and a ReLU' if t < len(maps) else ''}, since its "
                    f"steps are closed forms; got {type(f.block).__name__}. Use block-admm for other blocks."
                )
        self.linears = [f.linear for f in maps if isinstance(f, AffineCalculus)]
        self.x, self.y, self.where = x.flatten(1), y, where
        width = sum(shape[0] for shape in shapes)
        # n_kept tensors of every layer's size live at once, and about two more inside a step
        check_room(len(x) * width * (n_kept + 2) * x.element_size(), x, None, None, where, mappable=False)
        self.W = [lin.weight.detach().clone() for lin in self.linears]
        self.b = [lin.bias.detach().clone() for lin in self.linears]

    def __len__(self) -> int:
        return len(self.W)

    def affine(self, layer: int, a: Tensor) -> Tensor:
        """Return W a + b of a layer."""
        return nf.linear(a, self.W[layer], self.b[layer])

    def run(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the pre-activations z and activations a of the forward pass; a[0] is the input."""
        z, a = [], [self.x]
        for layer in range(len(self)):
            z.append(self.affine(layer, a[-1]))
            if layer < len(self) - 1:
                a.append(z[-1].relu())
        return z, a

    def write_back(self) -> None:
        """Give the modules the matrices."""
        with torch.no_grad():
            for lin, W, b in zip(self.linears, self.W, self.b, strict=True):
                lin.weight.copy_(W)
                lin.bias.copy_(b)

    def draw(self, kind: str, scale: float, generator: torch.Generator) -> None:
        """Draw all weights anew: ``uniform`` on (0, scale) or ``normal`` with that deviation; biases too if uniform."""
        make = torch.rand if kind == "uniform" else torch.randn
        for layer, W in enumerate(self.W):
            self.W[layer] = scale * make(W.shape, generator=generator, dtype=W.dtype).to(W.device)
            bias = scale * torch.rand(len(W), generator=generator, dtype=W.dtype).to(W.device)
            self.b[layer] = bias if kind == "uniform" else torch.zeros_like(bias)


class Inputs:
    """The layers' inputs with a column of ones; that of the first layer never changes, so it is made once."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self._ones = with_ones(x)
        self._gram = self._ones.T @ self._ones

    def of(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input with its ones, and its Gram matrix where it is known."""
        return (self._ones, self._gram) if a is self.x else (with_ones(a), None)


def with_ones(a: Tensor) -> Tensor:
    """Return (samples, features + 1): the bias as one more input."""
    return torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype, device=a.device)], 1)
