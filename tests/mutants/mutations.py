"""The mutants of a source file: one operator, number or condition changed in each.

cosmic-ray supplies the operators and applies them. Only replacements of the same type are used (+ for -, not + for <<):
a TypeError on the first line would be an easy kill that says nothing about the tests. Annotations, decorators,
messages, logging and assertions are left out, because no test should look at them.
"""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import parso.python.tree
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

BINARY = (
    "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul RShift_LShift LShift_RShift "
    "BitAnd_BitOr BitOr_BitAnd BitXor_BitOr"
)
COMPARISON = "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_GtE GtE_Lt LtE_Gt Gt_LtE Is_IsNot IsNot_Is"
UNARY = "Delete_USub Delete_Not Delete_Invert"
OTHERS = (
    "AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd "
    "ReplaceBreakWithContinue ReplaceContinueWithBreak NumberReplacer ZeroIterationForLoop"
)
BINARY_PARENTS = {"arith_expr", "term", "power", "expr", "and_expr", "xor_expr", "shift_expr"}
SMALLEST = 1e-15
SILENT = {"decorator", "fstring", "raise_stmt", "assert_stmt", "import_from", "import_name"}


class AugmentedAssignment(Operator):
    """``x += y`` becomes ``x -= y``, and so on; cosmic-ray has no operator for these."""

    OTHER: ClassVar = {
        "+=": "-=",
        "-=": "+=",
        "*=": "/=",
        "/=": "*=",
        "//=": "*=",
        "|=": "&=",
        "&=": "|=",
        "<<=": ">>=",
        ">>=": "<<=",
    }

    def mutation_positions(self, node):
        if isinstance(node, parso.python.tree.Operator) and node.value in self.OTHER:
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        node.value = self.OTHER[node.value]
        return node

    @classmethod
    def examples(cls):
        return ()


def _operators() -> dict[str, Operator]:
    names = [f"ReplaceBinaryOperator_{swap}" for swap in BINARY.split()]
    names += [f"ReplaceComparisonOperator_{swap}" for swap in COMPARISON.split()]
    names += [f"ReplaceUnaryOperator_{change}" for change in UNARY.split()] + OTHERS.split()
    return {name: get_operator(f"core/{name}")() for name in names} | {"AugmentedAssignment": AugmentedAssignment()}


OPERATORS = _operators()


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file, named by its operator and the operator's occurrence in the file."""

    file: str
    operator: str
    occurrence: int
    line: int  # from 1
    column: int
    source: str  # the line as it stands, stripped
    mutated: str  # the line as the mutant has it, stripped

    @property
    def change(self) -> tuple[str, str, str]:
        """What ``equivalent.toml`` names: the file and the two lines, not the line's number, which moves."""
        return self.file, self.source, self.mutated


def _within(node, part) -> bool:
    return part is not None and part.start_pos <= node.start_pos < part.end_pos


def _is_silent(node) -> bool:
    """Whether no behaviour hangs on the node: an annotation, decorator, message, log line or class option."""
    child, parent = None, node
    while parent is not None:
        if parent.type in SILENT:
            return True
        if parent.type in ("param", "funcdef") and _within(node, parent.annotation):
            return True
        if parent.type == "annassign" and child is parent.children[1]:
            return True
        if parent.type == "classdef" and not _within(node, parent.children[-1]):
            return True
        if parent.type in ("if_stmt", "expr_stmt") and "TYPE_CHECKING" in parent.children[1].get_code():
            return True
        if parent.type == "argument" and parent.children[0].get_code().strip() == "repr":
            return True
        if parent.type == "atom_expr" and parent.children[0].get_code().strip() in ("log", "logger", "logging"):
            return True
        child, parent = parent, parent.parent
    return False


def _is_wanted(operator: str, node) -> bool:
    if operator.startswith("ReplaceBinaryOperator"):
        return node.parent.type in BINARY_PARENTS  # not the star of a signature or of a call
    if operator == "NumberReplacer":  # sizes of blocks and guards against 0/0 are not what a formula hangs on
        number = ast.literal_eval(node.value)
        return number == 0 or (number > SMALLEST and not (isinstance(number, int) and number > 10))
    return True


class Site(NamedTuple):
    """Where an operator applies: the position in the source, the operator and its occurrence as cosmic-ray counts."""

    line: int  # from 1
    column: int
    operator: str
    occurrence: int


def _sites(source: str) -> Iterator[Site]:
    occurrences = dict.fromkeys(OPERATORS, 0)
    for node in ast_nodes(get_ast(source)):
        for name, operator in OPERATORS.items():
            for (line, column), _ in operator.mutation_positions(node):
                if _is_wanted(name, node) and not _is_silent(node):
                    yield Site(line, column, name, occurrences[name])
                occurrences[name] += 1


def _apply(source: str, operator: str, occurrence: int) -> str | None:
    """The mutated source, or None when it is no Python or no change."""
    mutated = mutate_code(source, OPERATORS[operator], occurrence)
    try:
        compile(mutated, "mutant", "exec")
    except SyntaxError:
        return None
    return None if mutated == source else mutated


def mutated_source(root: Path, mutant: Mutant) -> str:
    """The whole file with the mutant's change in it."""
    source = _apply((root / mutant.file).read_text(), mutant.operator, mutant.occurrence)
    assert source is not None
    return source


def _mutant(source: str, file: str, site: Site) -> Mutant | None:
    mutated = _apply(source, site.operator, site.occurrence)
    if mutated is None:
        return None
    before, after = (text.splitlines()[site.line - 1].strip() for text in (source, mutated))
    return Mutant(file, site.operator, site.occurrence, site.line, site.column, before, after)


def mutants(root: Path, file: str, lines: Collection[str] | None = None) -> Iterator[Mutant]:
    """Yield every mutant of a file, or those of the given lines (stripped)."""
    source = (root / file).read_text()
    text = source.splitlines()
    for site in _sites(source):
        if lines is None or text[site.line - 1].strip() in lines:
            mutant = _mutant(source, file, site)
            if mutant is not None:
                yield mutant


def _shuffled(root: Path, file: str, seed: int) -> Iterator[Mutant]:
    """Yield mutants of a file in random order, one for each position in the source."""
    rng = random.Random(f"{seed} {file}")
    source = (root / file).read_text()
    at_position: dict[tuple[int, int], list[Site]] = defaultdict(list)
    for site in _sites(source):
        at_position[site.line, site.column].append(site)
    drawn = [rng.choice(sites) for _, sites in sorted(at_position.items())]
    rng.shuffle(drawn)
    return (mutant for site in drawn if (mutant := _mutant(source, file, site)) is not None)


def sample(root: Path, files: list[str], n: int, seed: int) -> list[Mutant]:
    """Draw ``n`` mutants, the same number from every file as far as it has them, at most one per position.

    ``n = 0`` takes every mutant. A file's draw depends on the seed and the file alone.
    """
    if n == 0:
        return [mutant for file in files for mutant in mutants(root, file)]
    left = [_shuffled(root, file, seed) for file in files]
    random.Random(seed).shuffle(left)  # who gives one more when n is no multiple
    drawn: list[Mutant] = []
    while left and len(drawn) < n:
        for remaining in list(left):
            mutant = next(remaining, None) if len(drawn) < n else None
            if mutant is not None:
                drawn.append(mutant)
            elif len(drawn) < n:
                left.remove(remaining)
    return sorted(drawn, key=lambda mutant: (mutant.file, mutant.line, mutant.column, mutant.operator))
