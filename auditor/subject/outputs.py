"""Outputs: what a model's last operation makes of its logits, how that is undone, and how logits become probabilities.

Everything in this package works with logits. A model that ends in softmax, log-softmax or sigmoid is run without that
last operation where one pass shows it as a call of its own (of a module, a function, or a node of an exported graph);
where it is hidden, the outputs are turned back by numbers:  log p  for softmax,  log p - log(1 - p)  for sigmoid.

`Output.probabilities` is the one function that makes probabilities of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from auditor.errors import OptionError

OutputName = Literal["logits", "softmax", "log-softmax", "sigmoid", "multilabel"]
Ending = Literal["none", "softmax", "log-softmax", "sigmoid"]
OUTPUTS: tuple[OutputName, ...] = get_args(OutputName)

_CALLS: dict[str, Ending] = {
    **dict.fromkeys(("softmax", "_softmax", "softmax_"), "softmax"),
    **dict.fromkeys(("log_softmax", "_log_softmax"), "log-softmax"),
    **dict.fromkeys(("sigmoid", "sigmoid_"), "sigmoid"),
}
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4}  # of a sum over classes; half precision: 1e-2
_SAME = {torch.float64: 1e-9, torch.float32: 1e-5}


@dataclass(frozen=True, slots=True)
class Output:
    """How the outputs of a model are read.

    ``call`` is the number of the call in a pass that is left out; None where the outputs are turned back by numbers.
    ``is_two_sided``: one logit z stands for two classes, the second by z and the first by -z.

    >>> Output("sigmoid").probabilities(torch.tensor([[0.0, 100.0]])).tolist()
    [[0.5, 1.0]]
    >>> Output("logits").probabilities(torch.tensor([[7.0, 7.0]])).tolist()
    [[0.5, 0.5]]
    """

    name: OutputName = "logits"
    ending: Ending = "none"
    call: int | None = None
    is_two_sided: bool = False
    evidence: str = ""  # one sentence: what a pass showed of the model

    @property
    def is_per_class(self) -> bool:
        """Whether every class has a probability of its own; else they sum to one."""
        return self.name in ("sigmoid", "multilabel") or self.is_two_sided

    @property
    def undone(self) -> str:
        """What is undone at the model's end to have these logits, in a word or two."""
        return self.ending + (", one logit on two sides" if self.is_two_sided else "")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities (batch, classes) of logits, in double precision."""
        z = logits.double()
        return torch.sigmoid(z) if self.is_per_class or z.shape[1] == 1 else torch.softmax(z, dim=1)

    def logits(self, run: Callable[[], Tensor]) -> Tensor:
        """Return the logits (batch, outputs) of a pass of the model."""
        if self.ending == "none":
            return self._sides(_two_dimensions(run()))
        if self.call is None:
            return self._sides(_turned_back(_two_dimensions(run()), self.ending))
        with _Without(self.call) as without:
            out = _two_dimensions(run())
        # a pass that took another way through the model has not met the call
        return self._sides(out if without.has_met else _turned_back(out, self.ending))

    def _sides(self, z: Tensor) -> Tensor:
        return torch.cat([-z, z], dim=1) if self.is_two_sided else z


class _Calls(TorchFunctionMode):
    """Counts the calls of softmax, log-softmax and sigmoid in a pass and keeps what the last one put out."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.last, self.value = 0, "none", torch.empty(0)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        kind = _kind(func)
        if kind is not None and isinstance(value, Tensor):
            self.n, self.last, self.value = self.n + 1, kind, value.detach()
        return value


