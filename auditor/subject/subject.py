"""The model under audit: an image classifier that can be cut open at any of its layers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from auditor.errors import AuditError, LayerError, ModelError, OptionError, ShapeError
from auditor.subject.layers import Layer, Layout, suggest
from auditor.subject.preprocessing import Preprocessing, as_pixels
from auditor.subject.layer_discovery import probe


class Subject:
    """An image classifier under audit: its module, preprocessing, class names, layers and weight digest.

    Images go in as pixels in [0, 1], (batch, channels, height, width); ``mean`` and ``std`` are applied inside. The
    module's mode, hooks and gradient flags are put back after every call. One pass runs at a time per subject.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 3))
    >>> subject = Subject(net, input_shape=(1, 8, 8), class_names=["a", "b", "c"])
    >>> subject.default_layer()
    '1'
    >>> z = subject.activations(torch.rand(5, 1, 8, 8), ["1"])["1"]
    >>> tuple(z.shape), tuple(subject.forward_from("1", z).shape)
    ((5, 4, 6, 6), (5, 3))
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        input_shape: Sequence[int],
        class_names: Sequence[str] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        resize: str = "stretch",
        layer: str | None = None,
        name: str = "",
        version: str = "",
    ) -> None:
        if len(input_shape) != 3 or min(input_shape) < 1:
            raise ShapeError(
                f"Subject: input_shape must be (channels, height, width), got {tuple(input_shape)}; "
                "give it without the batch dimension."
            )
        self.module = module
        self.preprocessing = Preprocessing.of(tuple(int(n) for n in input_shape), mean, std, resize)
        self.name, self.version = name, version
        self._lock = threading.RLock()
        self._depth = 0
        self._digest: str | None = None
        self._layers: list[Layer] | None = None
        self._one_is_enough: dict[str, bool] = {}
        self.max_batch: int | None = None  # 1 when the exported graph has its batch frozen
        parameter = next(iter(module.parameters()), None)
        self.device = parameter.device if parameter is not None else torch.device("cpu")
        self.dtype = parameter.dtype if parameter is not None and parameter.is_floating_point() else torch.float32
        self.max_batch = self._find_max_batch()
        n_classes = self._count_classes()
        if class_names is not None and len(class_names) != n_classes:
            raise OptionError(
                f"Subject: the model has {n_classes} outputs, got {len(class_names)} class names; give one per output."
            )
        names = class_names if class_names is not None else [str(i) for i in range(n_classes)]
        self.class_names: tuple[str, ...] = tuple(str(x) for x in names)
        self._layer = layer

    def __repr__(self) -> str:
        label = f"{self.name or type(self.module).__name__}{'/' + self.version if self.version else ''}"
        return f"Subject({label}, input_shape={self.input_shape}, {self.n_classes} classes, digest={self.digest[:12]})"

    # what it is

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.preprocessing.input_shape

    @property
    def n_classes(self) -> int:
        """Number of logits."""
        return len(self.class_names)

    @property
    def digest(self) -> str:
        """Sha256 over the sorted names, types, shapes and bytes of all weights and buffers."""
        if self._digest is None:
            h = hashlib.sha256()
            state = self.module.state_dict()
            for key in sorted(state):
                value = state[key]
                if not isinstance(value, Tensor):
                    continue
                flat = value.detach().cpu().contiguous()
                h.update(f"{key}|{flat.dtype}|{tuple(flat.shape)}|".encode())
                h.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
            self._digest = h.hexdigest()
        return self._digest

    def class_index(self, target: int | str) -> int:
        """Return the index of a class given by name, or by index as int or digits."""
        if isinstance(target, str):
            if target in self.class_names:
                return self.class_names.index(target)
            if not target.lstrip("-").isdigit():
                known = ", ".join(self.class_names[:12]) + (", …" if self.n_classes > 12 else "")
                raise OptionError(f"target: no class is called {target!r}; the model knows {known}.")
            target = int(target)
        if not 0 <= target < self.n_classes:
            raise OptionError(
                f"target: class index must be 0 to {self.n_classes - 1}, got {target}; name a class or an index."
            )
        return int(target)

    def pixels(self, images: Any) -> Tensor:
        """Return images of any usual form (tensor, array, PIL, list of them) as checked pixels for this model."""
        return as_pixels(images, self.preprocessing)

    def normalise(self, x: Tensor) -> Tensor:
        """Apply mean and std to pixels in [0, 1]."""
        return self.preprocessing.normalise(x.to(self.device, self.dtype))

    def move(self, device: str | torch.device, dtype: torch.dtype | None = None) -> Subject:
        """Put the module on a device, in a precision, and return self; the digest stays that of the weights as loaded.

        Layers are looked at again, since what they put out may change.
        """
        digest = self.digest
        self.module.to(device, dtype)
        self.device = torch.device(device)
        self.dtype = dtype if dtype is not None else self.dtype
        self._digest, self._layers, self._one_is_enough = digest, None, {}
        return self

    # running it

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of pixels ``x``, (batch, classes). Differentiable where gradients are enabled."""
        with self.at_rest():
            return self._run(x)

    def activations(self, x: Tensor, layers: Iterable[str]) -> dict[str, Tensor]:
        """Return the named layers' outputs for pixels ``x``; a layer that does not fire exactly once is an error."""
        return self.run(x, layers)[1]

    def run(self, x: Tensor, layers: Iterable[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits and the named layers' outputs from one pass."""
        names = list(layers)
        found: dict[str, list[Tensor]] = {name: [] for name in names}

        def keep(name: str) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                # a copy: an in-place ReLU after the layer would overwrite it
                found[name].append(_one_tensor(output, f"layer {name!r}", LayerError).clone())

            return hook

        with self.at_rest():
            handles = [self._get(name).register_forward_hook(keep(name)) for name in names]
            try:
                chunks = [x] if self.max_batch is None else list(torch.split(x, self.max_batch))
                out = torch.cat([self.forward(chunk) for chunk in chunks])
            finally:
                for handle in handles:
                    handle.remove()
        for name, seen in found.items():
            if len(seen) != len(chunks):
                calls = len(seen) / len(chunks)
                raise LayerError(
                    f"layer {name!r} was called {calls:g} times in one pass and must be called once; "
                    "take a layer that `auditor layers` marks as explainable."
                )
        return out, {name: _readable(torch.cat(seen)) for name, seen in found.items()}

    def forward_from(self, layer: str, z: Tensor) -> Tensor:
        """Return the logits when ``layer`` puts out ``z`` (native shape, any batch) whatever the image was.

        Every path from image to logits must pass through the layer; `layers` says for which that holds.
        """
        module, z = self._get(layer), z.to(self.dtype)
        with self.at_rest():
            if self.max_batch is not None:
                return torch.cat(
                    [self._replaced(module, part, part.shape[0]) for part in torch.split(z, self.max_batch)]
                )
            n = z.shape[0]
            if n > 1 and layer not in self._one_is_enough:
                self._one_is_enough[layer] = self._try_one(module, z)
            return self._replaced(module, z, 1 if self._one_is_enough.get(layer, False) else n)

    # its layers

    def layers(self) -> list[Layer]:
        """Return every named layer in the order in which they finish, and whether it can be explained."""
        if self._layers is None:
            self._layers = probe(self)
        return self._layers

    def default_layer(self) -> str:
        """Return the layer to explain when none is named."""
        if self._layer is not None:
            return self._layer
        best = suggest(self.layers(), self.n_classes)
        if best is None:
            raise LayerError(
                "the model has no layer that can be explained: none is called once and decides the logits."
            )
        return best.name

    def layer(self, name: str | None = None) -> Layer:
        """Return the named layer (default: the suggested one), or an error that says why it cannot be explained."""
        name = name if name is not None else self.default_layer()
        for item in self.layers():
            if item.name == name:
                if not item.explainable:
                    raise LayerError(
                        f"layer {name!r} cannot be explained: {item.reason}; the suggested layer is "
                        f"{self.default_layer()!r}."
                    )
                return item
        from difflib import get_close_matches

        names = [item.name for item in self.layers() if item.explainable]
        near = get_close_matches(name, names, n=3, cutoff=0.4) or names[-3:]
        raise LayerError(f"the model has no layer {name!r}; near names are {', '.join(near)} (see auditor layers).")

    def layout(self, name: str) -> Layout:
        """Return how the named layer's output reads as channels by positions."""
        layout = self.layer(name).layout
        assert layout is not None  # explainable layers have one
        return layout

    def describe(self) -> dict[str, Any]:
        """Return what travels with the model as ``auditor/subject.json``."""
        return {"schema_version": 1, "class_names": list(self.class_names), **self.preprocessing.to_json()}

    # inside

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Hold the module in evaluation mode with frozen weights, and put everything back afterwards."""
        with self._lock:
            if self._depth:
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
                return
            training = [m for m in self.module.modules() if m.training]
            tracked = [p for p in self.module.parameters() if p.requires_grad]
            for m in training:
                m.training = False
            for p in tracked:
                p.requires_grad_(False)
            self._depth = 1
            try:
                yield
            finally:
                self._depth = 0
                for m in training:
                    m.training = True
                for p in tracked:
                    p.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        """Run one batch as it is; `logits` also checks it and splits it for graphs with a frozen batch."""
        out = _one_tensor(self.module(self.normalise(x)), "the model", ModelError)
        if out.ndim == 1:
            out = out[:, None]
        if out.ndim != 2:
            raise ModelError(
                f"the model must put out logits (batch, classes), got shape {tuple(out.shape)}; only image classifiers "
                "can be audited."
            )
        return _readable(out)

    def _run(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.input_shape:
            raise ShapeError(
                f"images must be (batch, {', '.join(map(str, self.input_shape))}) like the model's input, "
                f"got {tuple(x.shape)}; resize or convert them."
            )
        if self.max_batch is None:
            return self.forward(x)
        return torch.cat([self.forward(part) for part in torch.split(x, self.max_batch)])

    def blank(self, n: int) -> Tensor:
        """Return ``n`` grey images."""
        return torch.full((n, *self.input_shape), 0.5, device=self.device, dtype=self.dtype)

    def _replaced(self, module: nn.Module, z: Tensor, n_images: int) -> Tensor:
        def swap(_module: nn.Module, _args: Any, output: Any) -> Any:
            new = z.clone()  # an in-place ReLU after the layer must not reach the caller's tensor
            return new if isinstance(output, Tensor) else type(output)([new, *output[1:]])

        handle = module.register_forward_hook(swap)
        try:
            return self.forward(self.blank(n_images))
        finally:
            handle.remove()

    def _try_one(self, module: nn.Module, z: Tensor) -> bool:
        """Whether one blank image below the layer serves a whole batch above it (not so if the graph kept the size)."""
        with torch.no_grad():
            z = z.detach()
            full = self._replaced(module, z, z.shape[0])
            try:
                return bool(torch.allclose(self._replaced(module, z, 1), full, rtol=1e-4, atol=1e-5))
            except AuditError:
                raise
            except Exception:  # any failure of foreign code means no, and costs only speed
                return False

    def _get(self, name: str) -> nn.Module:
        try:
            return self.module.get_submodule(name)
        except AttributeError:
            self.layer(name)  # raises with near names
            raise LayerError(f"the model has no layer {name!r}.") from None

    def _find_max_batch(self) -> int | None:
        with self.at_rest(), torch.no_grad():
            try:
                self.module(self.normalise(self.blank(2)))
                return None
            except Exception as two:
                try:
                    self.module(self.normalise(self.blank(1)))
                except Exception as one:
                    raise ModelError(
                        f"the model does not run on images of shape {self.input_shape}: {_first_line(one)}; "
                        "say the right size, e.g. input_shape=(channels, height, width)."
                    ) from two
                return 1  # exported with an example of batch 1: its batch is frozen

    def _count_classes(self) -> int:
        with self.at_rest(), torch.no_grad():
            return int(self.forward(self.blank(1)).shape[1])


def _one_tensor(output: Any, where: str, error: type[AuditError]) -> Tensor:
    """Return the tensor of an output that may be a tensor, a tuple with it first, or a mapping with logits."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        return output["logits"]  # type: ignore[no-any-return]
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits  # type: ignore[no-any-return]
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise error(f"{where} must put out one tensor, got {type(output).__name__}; take another layer or model.")


def _readable(x: Tensor) -> Tensor:
    """Return half precision as float32: sums of thousands of terms follow."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160]
