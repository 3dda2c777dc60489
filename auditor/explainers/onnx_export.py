"""One ONNX graph of a subject and what its explainers read: logits, layers and further outputs of pixels, any batch.

The graph is checked against torch before anybody may use it. ONNX Runtime runs it in a fraction of eager torch's time.

The last, non-negative step of a concept projection stays outside, in our own kernel. ONNX has no operator for it, and
unrolled accelerated projected gradient steps were tried in the graph (one thread, rank 10, 8 images): for 512 channels
by 49 positions the kernel takes 0.27 ms at an error of 5e-7 of the largest score, 25 steps 0.26 ms at 7e-4, 50 steps
0.57 ms at 1e-6; for 32 by 16 the kernel 0.03 ms, 25 steps 0.16 ms. The number of steps would have to be fixed by the
worst condition number, where the kernel knows per position when it is done, and falls back to an exact method.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from auditor.errors import ArtifactError, ModelError, OptionError
from auditor.explainers.base import Explainer, FurtherOutput
from auditor.network.aten_graph import AtenGraph, graph_of
from auditor.network.graph_module import GraphModule
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

NEEDED = "needs ONNX; install it with: pip install 'mlflow-auditor[onnx]'."
TOLERANCE = 1e-3  # of the largest value: float32 sums in another order
LOW_PRECISION = 0.1  # the same where torch runs in half precision
CHECKED = (1, 2, 5)  # batch sizes tried


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """A checked graph: its bytes, the names of its outputs, and how far it was from torch."""

    content: bytes
    layers: tuple[str, ...]
    features: Mapping[str, str]  # explainer name -> key of the further output it reads
    worst: float

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs in order."""
        return output_names(len(self.layers), len(self.features))


def output_names(n_layers: int, n_features: int) -> list[str]:
    """Return plain names, since layers' own may hold dots.

    >>> output_names(1, 1)
    ['logits', 'layer_0', 'features_0']
    """
    return ["logits", *(f"layer_{i}" for i in range(n_layers)), *(f"features_{i}" for i in range(n_features))]


class _Bundle(nn.Module):
    """Pixels in; logits, layers and further outputs out."""

    mean: Tensor
    std: Tensor

    def __init__(self, subject: Subject, graph: AtenGraph, layers: list[str], outputs: Sequence[FurtherOutput]) -> None:
        super().__init__()
        self.layers = layers
        self.body = GraphModule(graph, [graph.output, *(graph.layer(name) for name in layers)])
        c = subject.input_shape[0]
        self.register_buffer("mean", torch.tensor(subject.preprocessing.mean).view(1, c, 1, 1))
        self.register_buffer("std", torch.tensor(subject.preprocessing.std).view(1, c, 1, 1))
        self.read_from = [output.layer for output in outputs]
        self.outputs = nn.ModuleList(output.module(subject) for output in outputs)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        normalised = (x - self.mean) / self.std
        logits, *activations = self.body(normalised)
        values: dict[str | None, Tensor] = dict(zip(self.layers, activations, strict=True))
        values[None] = normalised
        further = [module(values[layer]) for module, layer in zip(self.outputs, self.read_from, strict=True)]
        return (logits, *activations, *further)


def check_can_export() -> None:
    """Fail at once when the packages that exporting needs are not there."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise OptionError(f"exporting {NEEDED}") from None


def export_graph(subject: Subject, explainers: Mapping[str, Explainer]) -> OnnxGraph:
    """Export and check; a graph that does not give torch's numbers is an error."""
    check_can_export()
    graph = graph_of(subject).on_cpu()  # a graph on disk belongs to no device
    if subject.max_batch is not None or graph.batch is not None:
        raise ModelError(
            f"the model takes {subject.max_batch or graph.batch} images at a time only, and a graph is exported for "
            "any number; log the model with an example of two images."
        )
    layers = sorted({layer for e in explainers.values() for layer in e.layers()})
    outputs = further_outputs(explainers)
    example = torch.rand(3, *subject.input_shape)
    try:
        content = _to_onnx(_Bundle(subject, graph, layers, list(outputs.values())), example)
    except ModelError as error:
        if not outputs:
            raise
        log.warning("only logits and layers are exported, which are most of the work: %s", error)
        outputs = {}
        content = _to_onnx(_Bundle(subject, graph, layers, []), example)
    worst = compare(content, subject, layers, list(outputs.values()))
    log.info("exported %d outputs, %d bytes, worst difference %.1e", 1 + len(layers), len(content), worst)
    return OnnxGraph(content, tuple(layers), {name: output.key for name, output in outputs.items()}, worst)