class _Without(TorchFunctionMode):
    """Leaves one call of a pass out: what goes in comes out."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.left, self.has_met = call, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _kind(func) is not None:
            self.left -= 1
            if self.left == 0:
                self.has_met = True
                return args[0] if args else (kwargs or {}).get("input", (kwargs or {}).get("self"))
        return func(*args, **(kwargs or {}))


def watched(run: Callable[[], Tensor]) -> tuple[Tensor, Output]:
    """Run the model once and return its outputs (batch, outputs) with what the pass shows of its last operation.

    Rows that are not negative and sum to one are a softmax, rows whose exponentials do a log-softmax, whatever made
    them. A sigmoid is believed only when its call is there: logits may lie in [0, 1] by chance.
    """
    with torch.no_grad(), _Calls() as calls:
        out = _two_dimensions(run())
    is_last = calls.value.numel() == out.numel() and bool((calls.value.reshape(-1) == out.detach().reshape(-1)).all())
    ending = ending_by_numbers(out)
    if is_last and calls.last in ("sigmoid", ending):
        ending = calls.last
        output = Output(_name(ending), ending, calls.n)
        if _undoes(output, out, run):
            return out, replace(output, evidence=f"the model ends in {ending}, which is left out to have its logits")
    if ending != "none":
        rows = "rows sum to one" if ending == "softmax" else "the exponentials of its rows sum to one"
        how = "are turned back by their logarithm" if ending == "softmax" else "are taken as logits"
        return out, Output(_name(ending), ending, evidence=f"the model's outputs are a {ending}: {rows}; they {how}")
    hint = ""
    if out.shape[1] > 1 and bool(((out >= 0) & (out <= 1)).all()):
        hint = "; all lie in [0, 1] on the images tried, so should they be probabilities, record --output sigmoid"
    return out, Output(evidence=f"the model's outputs are logits{hint}")


def ending_by_numbers(out: Tensor) -> Ending:
    """Return what rows of outputs are by their numbers alone: a softmax, a log-softmax, or neither.

    >>> ending_by_numbers(torch.tensor([[0.25, 0.75], [1.0, 0.0]])), ending_by_numbers(torch.tensor([[0.25, 0.7]]))
    ('softmax', 'none')
    """
    if out.shape[1] < 2 or not bool(out.isfinite().all()):
        return "none"
    close, values = _CLOSE.get(out.dtype, 1e-2), out.detach().double()
    if bool((values >= 0).all()) and bool(((values.sum(1) - 1).abs() <= close).all()):
        return "softmax"
    if bool((values <= close).all()) and bool((values.logsumexp(1).abs() <= close).all()):
        return "log-softmax"
    return "none"


def recorded(name: str, out: Tensor, measured: Output) -> Output:
    """Return the output that a description names, if the model's outputs agree with it.

    ``logits`` takes the outputs as they are, whatever they look like; ``multilabel`` leaves a sigmoid out where the
    model ends in one.
    """
    if name not in OUTPUTS:
        raise OptionError(f"output must be one of {', '.join(OUTPUTS)}, got {name!r}.")
    if name == measured.name == "logits":
        return measured
    if name == "logits":
        return Output(evidence=f"the model's outputs are a {measured.ending}, and taken as logits as recorded")
    if name == "multilabel":
        if measured.ending in ("softmax", "log-softmax"):
            raise OptionError(
                f"output multilabel: {measured.evidence}, so one class is true; record --output {measured.ending}."
            )
        return replace(
            measured, name="multilabel", evidence=f"{measured.evidence}; several labels may be true of an image"
        )
    if measured.ending == name:
        return replace(measured, name=_name(measured.ending))
    if name == "sigmoid" and measured.ending == "none" and bool(((out >= 0) & (out <= 1)).all()):
        return Output(
            "sigmoid", "sigmoid", evidence="the model's outputs lie in [0, 1] and are turned back by their logit"
        )
    raise OptionError(
        f"output {name}: the model's outputs are none, they lie in {float(out.min()):.3g} to {float(out.max()):.3g} "
        f"and {measured.evidence}; record what they are, or leave --output out."
    )


def _undoes(output: Output, out: Tensor, run: Callable[[], Tensor]) -> bool:
    """Whether the pass without the call gives logits whose probabilities are the model's outputs."""
    with torch.no_grad():
        z = output.logits(run)
        if z.shape != out.shape:
            return False
        p = output.probabilities(z)
        values = out.double().exp() if output.ending == "log-softmax" else out.double()
        return bool(((p - values).abs() <= _SAME.get(out.dtype, 1e-2)).all())


def _turned_back(out: Tensor, ending: Ending) -> Tensor:
    if ending == "softmax":
        return out.clamp_min(torch.finfo(out.dtype).tiny).log()
    if ending == "sigmoid":
        return torch.logit(out, eps=torch.finfo(out.dtype).eps)
    return out


def _two_dimensions(out: Tensor) -> Tensor:
    return out[:, None] if out.ndim == 1 else out


def _kind(func: Any) -> Ending | None:
    return _CALLS.get(str(getattr(func, "__name__", "")).partition(".")[0])


def _name(ending: Ending) -> OutputName:
    return "logits" if ending == "none" else ending


def names_of(n_outputs: int, class_names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the class names: those given, else numbers; one logit has two classes unless one name is given.

    >>> names_of(3, None), names_of(1, ["cat", "dog"]), names_of(1, None), names_of(1, ["yes"])
    (('0', '1', '2'), ('cat', 'dog'), ('0', '1'), ('yes',))
    """
    if class_names is None:
        return tuple(str(i) for i in range(max(2, n_outputs)))
    if len(class_names) != n_outputs and (n_outputs, len(class_names)) != (1, 2):
        raise OptionError(
            f"Subject: the model has {n_outputs} outputs, got {len(class_names)} class names; give one per output"
            f"{', or two for one logit' if n_outputs == 1 else ''}."
        )
    return tuple(str(name) for name in class_names)
