"""Requirements: floors are the versions that have what the code uses, and the versions tried lie within the ranges."""

import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ALL = [Requirement(text) for text in [*PROJECT["dependencies"], *(item for extra in EXTRAS.values() for item in extra)]]

# package, first version with it, where it is, what for
NEEDED = [
    ("mlflow", "3.17", "mlflow.pytorch", "_validate_pt2_archive_is_pickle_free"),  # 3.16.1 has none
    ("mlflow", "3.17", "mlflow.server.fastapi_app", "create_fastapi_app"),
    ("torch", "2.10", "torch.export", "load"),  # writes and reads the archives that MLflow's check knows
    ("torchvision", "0.25", "torchvision", "models"),  # of torch 2.10
    ("onnxscript", "0.6", "onnxscript._framework_apis.torch_2_11", "convert_version"),  # torch's exporter asks for it
    ("bentoml", "1.4.30", "bentoml._internal.utils.circus", "create_standalone_arbiter"),
]


def floor(requirement: Requirement) -> Version:
    (lowest,) = [Version(s.version) for s in requirement.specifier if s.operator == ">="]
    return lowest


@pytest.mark.parametrize(("package", "first", "module", "name"), NEEDED)
def test_the_floor_has_what_the_code_uses(package, first, module, name):
    for requirement in ALL:
        if requirement.name == package:
            assert floor(requirement) >= Version(first), f"{requirement}: {module}.{name} came with {first}"
    assert package in {requirement.name for requirement in ALL}
    if package not in ("onnxscript", "bentoml") or importlib.util.find_spec(package):
        assert hasattr(importlib.import_module(module), name)


def test_every_requirement_has_a_floor_and_one_only():
    for requirement in ALL:
        floor(requirement)
    for name in {requirement.name for requirement in ALL}:
        assert len({floor(r) for r in ALL if r.name == name}) == 1, name


def test_the_versions_tried_lie_within_the_ranges():
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    pinned = {name.lower().replace("_", "-"): tried for name, tried in pinned.items()}
    for requirement in ALL:
        if requirement.marker is None or requirement.marker.evaluate():
            tried = pinned[requirement.name.lower().replace("_", "-")]
            assert requirement.specifier.contains(Version(tried).public, prereleases=True), (str(requirement), tried)


def test_the_versions_installed_here_are_at_least_the_floors():
    for requirement in map(Requirement, PROJECT["dependencies"]):
        if requirement.marker is None or requirement.marker.evaluate():
            assert Version(version(requirement.name)) >= floor(requirement), str(requirement)
