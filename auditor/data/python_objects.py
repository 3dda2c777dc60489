"""Python objects as data sources: loaders, data sets, arrays, tensors, tables, lists of images.

What an object hands out is looked at when it is opened: an item without an image, or images that differ between two
readings, is said then. What has no length is read once and kept in memory.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from auditor.data.image_items import Array, Normalisation, as_array, bytes_of, is_array, is_image, is_same
from auditor.data.item_data import Item, ItemData
from auditor.data.item_labels import ItemLabels, read_labels
from auditor.data.source import ArrayData, Data, open_data
from auditor.data.tables import open_hugging_face, open_table
from auditor.errors import DataError
from auditor.subject.subject import Subject
from auditor.subject.transforms import normalisation_in, random_step

log = logging.getLogger(__name__)

IMAGE_KEYS = ("image", "images", "img", "pixel_values", "x", "input", "inputs", "pixels", "picture", "photo")
IMAGE_FILES = ("jpg", "jpeg", "png", "webp")
LABEL_KEYS = ("label", "labels", "target", "targets", "y", "class", "cls", "fine_label", "category")
MOST_KEPT = 2 * 2**30  # bytes of images that are kept in memory
READINGS = 4  # of one item, to see whether it is the same each time


@dataclass(frozen=True, slots=True)
class Reading:
    """What a user said of an object: which entries of an item are image and label, and what was applied to images."""

    image: str | None = None
    label: str | None = None
    applied: Normalisation | None = None
    keep: bool = False


def open_object(source: Any, reading: Reading, options: Mapping[str, Any]) -> Data:
    """Open whatever a program holds images in; ``options`` are those of every `Data`."""
    if hasattr(source, "as_images_and_labels"):
        images, labels, name = source.as_images_and_labels()
        return arrays(images, labels, name, reading, options)
    if isinstance(source, DataLoader):
        return _open_loader(source, reading, options)
    if isinstance(source, TensorDataset):
        pair = source.tensors if len(source.tensors) > 1 else (source.tensors[0], None)
        return arrays(pair[0], pair[1], "TensorDataset", reading, options)
    if type(source).__module__.partition(".")[0] == "datasets" and hasattr(source, "features"):
        if hasattr(source, "__len__"):
            return open_hugging_face(source, reading, options, _names_of_item, _watched)
        return _keep(iter(source), _spec_of(source), reading, options)
    if type(source).__name__ == "DatasetDict":
        raise DataError(f"data: a DatasetDict has several data sets; give one of {', '.join(map(str, source))}.")
    if hasattr(source, "columns") and hasattr(source, "iloc"):
        return open_table(source, reading, options, LABEL_KEYS)
    if is_array(source):
        return arrays(source, None, type(source).__name__, reading, options)
    if _is_pair(source):
        return _open_pair(source, reading, options)
    if is_image(source):
        return _open_list([source], reading, options)
    if isinstance(source, (list, tuple)):
        return _open_list(source, reading, options)
    if (isinstance(source, Dataset) and not isinstance(source, IterableDataset)) or _is_map(source):
        return _open_map(source, source, reading, options)
    if isinstance(source, Iterable) and not isinstance(source, (str, bytes, Mapping)):
        return _keep(_singles(iter(source), reading, batched=False), _spec_of(source), reading, options)
    raise DataError(
        f"data: want a DataLoader, a data set, arrays or tensors (images, labels), a list of images or paths, a table "
        f"with an image column, or the name of a source, got {type(source).__name__}."
    )


def arrays(images: Any, labels: Any, name: str, reading: Reading, options: Mapping[str, Any]) -> Data:
    """Open arrays or tensors of images, with one label each or none; nothing is copied."""
    held = as_array(images)
    spec = f"{name} {tuple(held.shape)}"
    if held.ndim not in (3, 4) or not len(held) or held.dtype.kind not in "buif":
        raise DataError(f"data {spec}: want images as numbers of shape (n, channels, height, width), got {held.dtype}.")
    item_labels = ItemLabels.none(len(held)) if labels is None else read_labels(_listed(labels), None, f"data {spec}")
    _check_lengths(spec, len(held), len(item_labels.numbers))

    def read(batch_size: int) -> Iterator[tuple[Array, Array]]:
        for start in range(0, len(held), batch_size):
            yield held[start : start + batch_size], item_labels.numbers[start : start + batch_size]

    data = ArrayData(spec, item_labels.single, read, applied=reading.applied, **options)
    data.class_names = item_labels.names
    return data


def _check_lengths(spec: str, n_images: int, n_labels: int) -> None:
    if n_images != n_labels:
        raise DataError(f"data {spec}: {n_images} images and {n_labels} labels; give one label per image.")


def _listed(labels: Any) -> list[Any]:
    return list(as_array(labels)) if isinstance(labels, torch.Tensor) else list(labels)


def _is_pair(source: Any) -> bool:
    """Whether it is (images, labels): many images, and labels that are no images."""
    if not isinstance(source, (tuple, list)) or len(source) != 2:
        return False
    images, labels = source
    many = images.ndim >= 3 if is_array(images) else isinstance(images, (list, tuple)) or hasattr(images, "iloc")
    if labels is None:
        return many and isinstance(source, tuple)
    if not many or isinstance(labels, (str, int)) or not hasattr(labels, "__len__"):
        return False
    if is_array(labels):
        return bool(labels.ndim in (1, 2))
    return not (len(labels) and is_image(labels[0])) if isinstance(labels, (list, tuple)) else True


def _open_pair(source: Any, reading: Reading, options: Mapping[str, Any]) -> Data:
    images, labels = source
    if is_array(images):
        return arrays(images, labels, type(images).__name__, reading, options)
    listed = list(images)
    item_labels = ItemLabels.none(len(listed)) if labels is None else read_labels(_listed(labels), None, "data list")
    _check_lengths("list", len(listed), len(item_labels.numbers))
    return _list_data(listed, item_labels, reading, options)


def _open_list(source: Sequence[Any], reading: Reading, options: Mapping[str, Any]) -> Data:
    if not source:
        raise DataError("data: the list holds no image; give at least one.")
    if all(is_image(item) or (is_array(item) and item.ndim == 4 and len(item) == 1) for item in source):
        singles = [item[0] if is_array(item) and item.ndim == 4 else item for item in source]
        return _list_data(singles, ItemLabels.none(len(singles)), reading, options)
    if isinstance(source[0], (str, bytes)) or not hasattr(source[0], "__getitem__"):
        shown = f" {str(source[0])[:80]!r}" if isinstance(source[0], str) else ""
        raise DataError(
            f"data list: item 0{shown} is no image ({type(source[0]).__name__}); give images or paths that exist."
        )
    return _open_map(source, source, reading, options)


def _list_data(items: list[Any], labels: ItemLabels, reading: Reading, options: Mapping[str, Any]) -> Data:
    wrong = next((i for i, item in enumerate(items) if not is_image(item)), None)
    if wrong is not None:
        shown = f" {str(items[wrong])[:80]!r}" if isinstance(items[wrong], str) else ""
        raise DataError(
            f"data list: item {wrong}{shown} is no image ({type(items[wrong]).__name__}); give images or paths that "
            "exist."
        )

    def read(rows: Sequence[int]) -> Iterator[Item]:
        return ((items[i], None) for i in rows)

    is_path = all(isinstance(item, str) or hasattr(item, "__fspath__") for item in items)
    ids = [str(item) for item in items] if is_path else None
    spec = f"list ({len(items)} images)"
    return ItemData(spec, len(items), read, labels=labels, ids=ids, applied=reading.applied, **options)


def open_named(source: Any, spec: str, options: Mapping[str, Any]) -> Data:
    """Open a torchvision data set that was named in a string; labels that are no class numbers are none."""

    def numbered(item: Item) -> Item:
        return item[0], item[1] if isinstance(item[1], int) else None

    return _open_rows(source, range(_length(source)), source, Reading(), options, spec=spec, taken=numbered)


def _is_map(source: Any) -> bool:
    return hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, (str, bytes))


def _open_map(source: Any, described: Any, reading: Reading, options: Mapping[str, Any]) -> Data:
    """Open a map-style data set; names, listed labels and transforms are those of ``described``."""
    return _open_rows(source, range(_length(source)), described, reading, options)


def _length(source: Any) -> int:
    try:
        n = len(source)
    except (TypeError, NotImplementedError):
        raise DataError(
            f"data {_spec_of(source)}: a data set with items by number must say its length (__len__)."
        ) from None
    if n == 0:
        raise DataError(f"data {_spec_of(source)}: it is empty; give at least one image.")
    return int(n)


def _open_loader(loader: DataLoader[Any], reading: Reading, options: Mapping[str, Any]) -> Data:
    """Open what a loader reads, in the order of its data set: every batch size and order gives the same source."""
    dataset = loader.dataset
    spec = f"DataLoader({_spec_of(dataset)})"
    if isinstance(dataset, IterableDataset) or (loader.batch_size is None and not _has_own_batches(loader)):
        return _keep(_singles(iter(loader), reading, loader.batch_size is not None), spec, reading, options)
    rows = _rows_of(loader, spec)
    if isinstance(dataset, TensorDataset) and rows == list(range(len(dataset))) and _collates_plainly(loader):
        return open_object(dataset, reading, options)
    collate = None if _collates_plainly(loader) else loader.collate_fn
    return _open_rows(dataset, rows, dataset, reading, options, collate=collate, workers=loader.num_workers)


def _has_own_batches(loader: DataLoader[Any]) -> bool:
    return loader.batch_sampler is not None and type(loader.batch_sampler) is not torch.utils.data.BatchSampler


def _collates_plainly(loader: DataLoader[Any]) -> bool:
    return loader.collate_fn is torch.utils.data.default_collate


def _rows_of(loader: DataLoader[Any], spec: str) -> list[int]:
    """Return the rows of the data set that a loader reads, sorted; one draw of them where each pass draws others."""

    def drawn() -> list[int]:
        batches: Any = loader.batch_sampler
        rows = itertools.chain.from_iterable(batches) if _has_own_batches(loader) else loader.sampler
        return sorted(int(i) for i in rows)

    with torch.random.fork_rng(devices=[]):
        first, second = drawn(), drawn()
    if first != second:
        log.warning("%s: its sampler draws other images each time; %d images of one draw are used.", spec, len(first))
    if not first:
        raise DataError(f"data {spec}: its sampler gives no image.")
    return first


def _open_rows(
    source: Any,
    rows: Sequence[int],
    described: Any,
    reading: Reading,
    options: Mapping[str, Any],
    *,
    spec: str = "",
    collate: Any = None,
    taken: Callable[[Item], Item] | None = None,
    workers: int = 0,
) -> Data:
    spec = spec or _spec_of(source)
    with torch.random.fork_rng(devices=[]):
        first = source[rows[0]] if collate is None else collate([source[rows[0]]])
    if _is_list_of_items(first):  # the collate function only makes a list
        first, collate = first[0], None
    names = _names_of_item(first, reading, spec, collated=collate is not None)

    def read(chosen: Sequence[int]) -> Iterator[Item]:
        entries: Iterator[Any] = (source[rows[i]] for i in chosen)
        if workers and len(chosen) > 1:
            entries = _by_workers(source, [rows[i] for i in chosen], workers)
        for entry in entries:
            item = names.of(entry if collate is None else collate([entry]))
            yield item if taken is None else taken(item)

    transform = _transforms_of(described)
    applied = reading.applied or Normalisation.of(*(normalisation_in(transform) or (None, None)))
    labels = None if collate is not None else _listed_labels(described, rows, spec)
    left_out = options.get("label_table") == {}
    if left_out:
        labels = ItemLabels.none(len(rows))
    data = ItemData(
        spec, len(rows), read, labels=labels, names=_class_names(described), applied=applied, source=source, **options
    )
    return _watched(data, transform, reading, options)


def _watched(data: ItemData, transform: Any, reading: Reading, options: Mapping[str, Any]) -> Data:
    """Return the data if its images are the same each time they are read; kept from one reading where asked."""
    if reading.keep:
        items = (item for _, item in data.items(range(data._count())))
        return _keep(items, data.spec, reading, options, names=data.class_names, applied=data._applied)
    step = random_step(transform)
    differs = None if step else _differs(data)
    if step is None and differs is None:
        return data
    what = f"its transforms hold {step}" if step else f"image {differs} differs between two readings"
    raise DataError(
        f"data {data.spec}: {what}, so its images are not the same each time; give it without random transforms, or "
        "keep one reading of them: open_data(…, keep=True)."
    )


def _differs(data: ItemData) -> int | None:
    """Return the row of an image that is not the same each time it is read; None where none of some is."""
    n = data._count()
    rows = sorted({0, n // 2, n - 1})
    with torch.random.fork_rng(devices=[]):
        readings = [[item[0] for _, item in data.items(rows)] for _ in range(READINGS)]
    for row, first, *others in zip(rows, *readings, strict=True):
        if not all(is_same(first, other) for other in others):
            return int(row)
    return None


def _by_workers(source: Any, rows: list[int], workers: int) -> Iterator[Any]:
    """Read rows of a data set in processes of their own, as its loader would."""
    subset: Any = torch.utils.data.Subset(source, rows)
    for batch in DataLoader(subset, batch_size=16, num_workers=workers, collate_fn=list):
        yield from batch


def _keep(
    items: Iterator[Any],
    spec: str,
    reading: Reading,
    options: Mapping[str, Any],
    *,
    names: Sequence[str] | None = None,
    applied: Normalisation | None = None,
) -> Data:
    """Read items once and keep them in memory; a limit is that of the first ones read."""
    limit = options.get("limit")
    items_read: list[Item] = []
    of_item: ItemNames | None = None
    size = 0
    for entry in itertools.islice(items, limit):
        of_item = of_item or _names_of_item(entry, reading, spec)
        image, label = of_item.of(entry)
        image = image.copy() if hasattr(image, "getbands") else image  # an image file that is open stays readable
        items_read.append((image, label))
        size += bytes_of(image)
        if size > MOST_KEPT:
            raise DataError(
                f"data {spec}: it has no length, and its first {len(items_read)} images take {size / 2**30:.1f} GB of "
                "memory; give a limit, as in open_data(…, limit=1000), or a data set with items by number."
            )
    if not items_read:
        raise DataError(f"data {spec}: it gave no image; an iterator that was read before is empty.")
    left_out = options.get("label_table") == {}
    labels = [None if left_out else label for _, label in items_read]
    why = "is read once, as asked" if reading.keep else "has no length, so it is read once"
    log.warning("data %s %s: %d images (%.1f MB) are kept in memory.", spec, why, len(items_read), size / 2**20)

    def read(rows: Sequence[int]) -> Iterator[Item]:
        return (items_read[i] for i in rows)

    item_labels = read_labels(labels, names, f"data {spec}")
    return ItemData(spec, len(items_read), read, labels=item_labels, applied=applied or reading.applied, **options)


def _singles(batches: Iterator[Any], reading: Reading, batched: bool) -> Iterator[Item]:
    """Yield the (image, label) of every row of batches; where it is unknown whether they are, four axes make one."""
    for batch in batches:
        if _is_list_of_items(batch):
            of_item = _names_of_item(batch[0], reading, "DataLoader")
            yield from (of_item.of(entry) for entry in batch)
            continue
        names = _names_of_item(batch, reading, "DataLoader", collated=True)
        images, labels = names.of_batch(batch)
        if is_image(images) and not (batched and is_array(images)):
            yield images, labels
        else:
            yield from zip(images, itertools.repeat(None) if labels is None else labels, strict=False)


def pixels_of_any(subject: Subject, images: Any) -> torch.Tensor:
    """Return images of any usual form, or all of a data source or object, as checked pixels for a model."""

    def is_plain(value: Any) -> bool:
        return is_array(value) or isinstance(value, Image.Image)

    is_list = isinstance(images, (list, tuple)) and bool(images) and not _is_pair(images)
    if is_plain(images) or (is_list and all(map(is_plain, images))):
        return subject.pixels(images)
    data = open_data([images] if not isinstance(images, Data) and is_image(images) else images)
    return torch.cat([batch.images for batch in data.batches(subject)])


# an item's parts


@dataclass(frozen=True, slots=True)
class ItemNames:
    """Where image and label stand in an item: keys of a mapping, places in a tuple, or the item itself."""

    image: Any
    label: Any
    collated: bool = False

    def of(self, entry: Any) -> Item:
        """Return the image and the label of an item."""
        image, label = self.of_batch(entry)
        if self.collated:
            image, label = image[0], None if label is None else label[0]
        return image, label

    def of_batch(self, entry: Any) -> Item:
        """Return the images and labels of an item or a batch as they stand there."""
        if self.image is None:
            return entry, None
        return entry[self.image], None if self.label is None else entry[self.label]


def _names_of_item(entry: Any, reading: Reading, spec: str, *, collated: bool = False) -> ItemNames:
    """Find the image and the label in an item, or say what the item has instead of an image."""

    def holds_image(value: Any) -> bool:
        return is_image(value) or (collated and ((is_array(value) and value.ndim == 4) or _is_list_of_images(value)))

    if (isinstance(entry, Mapping) and not is_image(entry)) or hasattr(entry, "keys"):
        keys = {str(key).lower(): key for key in entry}
        image = _chosen(entry, reading.image, "image", spec)
        if image is None:
            by_key = [keys[k] for k in (*IMAGE_KEYS, *IMAGE_FILES) if k in keys and holds_image(entry[keys[k]])]
            image = next(iter(by_key or [k for k in entry if holds_image(entry[k])]), None)
        if image is None or not holds_image(entry[image]):
            raise DataError(
                f"data {spec}: its items have no image; they have {', '.join(map(str, entry))}. Name the entry: "
                "open_data(…, image=…)."
            )
        label = _chosen(entry, reading.label, "label", spec)
        label = label if label is not None else next((keys[k] for k in LABEL_KEYS if k in keys), None)
        return ItemNames(image, label, collated)
    if isinstance(entry, (tuple, list)) and not (collated and _is_list_of_images(entry)):
        position = next((i for i, value in enumerate(entry) if holds_image(value)), None)
        if position is None:
            kinds = ", ".join(type(value).__name__ for value in entry[:5])
            raise DataError(f"data {spec}: its items have no image; they are ({kinds}). Want (image, label).")
        return ItemNames(position, position + 1 if position + 1 < len(entry) else None, collated)
    if holds_image(entry):
        return ItemNames(None, None, collated)
    raise DataError(
        f"data {spec}: its items are no images but {type(entry).__name__}; want an image, (image, label) or a mapping "
        "with both."
    )


def _is_list_of_images(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(is_image(x) for x in value)


def _is_list_of_items(value: Any) -> bool:
    """Whether it is a list of items that no collate function has put together."""

    def is_item(part: Any) -> bool:
        parts = part.values() if isinstance(part, Mapping) else part if isinstance(part, tuple) else ()
        return not is_image(part) and any(is_image(x) for x in parts)

    return isinstance(value, list) and bool(value) and all(map(is_item, value))


def _chosen(entry: Mapping[Any, Any], name: str | None, what: str, spec: str) -> Any:
    if name is not None and name not in entry:
        raise DataError(f"data {spec}: no {what} {name!r} in its items; they have {', '.join(map(str, entry))}.")
    return name


# what a data set says of itself


def _spec_of(source: Any) -> str:
    name = type(source).__name__
    inner = getattr(source, "dataset", None)
    return f"{name}({_spec_of(inner)})" if inner is not None and inner is not source else name


def _inner(source: Any, rows: Sequence[int]) -> tuple[Any, list[int]]:
    """Return the data set below subsets of it, and its rows."""
    chosen = list(rows)
    while hasattr(source, "dataset") and hasattr(source, "indices"):
        chosen = [int(source.indices[i]) for i in chosen]
        source = source.dataset
    return source, chosen


def _class_names(source: Any) -> list[Any] | None:
    source, _ = _inner(source, [])
    names = getattr(source, "classes", None)
    return list(names) if isinstance(names, (list, tuple)) and names else None


def _transforms_of(source: Any) -> Any:
    source, _ = _inner(source, [])
    candidates = (getattr(source, name, None) for name in ("transform", "transforms"))
    return next((t for t in candidates if t is not None), None)


def _listed_labels(source: Any, rows: Sequence[int], spec: str) -> ItemLabels | None:
    """Return the labels that a data set lists beside its images, under the names torchvision uses."""
    inner, chosen = _inner(source, rows)
    if getattr(inner, "target_transform", None) is not None:
        return None
    for name in ("targets", "labels", "_labels", "y"):
        listed = getattr(inner, name, None)
        if listed is None or not hasattr(listed, "__len__") or callable(listed) or len(listed) != len(inner):
            continue
        numbers = as_array(listed)
        if numbers.dtype.kind in "iu" and numbers.ndim == 1:
            return read_labels(list(numbers[chosen]), _class_names(inner), f"data {spec}")
    return None
