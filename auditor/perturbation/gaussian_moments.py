"""Assumed-density filtering: push the mean and variance of a Gaussian input through a network in closed form.

    linear   m' = W m + b,                    v' = W^2 v                                        or  R' = R W^T
    ReLU     m' = m Phi(a) + sqrt(v) phi(a),  v' = (m^2 + v) Phi(a) + m sqrt(v) phi(a) - m'^2   or  R' = R Phi(a)

with  a = m / sqrt(v).

Either the diagonal variance ``v`` is carried, or a low-rank factor ``R`` with covariance  R^T R  (v is then its
diagonal). After [GastRoth2018], [Macdonald2019] and [MacdonaldBesanconPokutta2022].

`Moments` is a tensor that answers each operation of the network itself, so any module runs as it stands, traced and
exported ones too. An operation without a rule raises `ClosedFormError` with its name: there is no silent approximation
of, say, max pooling. Where two branches join (residual blocks) the diagonal form takes them as independent, the low
rank form adds their factors and keeps the correlation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.errors import OptionError

EPS = 1e-7  # under the root: a pixel that is kept has variance 0, and the gradient of sqrt(0) is infinite


class ClosedFormError(OptionError):
    """The network uses an operation for which Gaussian moments have no closed form."""


class Moments(torch.Tensor):
    """A Gaussian random tensor: looks like its mean, carries ``var`` or ``factor`` (rank, *shape) alongside."""

    mean_: Tensor
    var_: Tensor | None
    factor_: Tensor | None

    @staticmethod
    def of(mean: Tensor, var: Tensor | None = None, factor: Tensor | None = None) -> Moments:
        """Return a random tensor with this mean, and this variance or covariance factor."""
        self: Moments = torch.Tensor._make_subclass(Moments, mean.detach())
        self.mean_, self.var_, self.factor_ = mean, var, factor
        return self

    def variance(self) -> Tensor:
        """Return the variance of every entry."""
        if self.factor_ is not None:
            return self.factor_.square().sum(0)
        assert self.var_ is not None
        return self.var_

    def mapped(
        self, mean: Callable[[Tensor], Tensor], var: Callable[[Tensor], Tensor], linear: Callable[[Tensor], Tensor]
    ) -> Moments:
        """Return the image under a linear map: ``mean`` with the offset, ``linear`` without, ``var`` with squares."""
        if self.factor_ is None:
            assert self.var_ is not None
            return Moments.of(mean(self.mean_), var(self.var_))
        folded = linear(self.factor_.flatten(0, 1))
        return Moments.of(mean(self.mean_), factor=folded.view(*self.factor_.shape[:2], *folded.shape[1:]))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer an operation by its rule, metadata from the mean, and anything else with `ClosedFormError`."""
        name = _name(func)
        with torch._C.DisableTorchFunctionSubclass():
            rule = RULES.get(name)
            if rule is not None:
                return rule(*args, **(kwargs or {}))
            if name in METADATA:
                return func(*args, **(kwargs or {}))
        raise ClosedFormError(
            f"assumed-density filtering: the network uses {name}, which has no closed form for Gaussian moments; "
            f"use the Monte-Carlo distortion, or a network of convolutions, linear layers, ReLU and average pooling."
        )


METADATA = {"get", "dim", "size", "stride", "numel", "is_floating_point", "is_contiguous", "ndimension", "sym_size"}


def _name(func: Callable[..., Any]) -> str:
    if func is F.max_pool2d:
        return "max_pool2d"  # a dispatcher without a name of its own
    return getattr(func, "__name__", str(func)).split(".")[0].strip("_")


