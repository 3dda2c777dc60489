"""The architecture: rooms and their order, public names, sizes, words, tests beside code, and nothing unpickled."""

import ast
import doctest
import functools
import importlib
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPORT_NAME = {
    "kernels": "auditor.kernels",
    "auditor": "auditor",
    "plugins": "auditor.plugins",
    "service": "auditor.service",
}
LAYERS = list(IMPORT_NAME)
KINDS = ("nmf", "coupled", "xnn", "tree", "deepfacto", "rde")
KIND_ROOMS = [f"explainers/{kind}" for kind in KINDS]

# A room may use what stands before it. The rooms of auditor/ go without their folder's name; errors, progress, cli
# and door (auditor/__init__.py) are single modules.
ORDER = [
    *("kernels", "kernels/factorization", "kernels/trees", "kernels/frank_wolfe", "kernels/admm", "kernels/networks"),
    *(
        "errors",
        "progress",
        "pages",
        "signing",
        "subject",
        "network",
        "data",
        "runners",
        "perturbation",
        "attribution",
        "metrics",
        "stability",
    ),
    *("training", "explainers", *KIND_ROOMS, "study", "reliance", "auditing", "release", "reports", "demo", "door"),
    *("plugins/registry", "plugins/audits_site", "plugins/study_site", "plugins", "service", "commands", "cli"),
]
# What each room may use, in the words of its docstring.
MAY_USE = {
    "kernels": "nothing",
    "kernels/factorization": "nothing",
    "kernels/trees": "nothing",
    "kernels/frank_wolfe": "nothing",
    "kernels/admm": "nothing",
    "kernels/networks": "nothing",
    "errors": "nothing",
    "progress": "nothing",
    "pages": "nothing",
    "signing": "errors",
    "subject": "errors",
    "network": "errors, progress, subject",
    "data": "errors, progress, subject",
    "runners": "errors, progress, subject, data",
    "perturbation": "errors, progress, subject, network",
    "attribution": "errors, progress, subject, network, data, perturbation",
    "metrics": "errors, progress, subject, network, data, perturbation, kernels/networks, kernels/factorization",
    "stability": "errors, progress, subject, network, data, attribution, metrics, kernels/networks",
    "training": "errors, progress, subject, data, kernels/admm, kernels/factorization",
    "explainers": "errors, progress, pages, subject, network, data, runners, perturbation, attribution, metrics, "
    "stability, kernels/factorization",
    "explainers/nmf": "explainers and what it may use, kernels/factorization",
    "explainers/coupled": "explainers and what it may use, kernels/factorization, kernels/networks",
    "explainers/xnn": "explainers and what it may use, kernels/networks",
    "explainers/tree": "explainers and what it may use, kernels/trees",
    "explainers/deepfacto": "explainers and what it may use, training, kernels/factorization",
    "explainers/rde": "explainers and what it may use, kernels/frank_wolfe",
    "study": "errors, progress, subject, network, data, perturbation, attribution, metrics, stability, explainers",
    "reliance": "errors, progress, subject, network, data, runners, perturbation, attribution, metrics, stability, "
    "explainers",
    "auditing": "reliance and what it may use",
    "release": "auditing and what it may use, kernels/factorization, kernels/networks",
    "reports": "release and what it may use, study, pages",
    "demo": "errors, progress, subject, data",
    "door": "every room of auditor/ but commands",
    "plugins/registry": "every room of auditor/ but commands",
    "plugins/audits_site": "errors, signing, metrics, explainers, plugins/registry",
    "plugins/study_site": "errors, study, plugins/audits_site",
    "plugins": "every room of auditor/ but commands, plugins/registry, plugins/audits_site",
    "service": "every room of auditor/ but commands, plugins/registry",
    "commands": "every room",
    "cli": "commands",
}
EDGES_THAT_STAY = {
    ("service/bento.py", "door"),  # a bento's entry point makes the package whole
    ("plugins/deployments.py", "service"),  # the deployments client starts a server, so it takes the server's settings
    ("plugins/local_service.py", "service"),
}
MODULES_OF_THEIR_OWN = ("errors", "progress", "door", "cli")  # rooms without a folder, so without an __init__

