"""Machine checks of ``auditor doctor``: what this machine has, and whether each part works when it is tried.

Every check ends as ``ok``, ``absent`` (nothing depends on it unless asked for) or ``broken`` (it is there and fails),
with a sentence. What a check raises means broken.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Status = Literal["ok", "absent", "broken"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "firefox")
ARCHITECTURES = (80, 90)  # of the GPUs that kernels are compiled for where there is none


@dataclass(frozen=True, slots=True)
class Check:
    """One part of the machine."""

    name: str
    status: Status
    sentence: str
    seconds: float = 0.0


def run_checks() -> list[Check]:
    """Try every part, one after the other."""
    return [_tried(name, check) for name, check in CHECKS.items()]


def _tried(name: str, check: Callable[[], tuple[Status, str]]) -> Check:
    began = time.perf_counter()
    try:
        status, sentence = check()
    except Exception as error:  # whatever a driver or a foreign library raises is the finding
        status, sentence = "broken", f"{type(error).__name__}: {_first_line(error)}"
    return Check(name, status, sentence, round(time.perf_counter() - began, 3))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]


def check_python() -> tuple[Status, str]:
    """Return versions of Python and of what everything stands on."""
    import torch

    return (
        "ok",
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} {platform.machine()}.",
    )


def check_cpu() -> tuple[Status, str]:
    """Explain a small network on the CPU and compare its parts with the logit."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    heat, gap = _explained("cpu")
    if not heat or gap > 1e-3:
        return (
            "broken",
            f"a small network's contributions miss its logit by {gap:.2g} (heatmap: {heat}); torch is damaged.",
        )
    threads = torch.get_num_threads()
    advice = "" if threads <= cores else f" OMP_NUM_THREADS={cores} would be faster."
    return "ok", f"{threads} threads on {cores} cores; a small network explains itself.{advice}"


def check_allocator() -> tuple[Status, str]:
    """Return whether freed memory stays with the process."""
    from auditor.subject.memory import VARIABLE, keep_memory

    if keep_memory():
        return "ok", "Freed memory stays with the process, so that batches fault no pages in again."
    if os.environ.get(VARIABLE) == "0":
        return "absent", f"{VARIABLE}=0 leaves the allocator as it is: batches of photos take up to twice as long."
    return "absent", "This C library has no such setting (glibc has): batches of photos may take longer."


def check_cuda() -> tuple[Status, str]:
    """Explain a small network on every GPU, fit explainers to it there, and answer with stability."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = (
            "torch was built without CUDA"
            if built is None
            else f"torch knows CUDA {built} but no driver or GPU answers"
        )
        return "absent", f"No GPU: {reason}. Everything runs on the CPU."
    names = []
    for i in range(torch.cuda.device_count()):
        heat, gap = _explained(f"cuda:{i}")
        if not heat or gap > 1e-2:
            return "broken", f"cuda:{i} gives contributions that miss the logit by {gap:.2g}; use --device cpu."
        if (gap := _fitted(f"cuda:{i}")) > 1e-2:
            return "broken", f"explainers fitted on cuda:{i} miss the logit by {gap:.2g}; use --device cpu."
        free, total = torch.cuda.mem_get_info(i)
        names.append(f"{torch.cuda.get_device_name(i)} ({free / 2**30:.1f} of {total / 2**30:.1f} GB free)")
    return "ok", f"{', '.join(names)}: a small network explains itself, and explainers are fitted to it."


def check_triton() -> tuple[Status, str]:
    """Compile a kernel: for the GPU that is there, or for ones that are not."""
    try:
        import triton
    except ImportError:
        return "absent", "Triton is not installed; kernels on a GPU run as plain torch."
    import torch

    from auditor.kernels.factorization.coordinate_descent_triton import compiled, sweep_triton

    if torch.cuda.is_available():
        from auditor.kernels.factorization.coordinate_descent import sweep

        F, B, G = torch.rand(3, 9), torch.rand(3, 9), torch.eye(3) + 0.1
        difference = float((sweep_triton(F.cuda(), B.cuda(), G.cuda(), 2, 0.0).cpu() - sweep(F, B, G, 2)).abs().max())
        if difference > 1e-4:
            return "broken", f"Triton {triton.__version__} runs, and its result is {difference:.2g} away from torch's."
        return "ok", f"Triton {triton.__version__} runs on the GPU and agrees with torch."
    sizes = [len(compiled(architecture)["cubin"]) for architecture in ARCHITECTURES]
    targets = " and ".join(f"sm_{a}" for a in ARCHITECTURES)
    return "ok", f"Triton {triton.__version__} compiles for {targets} ({sum(sizes)} bytes); there is no GPU to run it."


def check_onnx() -> tuple[Status, str]:
    """Run a graph by every provider that there is."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        return (
            "absent",
            f"{error.name} is not installed: pip install 'mlflow-auditor[onnx]' for auditor serve --engine onnx.",
        )
    import numpy as np

    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    values = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [3]) for n in "xy"]
    graph = onnx.helper.make_graph([node], "relu", values[:1], values[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.array([-1, 0, 2], "float32")})
    if y.tolist() != [0, 0, 2]:
        return (
            "broken",
            f"onnxruntime {onnxruntime.__version__} computes ReLU(-1, 0, 2) as {y.tolist()}; install it again.",
        )
    names = [n.removesuffix("ExecutionProvider") for n in onnxruntime.get_available_providers()]
    return "ok", f"onnxruntime {onnxruntime.__version__} runs a graph; providers: {', '.join(names)}."


