"""pt2 archives: an exported model as a file of records, of which nothing is used that was not checked.

MLflow's validator reads an archive with Python's zipfile; torch's reader looks names up without regard to case, and
unpickles. So every record is copied to a new archive under a name that both read alike, MLflow's validator looks at the
copy, example inputs (a pickle that nobody needs) are left out, and torch opens that copy. torch evaluates the
expressions for sizes in the graph as Python: only arithmetic passes. What a graph calls, torch takes from its own
modules by name, whatever it is: only operations on tensors pass.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from auditor.errors import ModelError, TamperError

NAME = re.compile(r"[A-Za-z0-9_.+@=-]+(?:/[A-Za-z0-9_.+@=-]+)+")
GRAPH = re.compile(r"(?:^|/)models/[^/]+\.json$|(?:^|/)serialized_exported_program\.json$")
EXAMPLES = re.compile(r"(?:^|/)data/sample_inputs/[^/]+\.pt$")
CONSTANT = re.compile(r"(?:^|/)data/constants/")
MODELS = "models/"  # torch takes every record below for a graph, whatever its ending
OBJECTS = re.compile(r"data/constants/(?:custom|opaque)_obj_|data/aotinductor/|data/executorch/|xl_model_weights/")
SYMBOL = re.compile(r"[a-z]+\d+|[A-Za-z]\w{0,40}")
OPERATION = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?")
OF_SIZES = re.compile(
    r"_operator\.(?:eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|lshift|rshift|getitem)"
    r"|math\.(?:trunc|ceil|floor|sqrt)|torch\._?sym_\w+"
)
NAMESPACES = frozenset({"aten", "prims", "torchvision", "quantized_decomposed", "torchao"})
WITH_GRAPHS = frozenset(  # operations that take graphs; a loop that need not end is not among them
    {
        *("wrap_with_set_grad_enabled", "wrap_with_autocast", "invoke_subgraph", "tag_activation_checkpoint"),
        *("cond", "map_impl", "scan", "associative_scan", "flex_attention", "out_dtype"),
    }
)
READS_FILES = frozenset({"from_file", "save"})
ARITHMETIC = frozenset(
    {
        *("Symbol", "Integer", "Float", "Rational", "true", "false"),
        *("Add", "Mul", "Pow", "Max", "Min", "Mod", "Abs", "floor", "ceiling", "Piecewise"),
        *("Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not"),
        *(
            "FloorDiv",
            "ModularIndexing",
            "Where",
            "PythonMod",
            "CleanDiv",
            "CeilToInt",
            "FloorToInt",
            "CeilDiv",
            "LShift",
            "RShift",
        ),
        *("PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv", "TruncToFloat", "TruncToInt", "RoundToInt"),
        *("RoundDecimal", "ToFloat", "Identity", "IsNonOverlappingAndDenseIndicator"),
    }
)
PLAIN_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.keyword),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.Tuple),
)
LONGEST_EXPRESSION = 10_000


def repack(file: Path, folder: Path) -> Path:
    """Return a copy of an archive that holds what was checked and nothing else; raises where a record is odd."""
    from mlflow.exceptions import MlflowException
    from mlflow.pytorch import _validate_pt2_archive_is_pickle_free

    copy, checked = folder / "records" / file.name, folder / "checked" / file.name
    _rewrite(file, copy, lambda name, content: content)
    try:
        _validate_pt2_archive_is_pickle_free(str(copy))
    except MlflowException as error:
        raise TamperError(f"{file.name}: {' '.join(str(error).split())[:200]}") from None
    _rewrite(copy, checked, _plain)
    copy.unlink()
    return checked


def graph_digest(file: Path) -> str:
    """Return the sha256 of the graph and the constants of an archive; traces of where code was written are left out."""
    h = hashlib.sha256(b"auditor graph 2\n")
    with zipfile.ZipFile(file) as archive:
        for name, info in sorted((_inside(info.filename), info) for info in archive.infolist()):
            if GRAPH.search(name):
                graph = json.loads(archive.read(info), object_hook=_without_traces)
                content = json.dumps(graph, sort_keys=True).encode()
            elif CONSTANT.search(name):
                content = archive.read(info)
            else:
                continue
            h.update(f"{name}|{len(content)}|".encode())
            h.update(content)
    return h.hexdigest()


def check_expression(text: str) -> None:
    """Raise unless an expression for a size is arithmetic of symbols and numbers.

    >>> check_expression("2*Symbol('s31', positive=True, integer=True) + 1")
    """
    if len(text) > LONGEST_EXPRESSION:
        raise TamperError("the graph holds an expression for a size that is too long.")
    try:
        is_arithmetic = all(_is_arithmetic(node) for node in ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        is_arithmetic = False
    if not is_arithmetic:
        raise TamperError(f"the graph holds an expression for a size that is no arithmetic: {text[:60]!r}.")


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ARITHMETIC
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        return isinstance(node.value, str) and SYMBOL.fullmatch(node.value) is not None
    if isinstance(node, ast.Name):
        return SYMBOL.fullmatch(node.id) is not None and "__" not in node.id
    return isinstance(node, PLAIN_NODES)


def _rewrite(source: Path, target: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Write every record of an archive to a new one, in torch's own format."""
    import torch

    target.parent.mkdir(parents=True, exist_ok=True)
    writer = torch._C.PyTorchFileWriter(str(target))
    try:
        for name, content in _records(source):
            content = change(name, content)
            writer.write_record(name, content, len(content))
    finally:
        writer.write_end_of_file()