# Files outside a kind's folder that name a kind. The first three stay: the table of kinds, the public names, the demo
# of every kind; the commands xnn-table, xnn-sheet and fidelity are measurements of one paper.
KIND_TABLES = {
    "auditor/explainers/kinds.py",
    "auditor/__init__.py",
    "plugins/demo.py",
    "auditor/commands/fidelity.py",
    "plugins/demo_story.py",
    "auditor/commands/xnn_sheet.py",
    "auditor/commands/xnn_table.py",
}
# Variables, arguments, functions and classes that say that something was found, not what it is.
VAGUE_NAMES = {"found", "told", "mend", "seen", "kept", "own", "known", "place"}
# Words of a private dialect, anywhere in a module: say "returns", "reports", "corrects", "without end". A stream's
# ``tell()`` is its name.
DIALECT = re.compile(r"\b(told|tells?(?!\()|mend(s|ed)?|for ever)\b")
# Share of the modules with two functions or more that have a test file of their own.
MIRRORED_AT_LEAST = 0.9


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Every node of a module, walked once for all tests."""
    return list(ast.walk(tree))


@functools.cache
def sources() -> dict[str, tuple[Path, ast.Module]]:
    """Every module by its import name, with its file and syntax tree."""
    modules = {}
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT / layer).with_suffix("").parts
            name = ".".join([IMPORT_NAME[layer], *(p for p in parts if p != "__init__")])
            modules[name] = (path, ast.parse(path.read_text()))
    return modules


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str:
    """The room of a file, by the names of ORDER."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "auditor":
        return "/".join(parts[:-1])
    return "/".join(parts[1:-1]) or ("door" if path.stem == "__init__" else path.stem)