def check_ray() -> tuple[Status, str]:
    """Return whether Ray is installed; a cluster is not started for a check."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return "absent", "Ray is not installed; nothing but a cluster needs it."
    import ray  # type: ignore[import-not-found,unused-ignore]

    where = "connected to a cluster" if ray.is_initialized() else "no cluster is connected"
    return "ok", f"Ray {version} imports; {where}."


def check_browser() -> tuple[Status, str]:
    """Return the browser that would open pages and run the tests of pages."""
    name = next((n for n in BROWSERS if shutil.which(n)), None)
    if name is None:
        return "absent", "No Chromium, Chrome or Firefox on the PATH: tests of pages are skipped; pages open elsewhere."
    import subprocess

    done = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        return (
            "broken",
            f"{name} is there and ends with code {done.returncode}; install it again or take it off the PATH.",
        )
    return "ok", f"{done.stdout.strip() or name}."


def check_mlflow() -> tuple[Status, str]:
    """Ask the model registry for one model, with few retries."""
    import mlflow

    uri = mlflow.get_registry_uri() or mlflow.get_tracking_uri()
    shown = _without_password(uri)
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return (
            "absent",
            f"there is no registry yet: {shown} would be made by the first use, or set MLFLOW_TRACKING_URI.",
        )
    before = {k: os.environ.get(k) for k in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT")}
    os.environ.update(MLFLOW_HTTP_REQUEST_MAX_RETRIES="0", MLFLOW_HTTP_REQUEST_TIMEOUT="10")
    try:
        mlflow.MlflowClient().search_registered_models(max_results=1)
    except Exception as error:
        return "broken", f"the registry {shown} does not answer ({_hidden(error, uri)}); set MLFLOW_TRACKING_URI."
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return "ok", f"MLflow {mlflow.__version__}: the registry {shown} answers."


def _without_password(text: str, uri: str | None = None) -> str:
    """Return a text with the user and password of ``uri`` (default: the text itself) left out."""
    from urllib.parse import urlsplit

    parts = urlsplit(text if uri is None else uri)
    return text.replace(f"{parts.username}:{parts.password}@", "…@") if parts.password else text


def _hidden(error: Exception, uri: str) -> str:
    return _without_password(_first_line(error), uri)


def _explained(device: str) -> tuple[bool, float]:
    """Explain a small network on a device: is there a heatmap, and how far are its parts from the logit."""
    import torch
    from torch import nn

    from auditor.attribution.excitation import ExcitationBackprop
    from auditor.explainers.contributions import contributions
    from auditor.network.aten_graph import graph_of
    from auditor.subject.subject import Subject

    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    for parameter in net.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator) - 0.4
    subject = Subject(net, input_shape=(1, 8, 8)).to(device)
    x = torch.rand(2, 1, 8, 8, generator=generator).to(device)
    logits, taken = subject.run(x, ["1"])
    z, layout = taken["1"], subject.layout("1")
    W, targets = torch.eye(4, device=device), logits.argmax(1).tolist()
    c = contributions(subject, "1", layout, z, logits, W, layout.to_positions(z), targets)
    gap = (c.bias + c.contributions.sum(1) + c.residual - logits.max(1).values).abs().max()
    maps = ExcitationBackprop(graph_of(subject)).maps(subject.normalise(x), [targets[0]], contrastive=False)
    return bool((maps.mass > 0).all()), float(gap)


def _fitted(device: str | torch.device, options: Mapping[str, Mapping[str, Any]] | None = None) -> float:
    """Fit explainers to a small network on a device and answer; return how far the parts are from their sum.

    ``options`` of the fits are by kind; default: all built-in kinds that neither search nor train a network. An answer
    that is missing, or an explanation without any heatmap, counts as infinitely far.
    """
    import torch
    from torch import nn

    from auditor.data.source import open_data
    from auditor.explainers.answer import answer_images
    from auditor.explainers.base import fit
    from auditor.explainers.kinds import installed_kinds
    from auditor.subject.subject import Subject

    if options is None:
        classes = {kind.name: kind.load() for kind in installed_kinds() if kind.is_built_in}
        options = {name: {} for name, cls in classes.items() if not cls.searches and not cls.makes_network}
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10))
    subject = Subject(net.eval(), input_shape=(1, 8, 8)).to(device)
    data = open_data("sklearn:digits", limit=60)
    explainers = {kind: fit(kind, subject, data, **settings) for kind, settings in options.items()}
    (answer,) = answer_images(subject, explainers, next(iter(data.batches(subject, 1))).images, stability="fast")
    explanations = list(answer.explanations.values())
    if len(explanations) < len(options) or not all(
        any(c.heatmap is not None for c in e.concepts) for e in explanations
    ):
        return math.inf
    return max(e.gap() for e in explanations)


CHECKS: dict[str, Callable[[], tuple[Status, str]]] = {
    "python": check_python,
    "cpu": check_cpu,
    "allocator": check_allocator,
    "cuda": check_cuda,
    "triton": check_triton,
    "onnx": check_onnx,
    "ray": check_ray,
    "browser": check_browser,
    "mlflow": check_mlflow,
}


def as_rows(checks: list[Check]) -> list[dict[str, Any]]:
    """Return the checks for JSON."""
    keys = ("name", "status", "sentence", "seconds")
    return [{key: getattr(check, key) for key in keys} for check in checks]


def exit_code(checks: list[Check]) -> int:
    """Return 2 where something is broken: this machine cannot do all it seems to."""
    return 2 if any(check.status == "broken" for check in checks) else 0
