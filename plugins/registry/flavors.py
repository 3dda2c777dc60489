"""Flavors: the models that MLflow stores as something else than ``mlflow.pytorch``, as torch modules.

``transformers``: an image-classification pipeline or model, from its safetensors and its processor. ``onnx``: the
graph, converted to torch by onnx2torch. TorchScript (stored by ``mlflow.pytorch``): converted to an exported program,
whose operations are its layers. Nothing is unpickled: weights are safetensors, ONNX tensors, or what the TorchScript
reader takes.
"""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError, ModelError, TamperError
from auditor.plugins.registry import model_files, pt2_archive, tags

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

READS_FILES = re.compile(r"\b(?:from_file|save|load|read_file|write_file|load_library)\b")
GAP = r"(?:\s|\\|#[^\n]*\n)*"  # what TorchScript reads over between two words
CALLED = re.compile(rf"\bops{GAP}\.{GAP}(\w+)")
NAMESPACES = {"prim", "aten", "torchvision", "quantized"}
LARGEST_CODE = 32 * 2**20  # bytes of TorchScript source that are looked through


@dataclass(frozen=True)
class Opened:
    """A module, the input shape that its file names, the digest of what runs it, and what else the file says."""

    module: nn.Module
    input_shape: list[int] | None
    graph: str
    notes: Mapping[str, Any] = field(default_factory=dict)  # class names, mean, std, resize


def open_flavor(path: Path, flavors: Mapping[str, Mapping[str, Any]], uri: str) -> Opened | None:
    """Return the model of a flavor that is no ``pytorch``; None where there is none that can be opened."""
    for name, opener in (("transformers", _open_transformers), ("onnx", _open_onnx)):
        if name in flavors:
            return opener(path, flavors[name], uri)
    return None


def _inside(path: Path, name: Any, uri: str) -> Path:
    """Return a file or folder of the model, by the name that its MLmodel file gives."""
    target = (path / str(name)).resolve()
    if not target.is_relative_to(path.resolve()):
        raise TamperError(f"model {uri}: its MLmodel file names a file outside the model; log it again.")
    if not target.exists():
        raise ModelError(f"model {uri}: {name} is missing from its files; restore it, or log the model again.")
    return target


def _open_transformers(path: Path, flavor: Mapping[str, Any], uri: str) -> Opened:
    """Open the model of an image-classification pipeline, with its processor's preprocessing and its class names."""
    task = str(flavor.get("task", ""))
    if task != "image-classification":
        raise ModelError(f"model {uri}: want a transformers model for image-classification, got {task or 'no task'}.")
    folder = _inside(path, flavor.get("model_binary", "model"), uri)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"model {uri}: its weights are no safetensors but a pickle, which can run any code; log it again with "
            "safe_serialization=True (the default of save_pretrained)."
        )
    try:
        from transformers import AutoModelForImageClassification
    except ImportError:
        raise ModelError(f"model {uri}: its flavor needs transformers; pip install transformers.") from None
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        module = AutoModelForImageClassification.from_pretrained(str(folder), use_safetensors=True, **options)
    except Exception as error:
        raise ModelError(f"model {uri}: transformers cannot open it: {_sentence(error)}") from error
    notes = _processor_notes(path, flavor, folder, options, uri)
    names = getattr(module.config, "id2label", None) or {}
    if names and not all(str(v) == f"LABEL_{k}" for k, v in names.items()):
        notes["class_names"] = [str(names[k]) for k in sorted(names, key=int)]
    shape = notes.pop("input_shape", None) or _shape_of_config(module.config)
    return Opened(module, shape, tags.digest_of_files(model_files.digests(folder)), notes)


def _processor_notes(
    path: Path, flavor: Mapping[str, Any], folder: Path, options: Mapping[str, Any], uri: str
) -> dict[str, Any]:
    """Return size, mean, std and resize as the model's processor says them; nothing without one."""
    import transformers

    from auditor.subject.transforms import steps_of

    folders = [
        path / "components" / str(c)
        for c in flavor.get("components", ())
        if "processor" in str(c) or "extractor" in str(c)
    ]
    for candidate in [*folders, path / "processor", folder]:
        if not (candidate / "preprocessor_config.json").is_file():
            continue
        try:
            opener: Any = transformers.AutoImageProcessor
            steps = steps_of(opener.from_pretrained(str(candidate), **options))
        except AuditError as error:
            raise ModelError(f"model {uri}: {error}") from None
        except Exception as error:
            raise ModelError(f"model {uri}: its image processor cannot be opened: {_sentence(error)}") from error
        return {
            "input_shape": list(steps.input_shape) if steps.input_shape else None,
            "mean": steps.mean,
            "std": steps.std,
            "resize": steps.resize,
        }
    log.warning("model %s has no image processor: pixels in [0, 1] without mean and std are assumed", uri)
    return {}


def _shape_of_config(config: Any) -> list[int] | None:
    size = getattr(config, "image_size", None)
    sides: list[Any] = list(size) if isinstance(size, (list, tuple)) else [size, size]
    if not all(isinstance(n, int) for n in sides):
        return None
    return [int(getattr(config, "num_channels", 3)), *sides]


