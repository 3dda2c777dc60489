"""All optimizers by name on one interface: ``cycles(name, blocks, x, y, epochs=…)`` yields a `Cycle` per epoch.

block-admm   Stochastic Block-ADMM, made stable                    gotmare   block splitting without duals
block-admm-printed   the same as algorithm 2 of the paper prints it
full-admm    closed forms on all samples, duals everywhere        taylor    the same, duals on the last layer only
bcd          block coordinate descent without duals [Zeng2019]     dladmm    closed forms, constraints on the weights
sgd, adam    back-propagation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from auditor.errors import OptionError
from auditor.training.backprop import BackpropConfig, backprop
from auditor.training.block_admm import PRINTED, BlockAdmmConfig, block_admm
from auditor.training.block_coordinate_descent import BcdConfig, bcd
from auditor.training.cycle import Cycle
from auditor.training.dladmm import DlAdmmConfig, dladmm
from auditor.training.full_admm import FullAdmmConfig, full_admm

Make = Callable[[Sequence[nn.Module], Tensor, Tensor, Any], Iterator[Cycle]]

# name: (function, configuration, settings that differ from its defaults, whether lr decays over the epochs)
METHODS: dict[str, tuple[Make, type[BaseModel], dict[str, Any], bool]] = {
    "block-admm": (
        block_admm,
        BlockAdmmConfig,
        {"beta": 10.0, "beta_ratio": 10.0, "dual_step": 1.0, "lr": 2e-3},
        True,
    ),
    "block-admm-printed": (block_admm, BlockAdmmConfig, {**PRINTED, "z_lr": 0.1}, False),
    "gotmare": (
        block_admm,
        BlockAdmmConfig,
        {"dual_step": 0.0, "start": "kept", "z_optimizer": "sgd", "z_lr": 0.1},
        True,
    ),
    "full-admm": (full_admm, FullAdmmConfig, {}, False),
    "taylor": (full_admm, FullAdmmConfig, {"variant": "taylor"}, False),
    "bcd": (bcd, BcdConfig, {}, False),
    "dladmm": (dladmm, DlAdmmConfig, {"nu": 1e-2, "rho": 1e-2, "solver": "exact"}, False),
    "sgd": (backprop, BackpropConfig, {"optimizer": "sgd", "lr": 0.05}, False),
    "adam": (backprop, BackpropConfig, {"optimizer": "adam", "lr": 2e-3}, True),
}


def cycles(
    name: str, blocks: Sequence[nn.Module], x: Tensor, y: Tensor, *, epochs: int | None = None, **settings: Any
) -> Iterator[Cycle]:
    """Yield the cycles of the optimizer called ``name``; ``settings`` are those of its configuration.

    ``epochs`` is how long the caller means to go on; methods with a learning rate let it fall to zero until then.
    """
    if name not in METHODS:
        raise OptionError(f"optimizer {name!r} is not known; choose from {', '.join(METHODS)}.")
    make, config, preset, decays = METHODS[name]
    merged = {**preset, **({"decay_epochs": epochs} if decays and epochs else {}), **settings}
    try:
        return make(blocks, x, y, config(**merged))
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(str(part) for part in first["loc"])
        raise OptionError(f"optimizer {name}: {option}: {first['msg']}.") from None
