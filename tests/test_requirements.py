"""Requirements: floors are the versions that have what the code uses, and the versions tried lie within the ranges."""

import hashlib
import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.tags import parse_tag
from packaging.version import Version

from tests import locking

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ALL = [Requirement(text) for text in [*PROJECT["dependencies"], *(item for extra in EXTRAS.values() for item in extra)]]

NOT_TRIED = {"onnxruntime-gpu", "gcsfs", "adlfs"}  # need CUDA, or an account of a cloud; the lock has the CPU's runtime

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
        if requirement.name in NOT_TRIED:
            continue
        if requirement.marker is None or requirement.marker.evaluate():
            tried = pinned[requirement.name.lower().replace("_", "-")]
            assert requirement.specifier.contains(Version(tried).public, prereleases=True), (str(requirement), tried)


def test_the_versions_installed_here_are_at_least_the_floors():
    for requirement in map(Requirement, PROJECT["dependencies"]):
        if requirement.marker is None or requirement.marker.evaluate():
            assert Version(version(requirement.name)) >= floor(requirement), str(requirement)


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-bento.lock"])
def test_a_lock_holds_the_versions_of_the_constraints_with_hashes_and_no_address(name):
    text = (ROOT / name).read_text()
    entries = re.split(r"\n(?=\S)", text.strip())[1:]
    versions = {}
    for entry in entries:
        head, *lines = entry.split(" \\\n")
        match = re.fullmatch(r"([a-z0-9-]+)==([^\s;]+)( ; sys_platform == \"linux\")?", head)
        assert match, head
        assert lines, f"{head}: no hash"
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line) for line in lines), head
        versions[match.group(1)] = Version(match.group(2))
    pins = locking.pinned()
    assert all(pins[package] == version for package, version in versions.items()), "run make lock"
    if name == "requirements.lock":
        assert set(versions) == set(pins), f"run make lock: {sorted(set(versions) ^ set(pins))}"
    assert "://" not in text


def test_a_wheel_is_locked_where_it_may_be_installed():
    wanted = [
        "cp311-cp311-manylinux_2_28_x86_64",
        "py3-none-any",
        "cp39-abi3-win_amd64",
        "cp313-cp313-macosx_11_0_arm64",
    ]
    for text in wanted:
        assert locking.is_wanted(parse_tag(text)), text
    for text in ("cp310-cp310-manylinux_2_28_x86_64", "cp311-cp311-win32", "pp311-pypy311_pp73-manylinux_2_28_x86_64"):
        assert not locking.is_wanted(parse_tag(text)), text


def test_an_index_page_gives_addresses_and_hashes(tmp_path):
    digest = "a" * 64
    (tmp_path / "demo").mkdir()
    links = [f"demo-1.0-py3-none-any.whl#sha256={digest}", "demo-1.0.tar.gz", "demo-2.0-py3-none-any.whl", "other.txt"]
    (tmp_path / "demo" / "index.html").write_text("".join(f'<a href="{link}">x</a>' for link in links))
    (tmp_path / "demo" / "demo-2.0-py3-none-any.whl").write_bytes(b"two")
    (tmp_path / "demo" / "demo-1.0.tar.gz").write_bytes(b"source")
    index = [tmp_path.as_uri()]
    assert locking.hashes_of("demo", Version("1.0"), index, []) == [digest]  # a wheel goes before the source
    assert locking.hashes_of("demo", Version("2.0"), index, []) == [hashlib.sha256(b"two").hexdigest()]
    assert locking.hashes_of("demo", Version("3.0"), index, []) == []


def test_the_workflow_names_actions_by_commit_and_runs_nothing_that_was_typed():
    workflow = yaml.safe_load((ROOT / "docs" / "examples" / "gate.yml").read_text())
    steps = workflow["jobs"]["gate"]["steps"]
    for step in steps:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step.get("uses", "actions/x@" + "0" * 40)), step
        assert "${{" not in step.get("run", ""), step
    assert any("--require-hashes" in step.get("run", "") for step in steps)
    assert workflow["permissions"] == {"contents": "read"}


def test_every_example_for_ci_checks_the_version_and_quotes_what_was_typed():
    gitlab = yaml.safe_load((ROOT / "docs" / "examples" / "gate.gitlab-ci.yml").read_text())["gate"]
    assert gitlab["rules"] == [{"if": "$VERSION =~ /^[0-9]+$/"}]
    jenkins = (ROOT / "docs" / "examples" / "Jenkinsfile").read_text()
    assert "*[!0-9]*" in jenkins
    assert not re.search(r'sh "[^"]*\$', jenkins)  # Groovy would put the value into the script
    for text in (*gitlab["script"], *re.findall(r"sh '(.*)'", jenkins)):
        assert not re.search(r'(?<!["/@])\$(VERSION|NAME|AUDITOR)(?![^"]*")', text), text
    assert "junit" in gitlab["artifacts"]["reports"]