@functools.cache
def imported(tree: ast.Module) -> frozenset[str]:
    """Modules imported anywhere in a file: lazily and for types too."""
    names = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from auditor.release import gate` names a module, `from auditor.errors import AuditError` a thing in one
            names |= {
                full if (full := f"{node.module}.{alias.name}") in sources() else node.module for alias in node.names
            }
    return frozenset(names)


def rooms_named(sentence: str) -> set[str]:
    """Read "errors, explainers and what it may use, kernels/admm"; see MAY_USE."""
    auditor_rooms = {room for room in ORDER if not room.startswith(("kernels", "plugins", "service", "cli", "door"))}
    rooms: set[str] = set()
    for item in re.split(r",\s*", " ".join(sentence.split()).rstrip(".")):
        if item == "every room":
            rooms |= set(ORDER) - {"cli"}
        elif item == "every room of auditor/ but commands":
            rooms |= auditor_rooms - {"commands"}
        elif item.endswith(" and what it may use"):
            room = item.removesuffix(" and what it may use")
            rooms |= {room} | rooms_named(MAY_USE[room])
        elif item != "nothing":
            assert item in ORDER, f"there is no room {item!r}"
            rooms.add(item)
    return rooms


def test_the_table_of_rooms_is_complete_and_in_order():
    assert set(ORDER) == set(MAY_USE)
    rooms = {room_of(path) for path, _ in sources().values()}
    assert rooms == set(ORDER), f"new or missing rooms: {sorted(rooms ^ set(ORDER))}"
    for i, room in enumerate(ORDER):
        later = rooms_named(MAY_USE[room]) - set(ORDER[:i]) - {room}
        assert not later, f"{room} stands before {sorted(later)} and may not use them"


@pytest.mark.parametrize("room", [room for room in ORDER if room not in MODULES_OF_THEIR_OWN])
def test_a_room_says_what_it_may_use(room):
    folder = room if room.startswith(("kernels", "plugins", "service")) else f"auditor/{room}"
    words = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    assert "May use: " in words, f"{folder}/__init__.py does not say which rooms it may use"
    assert rooms_named(re.split(r"\.(\s|$)", words.partition("May use: ")[2])[0]) == rooms_named(MAY_USE[room])


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_what_it_may_use(room):
    allowed = rooms_named(MAY_USE[room]) | {room}
    for path, tree in sources().values():
        if room_of(path) != room:
            continue
        for name in imported(tree) & sources().keys():
            used = room_of(sources()[name][0])
            if used not in allowed and (shown(path), used) not in EDGES_THAT_STAY:
                pytest.fail(f"{shown(path)} imports {name}; {room} may use {MAY_USE[room]}")


@pytest.mark.parametrize("layer", ["kernels", "auditor"])
def test_library_knows_neither_mlflow_nor_bentoml(layer):
    for path, tree in sources().values():
        if path.is_relative_to(ROOT / layer) and room_of(path) not in ("cli", "commands"):
            assert not {name.partition(".")[0] for name in imported(tree)} & {"mlflow", "bentoml"}, path


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


@pytest.mark.parametrize("name", list(sources()))
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_nothing_is_unpickled():
    forbidden = re.compile(
        r"\bpickle\.loads?\(|\btorch\.load\(|allow_pickle=True\b.*np\.|joblib\.load|cloudpickle|np\.load\("
    )
    for path, _ in sources().values():
        hits = [line for line in path.read_text().splitlines() if forbidden.search(line)]
        assert not hits, f"{path}: {hits}"


def kinds_named(path: Path) -> bool:
    """Whether a file names a kind: as a string of its own, or by importing from a kind's room."""
    if path.suffix != ".py":
        return re.search(rf"""["'`]({"|".join(KINDS)})["'`]""", path.read_text()) is not None
    tree = next(tree for source, tree in sources().values() if source == path)
    strings = {node.value for node in nodes(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return bool(strings & set(KINDS)) or any(
        name.startswith(tuple(f"auditor.explainers.{kind}" for kind in KINDS)) for name in imported(tree)
    )


def test_nothing_outside_a_kinds_folder_names_a_kind():
    files = [p for layer in LAYERS for p in (ROOT / layer).rglob("*") if p.suffix in (".py", ".js", ".html")]
    outside = {p for p in files if not any(kind_room in shown(p) for kind_room in KIND_ROOMS)}
    naming = {shown(p) for p in outside if kinds_named(p)} - KIND_TABLES
    assert not naming, f"ask the Explainer instead: {sorted(naming)}"


def asks_what_it_is(node: ast.AST) -> bool:
    """Whether a call asks an explainer, or its options, what it is or has."""
    asks = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return (
        asks
        and node.func.id in ("isinstance", "hasattr", "getattr")
        and re.search(r"\bexplainer\b|\be\.config\b", ast.unparse(node.args[0])) is not None
    )


def test_nothing_outside_a_kinds_folder_asks_an_explainer_what_it_is():
    assert any(asks_what_it_is(node) for node in ast.walk(ast.parse('getattr(case.explainer.config, "refits", 1)')))
    for path, tree in sources().values():
        if not any(kind_room in shown(path) for kind_room in KIND_ROOMS) and shown(path) not in KIND_TABLES:
            asked = [ast.unparse(node) for node in nodes(tree) if asks_what_it_is(node)]
            assert not asked, f"{shown(path)}: give the contract a method instead of {asked}"


def test_modules_and_functions_hold_one_thing():
    for path, tree in sources().values():
        assert path.stem not in ("utils", "helpers", "common", "misc"), path
        assert len(path.read_text().splitlines()) <= 600, path
        for node in nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines, where = node.end_lineno - node.lineno + 1, f"{shown(path)}: {node.name}"
                assert lines <= 60, f"{where} has {lines} lines"


def names_given(tree: ast.Module) -> list[str]:
    """Every name that a module gives: to variables, attributes, names, functions and classes."""
    names = []
    for node in nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append(node.attr)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
    return names


def test_names_say_what_they_hold():
    for path, tree in sources().values():
        vague = {name for name in names_given(tree) if name.strip("_").lower() in VAGUE_NAMES}
        assert not vague, f"{shown(path)}: name the noun instead of {sorted(vague)}"
    declared = re.compile(rf"\b(?:const|let|var|function)\s+({'|'.join(sorted(VAGUE_NAMES))})\b")
    for path in (ROOT / "service" / "page").glob("*.js"):
        assert not declared.findall(path.read_text()), f"{shown(path)}: name the noun instead"


def test_words_are_plain():
    for path in texts():
        if not path.is_relative_to(ROOT / "tests"):
            words = [match.group() for match in DIALECT.finditer(path.read_text(encoding="utf-8", errors="replace"))]
            assert not words, f"{shown(path)}: say it in plain words instead of {words}"


def test_tests_mirror_the_tree():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    modules = [
        path
        for path, tree in sources().values()
        if path.stem != "__init__" and sum(isinstance(node, functions) for node in nodes(tree)) >= 2
    ]
    bare = [p for p in modules if not (ROOT / "tests" / shown(p.parent) / f"test_{p.stem}.py").exists()]
    share = 1 - len(bare) / len(modules)
    assert share >= MIRRORED_AT_LEAST, f"{share:.0%}; without a test file: {', '.join(map(shown, bare))}"


def texts() -> list[Path]:
    """Every text of the repository that people write."""
    kinds = {".py", ".md", ".toml", ".yml", ".yaml", ".js", ".html", ".css", ".txt", ".svg"}
    folders = [ROOT / name for name in (*LAYERS, "tests", "docs", ".ci")]
    files = [p for folder in folders for p in folder.rglob("*") if p.suffix in kinds or p.parent.name == ".ci"]
    return [p for p in [*files, *ROOT.glob("[!.]*.*"), ROOT / "Makefile"] if p.is_file() and p != Path(__file__)]


def test_no_text_refers_to_a_page_outside_the_repository():
    outside = re.compile(r"\.\./shared|(DESIGN|ROOMS|STYLE|INTEGRATION|TEAM)\.md|\bmethods? pages?\b|/(work|home)/\w")
    naming = {shown(p) for p in texts() if outside.search(p.read_text(encoding="utf-8", errors="replace"))}
    assert not naming, sorted(naming)


def test_every_file_that_a_text_names_exists():
    path_like = re.compile(
        r"(?<![\w/.:-])((?:auditor|kernels|plugins|service|tests|docs)/[\w/-]+\.(?:py|md|js|toml|yml|png|svg))\b"
        r"|\b(bench_\w+\.py)\b"
    )
    for text in texts():
        for whole, bench in path_like.findall(text.read_text(encoding="utf-8", errors="replace")):
            named = whole or f"tests/benchmarks/{bench}"
            assert (ROOT / named).exists(), f"{shown(text)} names {named}, which does not exist"


def prose(path: Path, tree: ast.Module) -> str:
    """The docstrings and comments of a module, without inline code."""
    parts = [text for node in nodes(tree) if (text := docstring_of(node))]
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    parts += [token.string for token in tokens if token.type == tokenize.COMMENT]
    return re.sub(r"``[^`]*``|`[^`]*`", "", "\n".join(parts))


def docstring_of(node: ast.AST) -> str | None:
    with_docstring = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return ast.get_docstring(node) if isinstance(node, with_docstring) else None


def test_papers_are_cited_by_keys_that_the_list_has():
    listed = set(re.findall(r"^\| `\[(\w+)\]` \|", (ROOT / "docs" / "references.md").read_text(encoding="utf-8"), re.M))
    for path, tree in sources().values():
        text = prose(path, tree)
        cited = set(re.findall(r"(?<![\w\])])\[([A-Z][a-z]\w{2,}|[A-Z]{3,}\w*)\]", text)) - {"None", "True", "False"}
        assert cited <= listed, f"{shown(path)}: docs/references.md lacks {sorted(cited - listed)}"
        in_words = re.findall(r"\bet al\b|[A-Z][a-z]+ \(?(?:19|20)\d\d\b", text)
        assert not in_words, f"{shown(path)} cites {in_words}; cite by key"


def test_every_module_that_is_named_exists():
    tags = re.compile(
        r"auditor\.(onnx|lineage|audit|gate|subject|model|log|explainer|kinds|study|study_results|verdict)\b"
    )  # not modules
    for path, _ in sources().values():
        for name in re.findall(r"`(auditor(?:\.\w+)+)(?:\(\))?`", path.read_text()):
            module = name
            while module not in sources():
                module = module.rpartition(".")[0]
            attribute = name[len(module) + 1 :].partition(".")[0]
            exists = not attribute or re.search(rf"\b{attribute}\b", sources()[module][0].read_text())
            assert exists or tags.match(name), f"{shown(path)} names {name}, which does not exist"
