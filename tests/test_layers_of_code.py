"""Imports point down, public names exist, docstring examples run, and nothing is ever unpickled."""

import ast
import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPORT_NAME = {
    "kernels": "auditor.kernels",
    "auditor": "auditor",
    "plugins": "auditor.plugins",
    "service": "auditor.service",
}
MAY_IMPORT = {"kernels": set(), "auditor": {"kernels"}, "plugins": {"auditor"}, "service": {"auditor", "plugins"}}
LAYERS = [layer for layer in MAY_IMPORT if (ROOT / layer).is_dir()]


def part_of(module: str) -> str | None:
    for layer in ("kernels", "plugins", "service"):
        if module == IMPORT_NAME[layer] or module.startswith(IMPORT_NAME[layer] + "."):
            return layer
    return "auditor" if module == "auditor" or module.startswith("auditor.") else None


def imported(path: Path, whole: bool) -> set[str]:
    """Modules imported by a file: at module level, or anywhere when ``whole``."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if whole else iter(tree.body)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_down(layer):
    for path in (ROOT / layer).rglob("*.py"):
        if path.name == "cli.py" or path.parent.name == "commands":
            continue
        upward = {part_of(m) for m in imported(path, whole=layer != "plugins")} - MAY_IMPORT[layer] - {layer, None}
        assert not upward, f"{path} imports {sorted(upward)}; {layer} may use {sorted(MAY_IMPORT[layer])}"


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer in ("kernels", "auditor")])
def test_library_knows_neither_mlflow_nor_bentoml(layer):
    for path in (ROOT / layer).rglob("*.py"):
        if path.name != "cli.py" and path.parent.name != "commands":
            roots = {name.partition(".")[0] for name in imported(path, whole=True)}
            assert not roots & {"mlflow", "bentoml"}, path


def test_importing_the_library_loads_no_mlflow():
    code = (
        "import sys, auditor; from auditor import *; import auditor.cli; "
        "assert not {'mlflow', 'bentoml'} & set(sys.modules), 'host imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_loads_no_torch():
    code = "import sys, auditor.plugins, auditor.cli; assert not {'torch', 'mlflow', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", ["auditor", "auditor.plugins"])
def test_public_names_import(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module._HOME) == set(module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        module.nosuch  # noqa: B018


def modules() -> list[str]:
    found = []
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT / layer).with_suffix("").parts
            found.append(".".join([IMPORT_NAME[layer], *(p for p in parts if p != "__init__")]))
    return found


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_nothing_is_unpickled():
    forbidden = re.compile(
        r"\bpickle\.loads?\(|\btorch\.load\(|allow_pickle=True\b.*np\.|joblib\.load|cloudpickle|np\.load\("
    )
    for layer in LAYERS:
        for path in (ROOT / layer).rglob("*.py"):
            hits = [line for line in path.read_text().splitlines() if forbidden.search(line)]
            assert not hits, f"{path}: {hits}"


def test_no_module_is_called_utils_or_outgrows_its_noun():
    for layer in LAYERS:
        for path in (ROOT / layer).rglob("*.py"):
            assert path.stem not in ("utils", "helpers", "common", "misc")
            assert len(path.read_text().splitlines()) <= 450, path
