"""The network of intersection regularization: backbone features, quantised representation, small classifier.

    x -> z (a layer of the subject) -> F(z) = ReLU(A z + a) -> v = q(F(z)) in {0..2^r - 1}^n -> G(v / (2^r - 1))

F ends in a ReLU so that code 0 means "not there": the L1 term then asks for few features, not for low ones.
"""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from auditor.errors import LayerError
from auditor.kernels.trees.quantiser import Range, quantise, range_of
from auditor.subject.layer_calls import on_call
from auditor.subject.subject import Subject

KEEP_RANGE = 0.9  # of the old range, when a training batch moves the average
MOST_FLAT = 4096  # inputs up to which positions are kept apart


class Representation(nn.Module):
    """q(F(z)) and G on top. ``lo`` and ``hi`` are the frozen range, an average over training batches."""

    lo: Tensor
    hi: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(
        self,
        n_inputs: int,
        n_features: int,
        n_classes: int,
        *,
        bits: int = 4,
        hidden: int = 64,
        per_feature: bool = False,
        percentile: float = 100.0,
        soft_depth: int | None = None,
    ) -> None:
        super().__init__()
        self.bits, self.per_feature, self.percentile = bits, per_feature, percentile
        self.n_features = n_features
        self.encode = nn.Sequential(nn.Linear(n_inputs, n_features), nn.ReLU())
        self.classify: nn.Module
        if soft_depth is None:
            self.classify = nn.Sequential(nn.Linear(n_features, hidden), nn.Mish(), nn.Linear(hidden, n_classes))
        else:
            self.classify = SoftTree(n_features, n_classes, soft_depth)
        size = (n_features,) if per_feature else ()
        self.register_buffer("lo", torch.zeros(size))
        self.register_buffer("hi", torch.zeros(size))
        self.register_buffer("shift", torch.zeros(n_inputs))
        self.register_buffer("scale", torch.ones(n_inputs))

    def codes(self, z: Tensor) -> Tensor:
        """Return codes of inputs (batch, n_inputs) as floats: by the batch's range in training, else the frozen one."""
        f = self.features(z)
        if not self.training:
            return quantise(f, self.bits, Range(self.lo, self.hi))
        batch_range = range_of(f, per_feature=self.per_feature, percentile=self.percentile).holding_zero()
        self._follow(batch_range)
        return quantise(f, self.bits, batch_range)

    def features(self, z: Tensor) -> Tensor:
        """Return F(z), non-negative, before rounding."""
        out: Tensor = self.encode((z - self.shift) * self.scale)
        return out

    def logits(self, codes: Tensor) -> Tensor:
        """Return the classifier's logits for codes."""
        out: Tensor = self.classify(codes / (2**self.bits - 1))
        return out

    def standardise(self, z: Tensor) -> None:
        """Let inputs have mean 0 and one common spread before F, from a sample of them (rows, n_inputs)."""
        self.shift.copy_(z.mean(0))
        spread = float((z - z.mean(0)).square().mean().sqrt())
        self.scale.fill_(1 / spread if spread > 1e-12 else 1.0)

    @torch.no_grad()
    def _follow(self, batch_range: Range) -> None:
        if not self.hi.any():
            self.lo.copy_(batch_range.lo)
            self.hi.copy_(batch_range.hi)
            return
        moved = Range(self.lo, self.hi).towards(batch_range, KEEP_RANGE)
        self.lo.copy_(moved.lo)
        self.hi.copy_(moved.hi)


class SoftTree(nn.Module):
    """A soft decision tree: sigmoid decisions at inner nodes, a distribution at each leaf, all of it differentiable."""

    def __init__(self, n_features: int, n_classes: int, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.decide = nn.Linear(n_features, 2**depth - 1)
        self.leaves = nn.Parameter(torch.randn(2**depth, n_classes) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the log of the mixture of leaf distributions, which serves as logits."""
        d = self.decide(x)
        stay, go = nn.functional.logsigmoid(d), nn.functional.logsigmoid(-d)
        reach = x.new_zeros(len(x), 1)
        first = 0
        for level in range(self.depth):
            nodes = slice(first, first + 2**level)
            reach = torch.stack([reach + stay[:, nodes], reach + go[:, nodes]], dim=2).flatten(1)
            first += 2**level
        return torch.logsumexp(reach[:, :, None] + torch.log_softmax(self.leaves, dim=1)[None], dim=1)


class Backbone:
    """A layer of the subject as inputs of F: flattened where that is small, else averaged over positions.

    With ``trainable`` it works on a copy of the model whose weights up to the layer learn (normalisation statistics and
    dropout stay as in evaluation); the registered model itself is never touched.
    """

    def __init__(
        self,
        subject: Subject,
        layer: str,
        *,
        pooling: Literal["auto", "flatten", "mean"] = "auto",
        trainable: bool = False,
    ) -> None:
        self.subject, self.layer, self.layout = subject, layer, subject.layout(layer)
        size = self.layout.channels * self.layout.n_positions
        self.is_flat = pooling == "flatten" or (pooling == "auto" and size <= MOST_FLAT)
        self.n_inputs = size if self.is_flat else self.layout.channels
        self.module: nn.Module | None = copy.deepcopy(subject.module).eval() if trainable else None
        if self.module is not None:
            for parameter in self.module.parameters():
                parameter.requires_grad_(True)

    def inputs(self, images: Tensor) -> Tensor:
        """Return (batch, n_inputs) for pixels."""
        return self.pool(self.activations(images))

    def activations(self, images: Tensor) -> Tensor:
        """Return the layer's output in its native shape."""
        if self.module is None:
            return self.subject.activations(images, [self.layer])[self.layer]
        outputs: list[Tensor] = []
        handle = on_call(self.module, self.layer, outputs.append)
        try:
            self.module(self.subject.normalise(images))
        finally:
            handle.remove()
        if len(outputs) != 1 or not isinstance(outputs[0], Tensor):
            raise LayerError(f"layer {self.layer!r} cannot be fine-tuned: it must put out one tensor, once per pass.")
        return outputs[0]

    def pool(self, z: Tensor) -> Tensor:
        """Return activations as rows of inputs, in single precision on the CPU: F and the tree are there."""
        p = self.layout.to_positions(z)
        return (p.flatten(1) if self.is_flat else p.mean(-1)).float().cpu()

    def maps(self, z: Tensor, weights: Tensor) -> Tensor:
        """Return where each of some linear features of the inputs gets its value, (batch, features, positions).

        ``weights`` is (features, n_inputs); summed over positions a map is ``weights @ inputs``.
        """
        p = self.layout.to_positions(z).float().cpu()
        if self.is_flat:
            w = weights.reshape(len(weights), p.shape[1], p.shape[2])
            return torch.einsum("fcp,bcp->bfp", w, p)
        return torch.einsum("fc,bcp->bfp", weights, p) / p.shape[2]

    def parameters(self) -> list[nn.Parameter]:
        """Return what fine-tuning may move: the weights that reach the layer."""
        if self.module is None:
            return []
        return [p for p in self.module.parameters() if p.requires_grad]

    def state(self) -> dict[str, Tensor]:
        """Return the weights of a fine-tuned copy."""
        return {} if self.module is None else {k: v.detach().clone() for k, v in self.module.state_dict().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take back fine-tuned weights."""
        if self.module is not None:
            self.module.load_state_dict(state)