def _conv2d(x: Moments, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Moments:
    return x.mapped(
        lambda m: F.conv2d(m, weight, bias, *args, **kwargs),
        lambda v: F.conv2d(v, weight.square(), None, *args, **kwargs),
        lambda r: F.conv2d(r, weight, None, *args, **kwargs),
    )


def _linear(x: Moments, weight: Tensor, bias: Tensor | None = None) -> Moments:
    return x.mapped(
        lambda m: F.linear(m, weight, bias),
        lambda v: F.linear(v, weight.square()),
        lambda r: F.linear(r, weight),
    )


def _relu(x: Moments, inplace: bool = False) -> Moments:
    return _leaky_relu(x, 0.0)


def _leaky_relu(x: Moments, negative_slope: float = 0.01, inplace: bool = False) -> Moments:
    """Moments of  max(x, c x)  for  x ~ N(m, v);  c = 0 is the ReLU."""
    c, m = negative_slope, x.mean_
    v = x.variance() + EPS
    root = v.sqrt()
    a = m / root
    above = torch.special.ndtr(a)
    bell = root * torch.exp(-0.5 * a.square()) / math.sqrt(2 * math.pi)
    mean_above = m * above + bell  # E[x; x > 0]
    mean = mean_above + c * (m - mean_above)
    mean = torch.maximum(mean, torch.maximum(m, c * m))  # Jensen; rounding can fall below it far out in the tails
    if x.factor_ is not None:
        return Moments.of(mean, factor=x.factor_ * (above + c * (1 - above)))
    power_above = (m.square() + v) * above + m * bell  # E[x^2; x > 0]
    power = power_above + c * c * (m.square() + v - power_above)
    return Moments.of(mean, (power - mean.square()).clamp_min(0))


def _avg_pool2d(x: Moments, *args: Any, **kwargs: Any) -> Moments:
    ones = torch.ones_like(x.mean_[:1, :1])

    def summed(v: Tensor) -> Tensor:
        positional = (*args[:5], 1) if len(args) > 5 else args
        return F.avg_pool2d(v, *positional, **(kwargs if len(args) > 5 else {**kwargs, "divisor_override": 1}))

    def squares(v: Tensor) -> Tensor:  # sum(v) / divisor^2, where padding makes the divisor vary over the map
        divisor = summed(ones) / F.avg_pool2d(ones, *args, **kwargs)
        return summed(v) / divisor.square()

    def pool(m: Tensor) -> Tensor:
        return F.avg_pool2d(m, *args, **kwargs)

    return x.mapped(pool, squares, pool)


def _adaptive_avg_pool2d(x: Moments, output_size: Any) -> Moments:
    def pool(m: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(m, output_size)

    def squares(v: Tensor) -> Tensor:
        mean = pool(v)
        for axis in (-2, -1):
            size, out = v.shape[axis], mean.shape[axis]
            cells = [-(-(i + 1) * size // out) - i * size // out for i in range(out)]
            shape = [1] * v.dim()
            shape[axis] = out
            mean = mean / torch.tensor(cells, dtype=v.dtype, device=v.device).view(shape)
        return mean

    return x.mapped(pool, squares, pool)


def _mean(x: Moments, dim: Any, keepdim: bool = False, **_: Any) -> Moments:
    axes = [a % x.mean_.dim() for a in ([dim] if isinstance(dim, int) else dim)]
    if 0 in axes:
        raise ClosedFormError("assumed-density filtering: the network averages over the batch, which mixes images.")
    count = math.prod(x.mean_.shape[a] for a in axes)

    def mean(m: Tensor) -> Tensor:
        return m.mean(axes, keepdim=keepdim)

    return x.mapped(mean, lambda v: mean(v) / count, mean)


def _batch_norm(
    x: Moments,
    *args: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Moments:
    """Evaluate with running statistics, as an affine map per channel."""
    if len(args) == 8:
        weight, bias, running_mean, running_var, training, momentum, eps, _ = args  # ATen's order, and one flag more
    elif args:
        arguments: list[Any] = [running_mean, running_var, weight, bias, training, momentum, eps]
        arguments[: len(args)] = args
        running_mean, running_var, weight, bias, training, momentum, eps = arguments
    if training or running_mean is None or running_var is None:
        raise ClosedFormError("assumed-density filtering: batch norm without running statistics; put it in eval mode.")
    scale = (running_var + eps).rsqrt() * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - running_mean * scale
    shape = (1, -1, *([1] * (x.mean_.dim() - 2)))
    scale, shift = scale.view(shape), shift.view(shape)
    return x.mapped(lambda m: m * scale + shift, lambda v: v * scale.square(), lambda r: r * scale)


def _shaped(change: Callable[..., Tensor]) -> Callable[..., Moments]:
    """Return a rule for an operation that only moves entries about and keeps the batch in front."""

    def rule(x: Moments, *args: Any, **kwargs: Any) -> Moments:
        mean = change(x.mean_, *args, **kwargs)
        if mean.shape[:1] != x.mean_.shape[:1]:
            raise ClosedFormError("assumed-density filtering: the network reshapes over the batch axis.")

        def moved(v: Tensor) -> Tensor:  # the factor folds its rank into the batch axis
            return change(v, *args, **kwargs) if len(v) == len(mean) else _per_draw(change, v, len(mean), args, kwargs)

        return x.mapped(lambda m: mean, moved, moved)

    return rule


def _per_draw(change: Callable[..., Tensor], r: Tensor, batch: int, args: Any, kwargs: Any) -> Tensor:
    return torch.cat([change(part, *args, **kwargs) for part in torch.split(r, batch)])


def _scaled(x: Moments, c: Any) -> Moments:
    squared = c.square() if isinstance(c, Tensor) else c * c
    return x.mapped(lambda m: m * c, lambda v: v * squared, lambda r: r * c)


def _mul(x: Any, y: Any) -> Moments:
    if isinstance(x, Moments) and isinstance(y, Moments):
        raise ClosedFormError("assumed-density filtering: the network multiplies two activations.")
    return _scaled(x, y) if isinstance(x, Moments) else _scaled(y, x)


def _div(x: Any, y: Any, **_: Any) -> Moments:
    if isinstance(y, Moments):
        raise ClosedFormError("assumed-density filtering: the network divides by an activation.")
    return _scaled(x, 1 / y)


def _add(x: Any, y: Any, alpha: float = 1) -> Moments:
    if not isinstance(x, Moments):
        return _add(_scaled(y, alpha), x)
    if not isinstance(y, Moments):
        return x.mapped(lambda m: m + alpha * y, lambda v: v, lambda r: r)
    y = _scaled(y, alpha)
    mean = x.mean_ + y.mean_
    if x.factor_ is not None and y.factor_ is not None:
        return Moments.of(mean, factor=x.factor_ + y.factor_)
    return Moments.of(mean, x.variance() + y.variance())


def _cat(parts: Sequence[Any], dim: int = 0) -> Moments:
    if not all(isinstance(p, Moments) for p in parts) or dim == 0:
        raise ClosedFormError("assumed-density filtering: the network joins activations with something else.")
    mean = torch.cat([p.mean_ for p in parts], dim)
    axis = dim if dim < 0 else dim + 1
    factors = [p.factor_ for p in parts if p.factor_ is not None]
    if len(factors) == len(parts):
        return Moments.of(mean, factor=torch.cat(factors, axis))
    return Moments.of(mean, torch.cat([p.variance() for p in parts], dim))


def _same(x: Moments, *args: Any, **kwargs: Any) -> Moments:
    return x


def _to(x: Moments, *args: Any, **kwargs: Any) -> Moments:
    var, factor = (None if part is None else part.to(*args, **kwargs) for part in (x.var_, x.factor_))
    return Moments.of(x.mean_.to(*args, **kwargs), var, factor)


def _dropout(x: Moments, p: float = 0.5, training: bool = True, inplace: bool = False) -> Moments:
    if training:
        raise ClosedFormError("assumed-density filtering: dropout is switched on; put the network in eval mode.")
    return x


def _view(x: Tensor, *shape: Any) -> Tensor:
    return x.reshape(*shape)


RULES: dict[str, Callable[..., Any]] = {
    "conv2d": _conv2d,
    "linear": _linear,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "avg_pool2d": _avg_pool2d,
    "adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "mean": _mean,
    "batch_norm": _batch_norm,
    "flatten": _shaped(torch.flatten),
    "view": _shaped(_view),
    "reshape": _shaped(_view),
    "squeeze": _shaped(torch.squeeze),
    "unsqueeze": _shaped(torch.unsqueeze),
    "permute": _shaped(torch.permute),
    "add": _add,
    "radd": _add,
    "iadd": _add,
    "sub": lambda x, y, alpha=1: _add(x, y, -alpha),
    "rsub": lambda x, y: _add(_scaled(x, -1), y),
    "mul": _mul,
    "rmul": _mul,
    "div": _div,
    "truediv": _div,
    "true_divide": _div,
    "neg": lambda x: _scaled(x, -1),
    "cat": _cat,
    "concat": _cat,
    "dropout": _dropout,
    "feature_dropout": _dropout,
    "contiguous": _same,
    "clone": _same,
    "to": _to,
    "float": lambda x: _to(x, torch.float32),
    "alias": _same,
    "detach": _same,
}
