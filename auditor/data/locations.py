"""Locations: one string that names a source, on this machine or in a store, and which layout its files have.

``PATH?image=…&label=…&split=…``: a folder or a file, also with ``*`` and ``{000..009}`` in the name, on disk or behind
``s3://``, ``gs://``, ``az://``, ``http(s)://``. What lies there says what it is: images, Parquet, Arrow (with the files
of Hugging Face's ``save_to_disk``), tar, or one ``.npz``.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl

from auditor.data.folder_images import FolderImages
from auditor.data.shards import Layout, ShardedData
from auditor.data.source import Data
from auditor.data.store import EXTRA_OF, FarStore, LocalStore, S3Store, Store, Stored
from auditor.errors import DataError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
PARQUET, ARROW, TAR = (".parquet", ".pq"), (".arrow", ".feather", ".ipc"), (".tar", ".tar.gz", ".tgz")
FILES = (*PARQUET, *ARROW, *TAR, ".npz")
OPTIONS = ("image", "label", "split")
QUERY = re.compile(r"\?(?=[A-Za-z_-]+=)")
BRACES = re.compile(r"\{([^{}]*)\}")
MOST_NAMES = 100_000  # that braces may stand for
SMALL = 2**20  # bytes of a file that describes others


def open_location(text: str, image: str | None, label: str | None, options: dict[str, Any]) -> Data:
    """Open the source that a string names."""
    from auditor.data import readers

    scheme, _, rest = text.partition(":")
    if scheme in ("sklearn", "torchvision"):
        if image is not None or label is not None:
            raise DataError(f"data {text}: image and label name columns; this source has none.")
        name, _, query = rest.partition("?")
        arguments = dict(parse_qsl(query, keep_blank_values=True))
        opener = readers.open_sklearn if scheme == "sklearn" else readers.open_torchvision
        return opener(name, arguments, text, options)
    if scheme in ("folder", "npz", "file") and rest and not rest.startswith("//"):
        return _open_files(rest, text, image, label, options)
    return _open_files(text, text, image, label, options)


def _open_files(address: str, spec: str, image: str | None, label: str | None, options: dict[str, Any]) -> Data:
    address, arguments = _arguments(address, spec)
    wanted = {"image": image, "label": label, **arguments}
    store, only = _store(address, spec)
    if isinstance(only, Stored) and only.name.endswith(".npz"):
        return _open_npz(store, only, spec, wanted, options)
    layout = _layout(store, [only] if isinstance(only, Stored) else _chosen(store, only), wanted)
    return ShardedData(spec, layout, f"{store.address} {sorted(wanted.items(), key=str)}", **options)


def _arguments(address: str, spec: str) -> tuple[str, dict[str, str]]:
    """Split off what stands behind a question mark, where that is options and no part of a file's name."""
    if not QUERY.search(address) or Path(address).expanduser().exists():
        return address, {}
    address, query = QUERY.split(address, maxsplit=1)
    arguments = dict(parse_qsl(query, keep_blank_values=True))
    unknown = [name for name in arguments if name not in OPTIONS]
    if unknown:
        raise DataError(
            f"data {spec.partition('?')[0]}: unknown option {unknown[0]} behind the question mark; there are image, "
            "label and split. A signed address would be stored with what is made of the data: use the store's "
            "credentials."
        )
    return address, arguments


def _store(address: str, spec: str) -> tuple[Store, Stored | re.Pattern[str] | None]:
    """Return the store of an address, and the one file of it or the pattern of names that is meant."""
    scheme, is_far, _ = address.partition("://")
    if is_far and scheme not in (*EXTRA_OF, "file"):
        raise DataError(
            f"data {spec}: {scheme}:// is no store that is known here; there are s3, gs, az, http, https and paths."
        )
    if scheme == "file" and is_far:
        address, is_far = address.partition("://")[2], ""
    pattern = None
    if re.search(r"[*{\[]", address) and not (not is_far and Path(address).expanduser().exists()):
        address, _, last = address.rpartition("/")
        if re.search(r"[*{\[]", address):
            raise DataError(f"data {spec}: * and {{…}} may stand in the last part of a name only.")
        pattern = _pattern(last, spec)
    if not is_far:
        return _local(Path(address or ".").expanduser(), spec, pattern)
    is_file = pattern is None and address.lower().endswith(FILES)
    folder, _, name = address.rpartition("/") if is_file else (address, "", "")
    if folder.rstrip("/").endswith(":"):
        raise DataError(f"data {spec}: want a bucket or a server behind {scheme}://.")
    store = _far(scheme, folder, spec)
    return store, store.stat(name) if is_file else pattern


def _far(scheme: str, address: str, spec: str) -> FarStore:
    from auditor.data.http_listing import HttpStore

    kinds: Mapping[str, type[FarStore]] = {"s3": S3Store, "s3a": S3Store, "http": HttpStore, "https": HttpStore}
    return kinds.get(scheme, FarStore)(address, spec)


