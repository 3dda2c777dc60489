"""A Block-ADMM run on disk: safetensors and JSON in a folder, never a pickle.

The files of a save carry its number and ``state.json`` names them; it is replaced last, so a crash leaves the save
before.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from auditor.errors import ArtifactError, OptionError

if TYPE_CHECKING:
    from auditor.training.block_admm import BlockAdmm

STATE = "state.json"
# where the run happens, not what it computes
LOCAL = {"variables", "memory_limit", "workers", "parallel"}


def save(run: BlockAdmm, folder: Path) -> None:
    """Write the run between two cycles."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(p.stem.rpartition("-")[2]) for p in folder.glob("tensors-*.safetensors")), default=0)
    tensors: dict[str, Tensor] = {"generator": run.generator.get_state()}
    for t, block in enumerate(run.blocks):
        tensors |= {f"block.{t}.{k}": v for k, v in block.state_dict().items()}
    tensors |= {f"mean.{i}": v for i, v in enumerate(run.mean_weights)}
    for t, optimizer in enumerate(run.optimizers):
        if optimizer is not None:
            for i, slot in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{t}.{i}.{k}": torch.as_tensor(v) for k, v in slot.items() if v is not None}
    for t, (rule, calculus) in enumerate(zip(run.steps, run.maps, strict=True)):
        tensors |= {f"step.{t}.{k}": v for k, v in rule.tensors().items()}
        tensors |= {f"sums.{t}.{k}": v for k, v in calculus.tensors().items()}
    files: dict[str, str] = {}
    for name in run.variables:
        if run.variables.folder is None:
            tensors[f"variable.{name}"] = run.variables[name]
            continue
        files[name] = f"{name}-{number}.bin"  # a mapped variable is copied file by file and never read whole
        shutil.copyfile(run.variables.folder / f"{name}.bin", folder / files[name])
    path = folder / f"tensors-{number}.safetensors"
    save_file({k: v.detach().contiguous().clone() for k, v in tensors.items()}, path)
    state = {
        "number": number,
        "tensors": path.name,
        "files": files,
        "stamp": _stamp(run),
        "epoch": run.epoch,
        "batches": run.batches,
        "beta": run.beta,
        "watch": run.watch.to_json(),
        "steps": [{"length": rule.length, "key": rule.key} for rule in run.steps],
        "filled": run.filled,
    }
    temporary = folder / f".{STATE}.part"
    temporary.write_text(json.dumps(state))
    temporary.replace(folder / STATE)
    for old in (*folder.glob("tensors-*.safetensors"), *folder.glob("*-*.bin")):
        if old.name not in {path.name, *files.values()}:
            old.unlink()


def load(run: BlockAdmm, folder: Path) -> None:
    """Put a saved run into a fresh one of the same blocks, data and configuration."""
    try:
        state = json.loads((folder / STATE).read_text())
        tensors = load_file(folder / state["tensors"])
    except (OSError, ValueError, KeyError, SafetensorError) as err:
        raise ArtifactError(
            f"block-admm: {folder} holds no checkpoint that can be read ({' '.join(str(err).split())[:100]}); "
            "start without it."
        ) from err
    expected = _stamp(run)
    stamp = dict(state["stamp"])
    # a checkpoint from before an option was there was made with its default
    stamp["configuration"] = {**type(run.config)().model_dump(mode="json", exclude=LOCAL), **stamp["configuration"]}
    differ = sorted(k for k in expected if stamp.get(k) != expected[k])
    if differ:
        raise OptionError(
            f"block-admm: the checkpoint in {folder} was made with another {', '.join(differ)}; give the same, or "
            "start without it."
        )
    run.generator.set_state(tensors["generator"])
    for t, block in enumerate(run.blocks):
        block.load_state_dict(_under(tensors, f"block.{t}."))
    run.mean_weights = [tensors[f"mean.{i}"].to(p.device) for i, p in enumerate(run.mean_weights)]
    for t, optimizer in enumerate(run.optimizers):
        if optimizer is not None:
            slots: dict[int, dict[str, Tensor]] = {}
            for key, value in _under(tensors, f"optimizer.{t}.").items():
                i, _, name = key.partition(".")
                slots.setdefault(int(i), {})[name] = value
            optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})
    for t, (rule, saved) in enumerate(zip(run.steps, state["steps"], strict=True)):
        rule.restore(_under(tensors, f"step.{t}."), saved["length"], saved["key"])
        run.maps[t].restore(_under(tensors, f"sums.{t}."))
    for name in run.variables:
        run.variables.swap(name, _variable(folder, state["files"], tensors, run, name))
    run.epoch, run.batches, run.beta = int(state["epoch"]), int(state["batches"]), list(state["beta"])
    run.filled = bool(state["filled"])
    run.watch.from_json(state["watch"])
    run.last_good.take()


def _variable(folder: Path, files: dict[str, str], tensors: dict[str, Tensor], run: BlockAdmm, name: str) -> Tensor:
    if name not in files:
        return tensors[f"variable.{name}"]
    like = run.variables[name]
    kind = np.dtype(str(like.dtype).removeprefix("torch."))
    # "c": torch wants a writable array; nothing goes back to the file
    return torch.from_numpy(np.memmap(folder / files[name], dtype=kind, mode="c", shape=tuple(like.shape)))


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _stamp(run: BlockAdmm) -> dict[str, Any]:
    config = run.config.model_dump(mode="json", exclude=LOCAL)
    blocks = [[[k, list(v.shape)] for k, v in block.state_dict().items()] for block in run.blocks]
    digest = float(run.x.double().sum())  # cheap; differs for another data set of the same shape
    data = [*run.x.shape, str(run.x.dtype), digest, int(run.y.sum())]
    return {"configuration": config, "blocks": blocks, "data": data}