def _open_onnx(path: Path, flavor: Mapping[str, Any], uri: str) -> Opened:
    """Open an ONNX graph as a torch module with a layer per node."""
    file = _inside(path, flavor.get("data", "model.onnx"), uri)
    try:
        import onnx
        import onnx2torch
    except ImportError as error:
        raise ModelError(
            f"model {uri}: its flavor is onnx, which is audited as a torch module and needs {error.name}; "
            "pip install onnx onnx2torch, or log the torch model with mlflow.pytorch."
        ) from None
    try:
        model = onnx.load(str(file), load_external_data=False)
        if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in _tensors(model, onnx.TensorProto)):
            raise ModelError(f"model {uri}: its weights lie outside {file.name}; save it as one file.")
        module = onnx2torch.convert(model)
    except AuditError:
        raise
    except Exception as error:
        raise ModelError(
            f"model {uri}: onnx2torch cannot convert it to torch ({_sentence(error)}); log the torch model with "
            "mlflow.pytorch."
        ) from error
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    dims = inputs[0].type.tensor_type.shape.dim if len(inputs) == 1 else []
    shape = [int(d.dim_value) if d.HasField("dim_value") else -1 for d in list(dims)[1:]]
    return Opened(module.eval(), shape or None, model_files.digests(path)[file.relative_to(path.resolve()).as_posix()])


def _tensors(message: Any, kind: Any) -> Iterator[Any]:
    """Yield every tensor in an ONNX message, also those of nodes, subgraphs and functions."""
    for field_of, value in message.ListFields():
        if field_of.message_type is None:
            continue
        for part in value if isinstance(value, Sequence) or hasattr(value, "add") else (value,):
            if isinstance(part, kind):
                yield part
            else:
                yield from _tensors(part, kind)


def is_torchscript(file: Path) -> bool:
    """Whether a file is a TorchScript archive: code beside its constants, as torch.jit.save writes it."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return False
    return any("/code/" in name for name in names) and any(name.endswith("/constants.pkl") for name in names)


def open_torchscript(file: Path, shape: Sequence[int] | None, uri: str) -> Opened:
    """Open a TorchScript model; its layers are the operations of the exported program that it is converted to.

    torch's own reader takes tensors and plain values only and runs no Python; code that touches files is refused.
    """
    import torch

    _check_code(file, uri)
    try:
        reader: Any = torch.jit
        script = reader.load(str(file), map_location="cpu").eval()
    except Exception as error:
        raise ModelError(f"model {uri}: torch cannot open its TorchScript: {_sentence(error)}") from error
    digest = tags.digest_of_files({file.name: model_files.digests(file.parent)[file.name]})
    if shape is None or min(shape) < 1:
        return Opened(script, None, digest)
    return Opened(_as_program(script, shape, uri), list(shape), digest)


def _check_code(file: Path, uri: str) -> None:
    """Raise where TorchScript code could touch files, or could be read otherwise than it is here.

    torch finds records without regard to case, and runs some of the code as soon as a model is opened.
    """
    with zipfile.ZipFile(file) as archive:
        pt2_archive.check_names([info.filename for info in archive.infolist()], f"model {uri}: {file.name}")
        infos = [info for info in archive.infolist() if "/code/" in info.filename.casefold()]
        infos = [info for info in infos if not info.filename.endswith(".debug_pkl")]
        if sum(info.file_size for info in infos) > LARGEST_CODE:
            raise TamperError(f"model {uri}: its TorchScript code is longer than {LARGEST_CODE >> 20} MB.")
        for info in infos:
            code = archive.read(info).decode("utf-8", "replace")
            if READS_FILES.search(code) or not set(CALLED.findall(code)) <= NAMESPACES:
                raise TamperError(f"model {uri}: its TorchScript code ({info.filename}) may read or write files.")


def _as_program(script: Any, shape: Sequence[int], uri: str) -> nn.Module:
    """Return the module of the exported program of a TorchScript model; the script where torch cannot convert it."""
    import torch

    example = torch.rand((2, *shape), generator=torch.Generator().manual_seed(0))
    batches = (example, torch.cat([example, 1 - example])[:3])  # the example's batch must not stay in the program
    try:
        from torch._export.converter import TS2EPConverter

        module = _with_layers(TS2EPConverter(script, (example,)).convert().module(check_guards=False))
        with torch.no_grad():
            if all(torch.allclose(module(x), script(x), rtol=1e-4, atol=1e-5) for x in batches):
                return module
        reason = "the converted program answers otherwise"
    except Exception as error:  # a converter of torch's own that it does not promise
        reason = _sentence(error)
    log.warning(
        "model %s: torch cannot turn its TorchScript into a program whose layers can be read (%s); kind rde, which "
        "needs none, explains it.", uri, reason
    )  # fmt: skip
    return script  # type: ignore[no-any-return]


def _with_layers(module: Any) -> nn.Module:
    """Return a graph's module with a submodule per operation, so that each can be read as a layer by its name."""
    import torch

    class Operation(torch.nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function

        def forward(self, *inputs: Any, **options: Any) -> Any:
            return self.function(*inputs, **options)

    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        name = f"{node.name}_"  # a parameter may have the node's name
        module.add_submodule(name, Operation(node.target))
        with module.graph.inserting_after(node):
            layer = module.graph.call_module(name, node.args, node.kwargs)
        node.replace_all_uses_with(layer)
        module.graph.erase_node(node)
    module.recompile()
    return module  # type: ignore[no-any-return]


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split())[:160].rstrip(".")