def _local(path: Path, spec: str, pattern: re.Pattern[str] | None) -> tuple[Store, Stored | re.Pattern[str] | None]:
    if path.is_dir():
        return LocalStore(path.absolute(), spec), pattern
    if not path.exists():
        raise DataError(
            f"data {spec}: no such file or folder; give images or files of images, on disk or in a store, "
            "sklearn:digits or torchvision:NAME?root=PATH."
        )
    if not path.name.lower().endswith(FILES):
        raise DataError(
            f"data {spec}: want an image folder, Parquet, Arrow, tar or an .npz file, got a file of type "
            f"{path.suffix or 'unknown'}."
        )
    store = LocalStore(path.absolute().parent, spec)
    return store, store.stat(path.name)


def _pattern(text: str, spec: str) -> re.Pattern[str]:
    """Return a pattern of names from one with ``*``, ``?``, ``[…]``, ``{a,b}`` and ``{000..009}``."""
    parts = BRACES.split(text)
    choices = [[part] if k % 2 == 0 else _choices(part) for k, part in enumerate(parts)]
    n = 1
    for choice in choices:
        n *= len(choice)
    if n > MOST_NAMES:
        raise DataError(f"data {spec}: its braces stand for {n:,} names; use * instead.")
    return re.compile("|".join(fnmatch.translate("".join(parts)) for parts in itertools.product(*choices)))


def _choices(inside: str) -> list[str]:
    """Return what braces stand for.

    >>> _choices("008..010"), _choices("a,b")
    (['008', '009', '010'], ['a', 'b'])
    """
    bounds = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", inside)
    if bounds is None:
        return inside.split(",")
    first, last = int(bounds[1]), int(bounds[2])
    return [str(k).zfill(len(bounds[1])) for k in range(first, min(last, first + MOST_NAMES) + 1)]


def _chosen(store: Store, pattern: re.Pattern[str] | None) -> Iterator[Stored]:
    files = store.walk()
    if pattern is None:
        return files
    return (file for file in files if pattern.fullmatch(PurePosixPath(file.name).name))


def _layout(store: Store, files: Iterable[Stored], wanted: Mapping[str, str | None]) -> Layout:
    """Look at the names and open what they are."""
    others: list[Stored] = []
    types: Counter[str] = Counter()
    split = f"{wanted['split']}/" if wanted.get("split") else ""

    def images() -> Iterator[Stored]:
        for file in files:
            types[PurePosixPath(file.name).suffix.lower() or "no ending"] += 1
            if not file.name.startswith(split):
                continue
            if PurePosixPath(file.name).suffix.lower() in IMAGE_SUFFIXES:
                yield file
            elif file.name.lower().endswith((*FILES, ".json")):
                others.append(file)

    folder = FolderImages(store, images())
    if folder.labels.numbers.size:
        return folder
    return _table_layout(store, sorted(others), types, wanted)


def _table_layout(store: Store, files: list[Stored], types: Counter[str], wanted: Mapping[str, str | None]) -> Layout:
    named = {file.name: file for file in files}
    if "dataset_dict.json" in named:
        splits = sorted({name.partition("/")[0] for name in named if name.count("/") == 1})
        raise DataError(
            f"data {store.spec}: it holds several data sets ({', '.join(splits)}); add ?split=NAME to it, or give the "
            "folder of one."
        )
    image, label = wanted["image"], wanted["label"]

    def of(endings: tuple[str, ...]) -> list[Stored]:
        return [file for file in files if file.name.lower().endswith(endings) and file.size]

    if of(PARQUET):
        from auditor.data.table_files import ParquetFiles

        return ParquetFiles(store, of(PARQUET), image, label)
    if of(ARROW):
        from auditor.data.table_files import ArrowFiles

        return ArrowFiles(store, _in_order_of_state(store, of(ARROW), named), image, label)
    if of(TAR):
        from auditor.data.tar_files import TarFiles

        return TarFiles(store, of(TAR), image, label)
    listed = ", ".join(f"{n:,} of type {kind}" for kind, n in types.most_common(4))
    what = f"among its files ({listed})" if types else "there, it is empty"
    raise DataError(
        f"data {store.spec}: no image file {what}; give a folder or prefix with images "
        f"({', '.join(sorted(IMAGE_SUFFIXES))}), Parquet, Arrow or tar files in it or below."
    )


def _in_order_of_state(store: Store, files: list[Stored], named: Mapping[str, Stored]) -> list[Stored]:
    """Return the files of a data set on disk in its own order, without what it no longer uses."""
    state = next((file for name, file in named.items() if PurePosixPath(name).name == "state.json"), None)
    if state is None or state.size > SMALL:
        return files
    try:
        listed = json.loads(store.read(state.name, 0, state.size))["_data_files"]
        names = [PurePosixPath(str(entry["filename"])).name for entry in listed]
    except (ValueError, KeyError, TypeError):
        return files
    at = {PurePosixPath(file.name).name: file for file in files}
    missing = [name for name in names if name not in at]
    if missing:
        raise DataError(f"data {store.spec}: {missing[0]} is missing, which state.json lists; copy it too.")
    return [at[name] for name in names] or files


def _open_npz(store: Store, file: Stored, spec: str, wanted: Mapping[str, str | None], options: dict[str, Any]) -> Data:
    from auditor.data.readers import open_npz

    if any(wanted.values()):
        raise DataError(f"data {spec}: an .npz has the members images and labels; leave the options out.")
    return open_npz(lambda: store.open(file), spec, options)