def _records(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every record; an archive whose names could be read in two ways is refused."""
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
            check_names([info.filename for info in infos], file.name)
            for info in infos:
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    raise TamperError(f"{file.name}: record {info.filename!r} is packed or locked; torch writes none.")
            if sum(info.file_size for info in infos) > file.stat().st_size:
                raise TamperError(f"{file.name}: its records lie over each other; log the model again.")
            for info in infos:
                yield _inside(info.filename), archive.read(info)
    except (zipfile.BadZipFile, OSError, NotImplementedError, UnicodeDecodeError) as error:
        raise ModelError(f"{file.name} is no pt2 archive ({str(error)[:80]}); log the model again.") from None


def check_names(names: list[str], where: str) -> None:
    """Raise where a record's name could be read in two ways, or is one of a record that may run code."""
    used: set[str] = set()
    roots = {name.partition("/")[0] for name in names}
    for name in names:
        steps = name.split("/")
        if NAME.fullmatch(name) is None or {".", ".."} & set(steps) or len(roots) != 1:
            raise TamperError(f"{where}: record {name[:80]!r} has a name that torch does not write.")
        if name.casefold() in used:
            raise TamperError(f"{where}: two records are called {name[:80]!r} but for upper and lower case.")
        used.add(name.casefold())
        inside = _inside(name).casefold()
        if OBJECTS.match(inside):
            raise TamperError(
                f"{where}: record {name[:80]!r} holds compiled code or an object, which may run anything."
            )
        if inside.startswith(MODELS) and GRAPH.search(_inside(name)) is None:
            raise TamperError(f"{where}: record {name[:80]!r} would be opened as a graph but is not called so.")


def _inside(name: str) -> str:
    return name.partition("/")[2]


def _plain(name: str, content: bytes) -> bytes:
    """Return a record as it may be opened: a graph whose expressions were checked; example inputs are not needed."""
    import torch

    if GRAPH.search(name):
        _check_graph(content)
    if not EXAMPLES.search(name):
        return content
    stream = io.BytesIO()
    torch.save(((), {}), stream)
    return stream.getvalue()


def _check_graph(content: bytes) -> None:
    try:
        graph = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TamperError(f"the graph of the model is not JSON ({str(error)[:60]}).") from None
    if isinstance(graph, dict):
        for symbol in graph.get("range_constraints") or {}:
            check_expression(str(symbol))
    stack = [graph]
    while stack:
        entry = stack.pop()
        if isinstance(entry, list):
            stack.extend(entry)
        elif isinstance(entry, dict):
            _check_entry(entry)
            stack.extend(entry.values())


def _check_entry(entry: Mapping[str, Any]) -> None:
    if "expr_str" in entry:
        check_expression(str(entry["expr_str"]))
    target: Any = entry.get("target")
    is_node = isinstance(target, str) and "inputs" in entry  # the target of a specification is the name of a weight
    for name in ([target] if is_node else []) + [entry[key] for key in ("as_operator",) if key in entry]:
        if not _is_operation(str(name)):
            raise TamperError(f"the graph calls {str(name)[:80]!r}, which is no operation on tensors.")


def _is_operation(name: str) -> bool:
    """Whether a name is that of an operation on tensors, or of arithmetic on their sizes, and of nothing else."""
    import torch

    if OF_SIZES.fullmatch(name):
        return True
    parts = OPERATION.fullmatch(name)
    if parts is None:
        return False
    namespace, operation, overload = parts.groups()
    if namespace == "higher_order":
        return operation in WITH_GRAPHS and overload is None
    if namespace not in NAMESPACES or operation in READS_FILES:
        return False
    packet = getattr(getattr(torch.ops, namespace), operation, None)
    entry = packet if overload is None else getattr(packet, overload, None)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        return isinstance(entry, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    return packet is None  # not installed here: torch says so better


def _without_traces(entry: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in entry.items() if k != "stack_trace"}
