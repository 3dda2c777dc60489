"""The model under audit: an image classifier that can be cut open at any of its layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from auditor.errors import AuditError, LayerError, ModelError, OptionError, ShapeError
from auditor.subject import travel
from auditor.subject.identity import Identity, of_json, of_weights
from auditor.subject.layer_calls import on_call, split_call
from auditor.subject.layer_discovery import probe
from auditor.subject.layers import Layer, Layout, suggest
from auditor.subject.memory import keep_memory
from auditor.subject.outputs import Output, names_of, recorded, watched
from auditor.subject.portions import Portions, joined
from auditor.subject.preprocessing import Preprocessing, as_pixels
from auditor.subject.transforms import Steps, steps_of

LOGIT_NAMES = ("logits", "logit", "output", "outputs", "out", "pred", "preds", "scores", "y")  # of a mapping's entries


class Subject:
    """An image classifier under audit: its module, preprocessing, class names, layers and digest.

    Images go in as pixels in [0, 1], (batch, channels, height, width); ``mean`` and ``std`` are applied inside. The
    module's mode, hooks and gradient flags are put back after every call. One pass runs at a time per subject.
    A softmax or sigmoid at the module's end is left out: ``output`` says how its outputs are read, by default what one
    pass shows. ``graph`` is the digest of the exported graph that the module was loaded from, where it was, and
    ``files`` the sha256 of the model's files by path.

    ``preprocessing`` takes what a library puts before its models, instead of size, mean, std and resize: torchvision's
    ``weights.transforms()``, timm's ``data_config``, an image processor of transformers.

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
        input_shape: Sequence[int] | None = None,
        preprocessing: Any = None,
        class_names: Sequence[str] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        resize: str | None = None,
        output: str | None = None,
        layer: str | None = None,
        name: str = "",
        version: str = "",
        graph: str = "",
        files: Mapping[str, str] | None = None,
    ) -> None:
        keep_memory()  # whatever command, worker or actor this is, it runs passes from here on
        self.module = module
        steps = Steps() if preprocessing is None else steps_of(preprocessing)
        mean, std = (given if given is not None else read for given, read in ((mean, steps.mean), (std, steps.std)))
        shape = _checked_shape(input_shape if input_shape is not None else steps.input_shape)
        self.preprocessing = Preprocessing.of(shape, mean, std, resize or steps.resize)
        self.name, self.version = name, version
        self._lock = threading.RLock()
        self._depth = 0
        self._identity: Identity | None = None
        self._graph = graph
        self.files = dict(files or {})
        self._layers: list[Layer] | None = None
        self._one_is_enough: dict[str, bool] = {}
        self._channels_last: bool | None = None  # whether images go so; None until it was tried
        self.max_batch: int | None = None  # 1 when the exported graph has its batch frozen
        self.portions = Portions()
        parameter = next(iter(module.parameters()), None)
        self.device = parameter.device if parameter is not None else torch.device("cpu")
        self.dtype = parameter.dtype if parameter is not None and parameter.is_floating_point() else torch.float32
        self.output = Output()
        self.class_names: tuple[str, ...] = ()
        self._try_out(class_names if class_names is not None else steps.class_names, output)
        self._layer = layer
        self.origin: Callable[[], Subject] | None = None  # how another process gets it, where a registry has it
        self._is_changed = False  # whether its weights may differ from those that its digest is of

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
    def identity(self) -> Identity:
        """The digests of its weights, graph, preprocessing and class names."""
        if self._identity is None:
            notes = self.describe()
            classes = of_json(notes.pop("class_names"))
            self._identity = Identity(of_weights(self.module), self._graph, of_json(notes), classes)
        return self._identity

    @property
    def digest(self) -> str:
        """Sha256 over weights, graph, constants, preprocessing and class names."""
        return self.identity.digest

    def class_index(self, target: int | str) -> int:
        """Return the index of a class given by name, or by index as int or digits."""
        if isinstance(target, str):
            if target in self.class_names:
                return self.class_names.index(target)
            if not target.lstrip("-").isdigit():
                names = ", ".join(self.class_names[:12]) + (", …" if self.n_classes > 12 else "")
                raise OptionError(f"target: no class is called {target!r}; the model knows {names}.")
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
        if self.device.type == "cuda" and x.device.type == "cpu" and torch.cuda.is_available() and not x.requires_grad:
            x = x.pin_memory()  # the copy then runs beside whatever the GPU is doing
        return self.preprocessing.normalise(x.to(self.device, self.dtype, non_blocking=True))

    def in_fast_layout(self, x: Tensor) -> Tensor:
        """Return pixels in the layout that this model's device convolves fastest, for passes by the thousand.

        A CPU convolves channels-last maps in half to nine tenths of the time. A module that makes a vector of a map by
        ``view`` cannot take them, so two images are tried first; what comes out of layers then has that layout too.
        """
        if self._channels_last is None:
            self._channels_last = self.device.type == "cpu" and self._takes_channels_last()
        return x.contiguous(memory_format=torch.channels_last) if self._channels_last and x.ndim == 4 else x

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> Subject:
        """Put the module on a device, in a precision, and return self; the digest stays that of the weights as loaded.

        Layers are looked at again, since what they put out may change.
        """
        identity = self.identity
        self.module.to(device, dtype)
        self.device = torch.device(device)
        self.dtype = dtype if dtype is not None else self.dtype
        self._identity, self._layers, self._one_is_enough, self._channels_last = identity, None, {}, None
        self.portions = Portions()
        return self

    def twin(self) -> Subject:
        """Return another subject of the same module under the same digest, which shares nothing prepared for this one.

        Its weights may be changed in place: explainers fitted to the original agree to explain the twin.
        """
        pre = self.preprocessing
        other = Subject(
            self.module,
            input_shape=self.input_shape,
            class_names=self.class_names,
            mean=pre.mean,
            std=pre.std,
            resize=pre.resize,
            output=self.output.name,
            layer=self._layer,
            name=self.name,
            version=self.version,
        )
        other._layers, other.origin = self.layers(), self.origin
        other.goes_by(self.identity)
        return other

    # in other processes

    def goes_by(self, identity: Identity) -> None:
        """Take the identity of a subject whose weights these were."""
        self._identity, self._is_changed = identity, True

    def arrived(self, device: str, layers: list[Layer] | None) -> Subject:
        """Return self, on a device, with layers that another process has looked at already."""
        if device != "cpu":
            self.to(device)
        self._layers = layers if self._layers is None else self._layers
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process, which loads it by its origin, or builds it of the module again."""
        pre = self.preprocessing
        options = {
            "input_shape": self.input_shape,
            "class_names": self.class_names,
            "mean": pre.mean,
            "std": pre.std,
            "resize": pre.resize,
            "output": self.output.name,
            "layer": self._layer,
            "name": self.name,
            "version": self.version,
            "graph": self._graph,
            "files": self.files,
        }
        device, layers = str(self.device), self._layers
        origin = self.origin or travel.Built(self.module, options)
        if self._is_changed:
            weights = {name: value.detach().clone() for name, value in self.module.state_dict().items()}
            return travel.arrive_changed, (origin, weights, self.identity, device, layers)
        return travel.arrive, (origin, self.digest, device, layers)

    # running it

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of pixels ``x``, (batch, classes). Differentiable where gradients are enabled."""
        with self.at_rest():
            return self._run(x)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities (batch, classes) of logits, in double precision.

        They sum to one over classes, or stand for each class alone where the model's outputs do (`Output`).
        """
        return self.output.probabilities(logits)

    def activations(self, x: Tensor, layers: Iterable[str]) -> dict[str, Tensor]:
        """Return the named layers' outputs for pixels ``x``; a layer that does not fire exactly once is an error."""
        return self.run(x, layers)[1]

    def run(self, x: Tensor, layers: Iterable[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits and the named layers' outputs from one pass."""
        names = list(layers)
        with self.at_rest():
            passes = self.portions.map(lambda part: self._run_with(part, names), x, self.max_batch)
        logits = joined([logits for logits, _ in passes])
        return logits, {name: _readable(joined([taken[name] for _, taken in passes])) for name in names}

    def _run_with(self, x: Tensor, names: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits and layers of a portion that goes through at once."""
        outputs: dict[str, list[Tensor]] = {name: [] for name in names}

        def keep(name: str) -> Any:
            def action(output: Any) -> None:
                # a copy: an in-place ReLU after the layer would overwrite it
                outputs[name].append(_one_tensor(output, f"layer {name!r}", LayerError).clone())

            return action

        handles = [self._on_call(name, keep(name)) for name in names]
        try:
            logits = self.forward(x)
        finally:
            for handle in handles:
                handle.remove()
        for name, parts in outputs.items():
            if len(parts) != 1:
                raise LayerError(
                    f"layer {name!r} was called {len(parts)} times in one pass and must be called once; "
                    "take a layer that `auditor layers` marks as explainable."
                )
        return logits, {name: parts[0] for name, parts in outputs.items()}

    def forward_from(self, layer: str, z: Tensor) -> Tensor:
        """Return the logits when ``layer`` puts out ``z`` (native shape, any batch) whatever the image was.

        Every path from image to logits must pass through the layer; `layers` says for which that holds.
        """
        z = z.to(self.dtype)
        with self.at_rest():
            one = len(z) > 1 and self.one_image_is_enough(layer, z)
            return joined(
                self.portions.map(lambda part: self._replaced(layer, part, 1 if one else len(part)), z, self.max_batch)
            )

    def one_image_is_enough(self, layer: str, z: Tensor) -> bool:
        """Whether `forward_from` runs one image below the layer, however many rows ``z`` it is given.

        Not so where the graph keeps the size of its batch, as most models from a pt2 file do.
        """
        if self.max_batch is not None:
            return False
        if layer not in self._one_is_enough:
            pair = z if len(z) > 1 else torch.cat([z, z])
            with self.at_rest():
                self._one_is_enough[layer] = self._try_one(layer, pair[:2].to(self.dtype))
        return self._one_is_enough[layer]

    # its layers

    def layers(self) -> list[Layer]:
        """Return every named layer in the order in which they finish, and whether it can be explained."""
        if self._layers is None:
            self._layers = probe(self)
        return self._layers

    @property
    def names_its_layer(self) -> bool:
        """Whether somebody said which layer to explain by default."""
        return self._layer is not None

    def default_layer(self) -> str:
        """Return the layer to explain when none is named."""
        if self._layer is not None:
            return self._layer
        best = suggest(self.layers(), self.n_classes)
        if best is None:
            raise LayerError(
                "the model has no layer that can be explained: none is called once and decides the logits; kind rde, "
                "which hides parts of the image, needs none (auditor fit rde)."
            )
        return best.name

    def layer(self, name: str | None = None) -> Layer:
        """Return the named layer (default: the suggested one), or an error that says why it cannot be explained."""
        name = name if name is not None else self.default_layer()
        by_name = {item.name: item for item in self.layers()}
        item = by_name.get(name)
        if item is None and split_call(name)[1] is not None:  # x@1 of a pt2 file is x#2
            item = {(module, call or 1): by_name[n] for n in by_name for module, call in [split_call(n)]}.get(
                split_call(name)  # type: ignore[arg-type]
            )
        if item is not None:
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
        return {
            "schema_version": 1,
            "class_names": list(self.class_names),
            "output": self.output.name,
            **self.preprocessing.to_json(),
        }

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
        return self.forward_normalised(self.normalise(x))

    def forward_normalised(self, x: Tensor) -> Tensor:
        """Return the logits of one batch to which mean and std were applied: what a graph of the model is traced of."""
        return self.output.logits(lambda: self._outputs(x))

    def _outputs(self, x: Tensor) -> Tensor:
        """Run the module as it is, its last operation included."""
        out = _one_tensor(self.module(x), "the model", ModelError)
        if out.ndim not in (1, 2):
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
        return joined(self.portions.map(self.forward, x, self.max_batch))

    def blank(self, n: int) -> Tensor:
        """Return ``n`` grey images."""
        return torch.full((n, *self.input_shape), 0.5, device=self.device, dtype=self.dtype)

    def _replaced(self, layer: str, z: Tensor, n_images: int) -> Tensor:
        def swap(output: Any) -> Any:
            new = z.clone()  # an in-place ReLU after the layer must not reach the caller's tensor
            return new if isinstance(output, Tensor) else type(output)([new, *output[1:]])

        handle = self._on_call(layer, swap)
        try:
            return self.forward(self.blank(n_images))
        finally:
            handle.remove()

    def _try_one(self, layer: str, z: Tensor) -> bool:
        """Whether one blank image below the layer serves a whole batch above it (not so if the graph kept the size)."""
        with torch.no_grad():
            z = z.detach()
            full = self._replaced(layer, z, z.shape[0])
            try:
                return bool(torch.allclose(self._replaced(layer, z, 1), full, rtol=1e-4, atol=1e-5))
            except AuditError:
                raise
            except Exception:  # any failure of foreign code means no, and costs only speed
                return False

    def _takes_channels_last(self) -> bool:
        """Whether two images in that layout run, and give the same logits."""
        x = torch.rand(2, *self.input_shape, generator=torch.Generator().manual_seed(0)).to(self.dtype)
        with torch.no_grad():
            plain = self.logits(x)
            try:
                other = self.logits(x.contiguous(memory_format=torch.channels_last))
            except RuntimeError:
                return False
        return float((plain - other).abs().max()) <= 1e-3 * max(
            1.0, float(plain.abs().max())
        )  # not where NaN comes out

    def _on_call(self, name: str, action: Callable[[Any], Any]) -> RemovableHandle:
        try:
            return on_call(self.module, name, action)
        except AttributeError:
            self.layer(name)  # raises with near names
            raise LayerError(f"the model has no layer {name!r}.") from None

    def _try_out(self, class_names: Sequence[str] | None, output: str | None) -> None:
        """Run the module on two images: does it take them at once, how many classes, and what are its outputs."""
        noise = torch.rand(self.input_shape, generator=torch.Generator().manual_seed(0))
        x = torch.stack([torch.full_like(noise, 0.5), noise]).to(self.device, self.dtype)
        with self.at_rest():
            try:
                out, measured = watched(lambda: self._outputs(self.normalise(x)))
            except AuditError:
                raise
            except Exception as two:
                try:
                    out, measured = watched(lambda: self._outputs(self.normalise(x[1:])))
                except AuditError:
                    raise
                except Exception as one:
                    raise ModelError(
                        f"the model does not run on images of shape {self.input_shape}: {_first_line(one)}; "
                        "say the right size, e.g. input_shape=(channels, height, width)."
                    ) from two
                self.max_batch = 1  # exported with an example of batch 1: its batch is frozen
        self.class_names = names_of(out.shape[1], class_names)
        self.output = measured if output is None else recorded(output, out, measured)
        if len(self.class_names) > out.shape[1]:
            self.output = replace(self.output, is_two_sided=True)


def _checked_shape(shape: Sequence[int] | None) -> tuple[int, ...]:
    if shape is None:
        raise ShapeError(
            "Subject: say the size of images, input_shape=(channels, height, width), or preprocessing= with a size."
        )
    if len(shape) != 3 or min(shape) < 1:
        raise ShapeError(
            f"Subject: input_shape must be (channels, height, width), got {tuple(shape)}; "
            "give it without the batch dimension."
        )
    return tuple(int(n) for n in shape)


def _one_tensor(output: Any, where: str, error: type[AuditError]) -> Tensor:
    """Return the tensor of an output: itself, the first of a tuple, or the logits of a mapping or a model's answer."""
    if isinstance(output, Tensor):
        return output
    entries = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    tensors = {str(key): value for key, value in entries.items() if isinstance(value, Tensor)}
    named = [tensors[key] for key in LOGIT_NAMES if key in tensors]
    if named or len(tensors) == 1:
        return named[0] if named else next(iter(tensors.values()))
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    what = f" with {', '.join(tensors)}" if tensors else ""
    remedy = f"name its logits one of {', '.join(LOGIT_NAMES)}" if tensors else "take another layer or model"
    raise error(f"{where} must put out one tensor, got {type(output).__name__}{what}; {remedy}.")


def _readable(x: Tensor) -> Tensor:
    """Return half precision as float32: sums of thousands of terms follow."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160]