def further_outputs(explainers: Mapping[str, Explainer]) -> dict[str, FurtherOutput]:
    """Return what explainers read beyond layers, each under its explainer's name, sorted as a manifest stores them."""
    outputs: dict[str, FurtherOutput] = {}
    for name, explainer in explainers.items():
        for i, output in enumerate(explainer.reads().outputs):
            outputs[f"{name} {i}" if i else name] = output
    return dict(sorted(outputs.items()))


def lacking(layers: Collection[str], features: Collection[str], explainer: Explainer) -> list[str]:
    """Return what an explainer reads that a graph with these layers and further outputs (their keys) has not."""
    reads = explainer.reads()
    missing = [layer for layer in reads.layers if layer not in layers]
    if any(output.key not in features for output in reads.outputs):
        missing.append(f"further outputs of {explainer.name or explainer.kind}")
    return missing


def open_session(content: bytes, *, threads: int = 1, use_gpu: bool | None = None) -> Any:
    """Return an ONNX Runtime session: CUDA when there is a GPU, else CPU, with threads that wait without spinning."""
    try:
        import onnxruntime
    except ImportError:
        raise OptionError(f"the onnx engine {NEEDED}") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    gpu = torch.cuda.is_available() if use_gpu is None else use_gpu
    # the GPU build lists providers that are not there, so they are named
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"] if gpu else ["CPUExecutionProvider"]
    try:
        return onnxruntime.InferenceSession(content, options, providers=providers)
    except Exception as error:
        raise ArtifactError(f"ONNX Runtime cannot open the graph: {' '.join(str(error).split())[:160]}") from error


def _to_onnx(bundle: _Bundle, example: Tensor) -> bytes:
    names = output_names(len(bundle.layers), len(bundle.outputs))
    batch = torch.export.Dim("batch", min=1, max=4096)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter's own
        try:
            program = torch.onnx.export(
                bundle.cpu().eval(),
                (example,),
                dynamo=True,
                dynamic_shapes=({0: batch},),
                input_names=["pixels"],
                output_names=names,
                verbose=False,
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"this model cannot be exported to ONNX: {reason}") from error
    assert program is not None
    content: bytes = program.model_proto.SerializeToString()
    return content


def compare(
    content: bytes,
    subject: Subject,
    layers: Sequence[str],
    outputs: Sequence[FurtherOutput] = (),
    *,
    batches: Sequence[int] = CHECKED,
    seed: int = 0,
) -> float:
    """Return how far a graph is from torch on noise images and a grey one; beyond the tolerance it is an error.

    Without ``outputs`` only logits and layers are compared. Whoever loads a graph of others takes a seed that they
    could not know.
    """
    session = open_session(content, use_gpu=False)
    generator = torch.Generator().manual_seed(seed)
    modules = [output.module(subject) for output in outputs]
    names = output_names(len(layers), len(outputs))
    tolerance = TOLERANCE if subject.dtype == torch.float32 else LOW_PRECISION
    missing = sorted(set(names) - {output.name for output in session.get_outputs()})
    if missing or [entry.name for entry in session.get_inputs()] != ["pixels"]:
        raise ArtifactError(f"the graph does not take pixels and give {', '.join(names)}; run auditor export again.")
    worst = 0.0
    for n in batches:
        x = torch.rand(n, *subject.input_shape, generator=generator)
        x[0] = 0.5
        from_graph = session.run(names, {"pixels": x.numpy()})
        with torch.no_grad():
            logits, layer_outputs = subject.run(x.to(subject.device), layers)
        from_torch = [logits, *(layer_outputs[layer] for layer in layers)]
        with torch.no_grad():
            values: dict[str | None, Tensor] = dict(layer_outputs.items())
            values[None] = subject.normalise(x)
            from_torch += [module(values[output.layer]) for module, output in zip(modules, outputs, strict=True)]
        for name, a, b in zip(names, from_graph, from_torch, strict=True):
            value, b = torch.from_numpy(a), b.float().cpu()
            if value.shape != b.shape:
                raise ArtifactError(f"the exported graph gives {name} of shape {tuple(value.shape)}, torch {b.shape}.")
            gap = float((value - b).abs().max() / b.abs().max().clamp_min(1e-6))
            worst = max(worst, gap)
            if not gap <= tolerance:
                raise ArtifactError(
                    f"the exported graph is off by {gap:.1e} of {name}, {tolerance:g} is allowed; use the torch engine."
                )
    return worst
