"""The table of kinds: those of this package, and those that installed packages add by an entry point.

A package adds a kind with the entry point group ``auditor.kinds``, the kind's name as the entry's name and
``package.module:Class`` as its value; docs/adding-a-kind.md has the steps. Entry points are read when the first
kind is asked for, and the code of a package is imported only when one of its kinds is used.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, distribution, entry_points
from typing import Any

from auditor.errors import ArtifactError, OptionError

GROUP = "auditor.kinds"
PACKAGE = "mlflow-auditor"
BUILT_IN: Mapping[str, str] = {
    "nmf": "auditor.explainers.nmf.explainer:NmfExplainer",
    "coupled": "auditor.explainers.coupled.explainer:CoupledExplainer",
    "xnn": "auditor.explainers.xnn.explainer:XnnExplainer",
    "tree": "auditor.explainers.tree.explainer:TreeExplainer",
    "deepfacto": "auditor.explainers.deepfacto.explainer:DeepFactoExplainer",
    "rde": "auditor.explainers.rde.explainer:RdeExplainer",
}
_KIND = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")  # names that PyPI accepts
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,39}")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind that is installed: its name, where its class is, and the package that brings it."""

    name: str
    where: str  # "package.module:Class"
    package: str
    version: str

    @property
    def is_built_in(self) -> bool:
        """Whether it comes with this package."""
        return self.name in BUILT_IN

    def provider(self) -> dict[str, str] | None:
        """Return what a manifest says of the package that brings the kind; nothing for ours."""
        return None if self.is_built_in else {"package": self.package, "version": self.version}

    def load(self) -> Any:
        """Import the class."""
        module, _, name = self.where.partition(":")
        try:
            value: Any = importlib.import_module(module)
            for part in name.split("."):
                value = getattr(value, part)
        except Exception as error:
            if self.is_built_in:
                raise
            raise ArtifactError(
                f"kind {self.name!r} of package {self.package} cannot be loaded from {self.where}: "
                f"{type(error).__name__}: {' '.join(str(error).split())[:160]}; install {self.package} again."
            ) from error
        return value


def find_kind(name: str, provider: Any = None) -> Kind:
    """Return an installed kind; ``provider`` is what a manifest says of the package that brings it.

    >>> find_kind("nmf").where
    'auditor.explainers.nmf.explainer:NmfExplainer'
    """
    name, added = str(name), _added()
    if name in added:  # a package that adds one of our names is refused here too: it must be clear which code runs
        return _checked(name, added[name])
    if name in BUILT_IN:
        return _built_in(name)
    raise ArtifactError(_missing(name, provider))


def installed_kinds() -> list[Kind]:
    """Return every kind that can be used here, ours first; a clash of names is an error."""
    return [*map(_built_in, BUILT_IN), *(_checked(name, entries) for name, entries in sorted(_added().items()))]


def forget_installed() -> None:
    """Read the entry points again at the next question, after a package was installed."""
    _added.cache_clear()


def _built_in(name: str) -> Kind:
    return Kind(name, BUILT_IN[name], PACKAGE, _version(PACKAGE))


@lru_cache(maxsize=1)
def _added() -> dict[str, list[EntryPoint]]:
    entries: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        entries.setdefault(entry.name, []).append(entry)
    return entries


def _checked(name: str, entries: list[EntryPoint]) -> Kind:
    packages = sorted({_package(entry) for entry in entries})
    if name in BUILT_IN:
        raise OptionError(
            f"package {packages[0]} adds a kind called {name!r}, which is one of {PACKAGE}'s own; rename it there or "
            f"uninstall it: pip uninstall {packages[0]}."
        )
    if len({entry.value for entry in entries}) > 1:
        raise OptionError(f"kind {name!r} is added by {' and '.join(packages)}; uninstall all of them but one.")
    if not _KIND.fullmatch(name):
        raise OptionError(
            f"package {packages[0]} adds a kind called {name[:60]!r}; a kind's name has 1 to 40 lower-case letters, "
            "digits, - or _, and begins with a letter."
        )
    return Kind(name, entries[0].value, packages[0], _version(packages[0]))


def _package(entry: EntryPoint) -> str:
    dist: Distribution | None = entry.dist
    return str(dist.metadata["Name"]) if dist is not None else entry.value.partition(".")[0]


def _version(package: str) -> str:
    try:
        return distribution(package).version
    except Exception:  # a source tree that was never installed has no metadata
        return ""


def _missing(name: str, provider: Any) -> str:
    """Say what to install; the provider comes from a manifest, so it is printed only when it looks like a package."""
    names = ", ".join([*BUILT_IN, *sorted(_added())])
    if not isinstance(provider, Mapping):
        return f"unknown explainer kind {name[:60]!r}; the kinds are {names}."
    package, version = provider.get("package"), provider.get("version")
    if not (isinstance(package, str) and _PACKAGE.fullmatch(package)):
        return f"kind {name[:60]!r} comes from a package that is not installed here; the kinds are {names}."
    fitted = f" (fitted with version {version})" if isinstance(version, str) and _VERSION.fullmatch(version) else ""
    return (
        f"kind {name[:60]!r} comes from the package {package}{fitted}, which is not installed here; if you trust it: "
        f"pip install {package}."
    )
