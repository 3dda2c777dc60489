"""Checkpoint of a training of heads: the classes that are done, and the state of the block in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from auditor.errors import OptionError

if TYPE_CHECKING:
    from auditor.explainers.xnn.head_training import Block, Run


def write_checkpoint(path: Path, stamp: str, run: Run, block: Block) -> None:
    """Write all that is needed to go on, under a temporary name first."""
    state = block.state
    tensors = {"epochs": run.epochs, "all_reseeded": run.reseeded, "rows": block.rows}
    tensors |= {f"all.{k}": v for k, v in run.heads.state_dict().items()}
    tensors |= {"Q": state.Q, "silent": state.silent, "reseeded": state.reseeded, "broken": state.broken}
    tensors |= {"generator": state.generator.get_state(), "best_loss": block.loss, "since": block.since}
    tensors |= {f"heads.{k}": v for k, v in state.heads.state_dict().items()}
    tensors |= {f"best.{k}": v for k, v in block.best.state_dict().items()}
    for i, p in enumerate(state.heads.parameters()):
        tensors |= {f"adam.{i}.{k}": v for k, v in state.adam.state[p].items()}
    about = {"epoch": state.epoch, "stamp": stamp, "finished": run.finished, "diverged": run.diverged}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    contents = {k: v.detach().contiguous().clone() for k, v in tensors.items()}
    save_file(contents, temporary, metadata={"auditor": json.dumps(about)})
    temporary.replace(path)


def read_checkpoint(path: Path, stamp: str, run: Run, block: Block | None = None) -> None:
    """Put back what is done, and the block in training where one is given: all classes of it that had begun."""
    about, tensors = _read(path)
    if about.get("stamp") != stamp:
        raise OptionError(
            f"xnn: the checkpoint {path.name} belongs to another model, data set or configuration. Remove it to start "
            f"anew, or name another file."
        )
    run.finished, run.diverged = int(about["finished"]), int(about["diverged"])
    run.epochs, run.reseeded = tensors["epochs"], tensors["all_reseeded"]
    run.heads.load_state_dict(_part(tensors, "all."))
    if block is not None:
        _restore(block, about, tensors)


def _restore(block: Block, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    block.keep((block.rows.unsqueeze(1) == tensors["rows"]).any(1).nonzero().flatten())
    state = block.state
    state.epoch, state.Q, state.broken = int(about["epoch"]), tensors["Q"], tensors["broken"]
    state.silent, state.reseeded = tensors["silent"], tensors["reseeded"]
    state.generator.set_state(tensors["generator"])
    state.heads.load_state_dict(_part(tensors, "heads."))
    block.best.load_state_dict(_part(tensors, "best."))
    for i, p in enumerate(state.heads.parameters()):
        state.adam.state[p] = _part(tensors, f"adam.{i}.")
    block.loss, block.since = tensors["best_loss"], tensors["since"]


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("auditor", "{}"))
            return about, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except Exception as err:
        raise OptionError(
            f"xnn: {path.name} is no checkpoint that can be read ({err}); remove it to start anew."
        ) from err
