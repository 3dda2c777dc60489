"""Mutants: what is changed and what is left alone, an even draw, and a list of equivalents that cannot go stale."""

from collections import Counter

import pytest

from tests.mutants import __main__ as program
from tests.mutants.mutations import Mutant, mutants, mutated_source, sample

SOURCE = '''"""A module."""

from __future__ import annotations

LIMIT: int | None = 3


@decorated(parallel=True, width=4)
def area(a: int | None, *, b: float = 2.0) -> int | None:
    """Return the area."""
    assert a > 0, "positive"
    if a <= 1:
        raise ValueError(f"{a + 1} is too small: " + "really")
    log.info("area %d", a * b)
    a += 1
    for i in range(2048):
        if i == 7:
            break
    return -a * b if not a else call(*a, **b)
'''


@pytest.fixture
def root(tmp_path):
    (tmp_path / "one.py").write_text(SOURCE)
    (tmp_path / "two.py").write_text("def double(x):\n    return x + x\n")
    return tmp_path


def changes(root, line):
    return {mutant.mutated for mutant in mutants(root, "one.py") if mutant.source.startswith(line)}


def test_operators_conditions_numbers_and_loops_are_changed(root):
    assert {"if a < 1:", "if a > 1:", "if not a <= 1:"} <= changes(root, "if a <=")
    assert "a -= 1" in changes(root, "a += 1")
    assert changes(root, "for i") == {"for i in []:"}  # the size of a loop that long is a setting
    assert "continue" in changes(root, "break")
    returned = changes(root, "return -a")
    assert "return -a / b if not a else call(*a, **b)" in returned
    assert "return a * b if not a else call(*a, **b)" in returned
    assert all("call(*a, **b)" in line for line in returned)  # stars of a call are no operators


@pytest.mark.parametrize("line", ["@decorated", "assert", "raise", "log.info"])
def test_annotations_decorators_messages_and_logging_are_left_alone(root, line):
    assert changes(root, line) == set()
    assert all(" | " in mutant.mutated for mutant in mutants(root, "one.py") if "int | None" in mutant.source)


def test_a_mutant_changes_one_line_of_the_file(root):
    for mutant in mutants(root, "one.py"):
        before, after = SOURCE.splitlines(), mutated_source(root, mutant).splitlines()
        different = [i for i, pair in enumerate(zip(before, after, strict=True), 1) if pair[0] != pair[1]]
        assert different == [mutant.line]
        assert after[mutant.line - 1].strip() == mutant.mutated


def test_the_draw_is_even_and_depends_on_the_seed_alone(root):
    drawn = sample(root, ["one.py", "two.py"], 6, 0)
    assert drawn == sample(root, ["one.py", "two.py"], 6, 0)
    assert Counter(mutant.file for mutant in drawn) == {"one.py": 5, "two.py": 1}  # two.py has one place only
    assert len({(m.file, m.line, m.column) for m in drawn}) == 6
    assert any(sample(root, ["one.py"], 3, seed) != sample(root, ["one.py"], 3, 0) for seed in (1, 2, 3))
    assert len(sample(root, ["one.py"], 0, 0)) == len(list(mutants(root, "one.py")))


def test_an_entry_about_a_line_that_is_gone_is_stale(root, monkeypatch):
    monkeypatch.setattr(program, "ROOT", root)
    fresh = program.Equivalent("one.py", "if a <= 1:", "if a < 1:", "because")
    moved = program.Equivalent("one.py", "if a <= 2:", "if a < 2:", "because")
    other = program.Equivalent("one.py", "if a <= 1:", "if a == 1:", "no such mutant")
    stale = program.Equivalent("three.py", "x", "y", "because")
    assert program.stale_entries([fresh]) == []
    assert len(program.stale_entries([fresh, moved, other, stale])) == 3


def test_the_table_counts_what_is_not_equivalent():
    def mutant(i):
        return Mutant("a.py", "AddNot", i, i, 0, f"if x{i}:", f"if not x{i}:")

    verdicts = [(mutant(0), "killed"), (mutant(1), "killed by time"), (mutant(2), "survived"), (mutant(3), "survived")]
    text, share = program.table(verdicts, {mutant(3).change})
    assert share == pytest.approx(2 / 3)
    assert text.splitlines()[1].split() == ["a.py", "4", "2", "1", "1", "67%"]


def test_what_the_lists_name_exists():
    config = program.tomllib.loads((program.HERE / "modules.toml").read_text())
    files = program.module_files(config["modules"])
    assert len(files) > 40
    for file, extra in config.get("extra", {}).items():
        assert file in files
        assert all((program.ROOT / name).exists() for name in extra)
    entries = program.equivalents()
    assert all(entry.reason for entry in entries)
    assert program.stale_entries(entries) == []
