"""Write requirements.lock and requirements-bento.lock: every version of constraints.txt with the sha256 of its files.

    make lock          # after a change of constraints.txt

pip takes nothing that is not in such a file (``--require-hashes``). The hashes are those that the package indexes which
pip is configured for give for the wheels of Python 3.11 to 3.13 on Linux, macOS and Windows, and for the sources where
a package has no wheel; a file that an index gives no hash for is read. No address stands in a lock.
"""

from __future__ import annotations

import hashlib
import html.parser
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import tomllib
from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PYTHONS = ("311", "312", "313")
PLATFORM = re.compile(r"^(any|(many)?linux\w*_(x86_64|aarch64)|macosx_\w+_(arm64|universal2)|win_amd64)$")
LINUX_ONLY = re.compile(r"^(nvidia-|cuda-|triton$)")  # what torch brings there
OURS = "mlflow-auditor"
HEAD = "# Made by `make lock` from constraints.txt; do not edit. pip installs these files and no others.\n"


class Links(html.parser.HTMLParser):
    """The links of an index page."""

    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hrefs += [value for name, value in attrs if tag == "a" and name == "href" and value]


def indexes() -> tuple[list[str], list[Path]]:
    """Return the indexes and the folders of wheels that pip is configured for."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    values: dict[str, str] = {}
    for line in listing.stdout.splitlines():
        name, _, value = line.partition("=")
        values[name.rpartition(".")[2]] = value.strip("'\"")
    addresses = [values.get("index-url", "https://pypi.org/simple"), *values.get("extra-index-url", "").split()]
    return addresses, [Path(folder) for folder in values.get("find-links", "").split()]


def files_of(name: str, addresses: list[str], folders: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield the address and the sha256 ("" where none is given) of every file of a package."""
    for index in addresses:
        page = f"{index.rstrip('/')}/{name}/"
        try:
            with urllib.request.urlopen(
                page if not page.startswith("file:") else page + "index.html", timeout=60
            ) as answer:
                links = Links()
                links.feed(answer.read().decode("utf-8", "replace"))
        except OSError:
            continue
        for href in links.hrefs:
            address, fragment = urldefrag(urljoin(page, href))
            yield address, fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
    for folder in folders:
        for path in folder.glob("*"):
            if canonicalize_name(path.name.partition("-")[0]) == name:
                yield path.resolve().as_uri(), ""


def is_wanted(tags: frozenset[Tag]) -> bool:
    """Whether a wheel runs on a Python and a system that locks are for."""
    return any(
        PLATFORM.match(tag.platform)
        and (
            tag.interpreter in ("py3", *(f"cp{v}" for v in PYTHONS))
            or (tag.abi == "abi3" and tag.interpreter[:3] == "cp3")
        )
        for tag in tags
    )


def hashes_of(name: str, version: Version, addresses: list[str], folders: list[Path]) -> list[str]:
    """Return the hashes of a version's wheels, or of its sources when it has no wheel."""
    wheels, sources = set(), set()
    for address, digest in files_of(name, addresses, folders):
        file = unquote(address.rpartition("/")[2])
        try:
            if file.endswith(".whl"):
                _, of, _, tags = parse_wheel_filename(file)
                if of == version and is_wanted(tags):
                    wheels.add(digest or _sha256(address))
            elif parse_sdist_filename(file)[1] == version:
                sources.add(digest or _sha256(address))
        except (InvalidWheelFilename, InvalidSdistFilename):
            continue
    return sorted(wheels or sources)


def _sha256(address: str) -> str:
    with urllib.request.urlopen(address, timeout=600) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pinned() -> dict[str, Version]:
    """Return the versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, _, version in pins}


def bento_requirements() -> list[str]:
    """Return what the project needs with the extras of a bento."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"] + [x for e in ("serve", "onnx") for x in project["optional-dependencies"][e]]


def closure(requirements: list[str]) -> set[str]:
    """Return the names of the installed packages that requirements lead to."""
    names: set[str] = set()
    look = [(Requirement(text), "") for text in requirements]
    done: set[tuple[str, frozenset[str]]] = set()
    while look:
        requirement, extra = look.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        names.add(name)
        if (name, frozenset(requirement.extras)) in done:
            continue
        done.add((name, frozenset(requirement.extras)))
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        look += [(Requirement(text), e) for text in needs for e in ("", *requirement.extras)]
    return names


def write_lock(path: Path, pins: dict[str, Version], hashes: dict[str, list[str]]) -> None:
    """Write a lock, one package after the other."""
    lines = []
    for name, version in sorted(pins.items()):
        marker = ' ; sys_platform == "linux"' if LINUX_ONLY.match(name) else ""
        listed = [f"    --hash=sha256:{digest}" for digest in hashes[name]]
        lines.append(" \\\n".join([f"{name}=={version}{marker}", *listed]))
    path.write_text(HEAD + "\n".join(lines) + "\n")


def main() -> None:
    """Write both locks."""
    pins, (addresses, folders) = pinned(), indexes()
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda item: hashes_of(*item, addresses, folders), pins.items())
        hashes = dict(zip(pins, results, strict=True))
    missing = [name for name in pins if not hashes[name]]
    if missing:
        sys.exit(f"make lock: no index has a file of {', '.join(f'{n}=={pins[n]}' for n in missing)}.")
    write_lock(ROOT / "requirements.lock", pins, hashes)
    served = closure(bento_requirements())
    write_lock(ROOT / "requirements-bento.lock", {n: v for n, v in pins.items() if n in served}, hashes)


if __name__ == "__main__":
    main()
