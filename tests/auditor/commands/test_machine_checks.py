"""Checks of the machine: what is missing is absent, what fails is broken, whatever it raises."""

import sys

import pytest

from auditor.commands import machine_checks
from auditor.commands.machine_checks import Check, as_rows, run_checks


def test_what_a_check_raises_is_one_sentence(monkeypatch):
    def fails():
        raise RuntimeError("the driver is too old\nand more lines")

    monkeypatch.setattr(machine_checks, "CHECKS", {"cuda": fails})
    (check,) = run_checks()
    assert (check.status, check.sentence) == ("broken", "RuntimeError: the driver is too old")
    assert as_rows([check])[0]["name"] == "cuda"


def test_a_small_network_explains_itself_on_the_cpu():
    heat, gap = machine_checks._explained("cpu")
    assert heat
    assert gap < 1e-5


def test_wrong_numbers_are_broken(monkeypatch):
    monkeypatch.setattr(machine_checks, "_explained", lambda device: (True, 0.5))
    status, sentence = machine_checks.check_cpu()
    assert status == "broken"
    assert "0.5" in sentence


@pytest.mark.parametrize(
    ("module", "check"), [("onnxruntime", machine_checks.check_onnx), ("triton", machine_checks.check_triton)]
)
def test_what_is_not_installed_is_absent(monkeypatch, module, check):
    monkeypatch.setitem(sys.modules, module, None)
    status, sentence = check()
    assert status == "absent"
    assert "not installed" in sentence


def test_a_browser_that_fails_is_broken_and_none_is_absent(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_checks.check_browser()[0] == "absent"
    fake = tmp_path / "firefox"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    status, sentence = machine_checks.check_browser()
    assert status == "broken"
    assert "code 3" in sentence


def test_an_allocator_left_alone_is_absent(monkeypatch):
    import auditor.subject.memory as memory

    monkeypatch.setattr(memory, "keep_memory", lambda: False)
    monkeypatch.setenv(memory.VARIABLE, "0")
    assert machine_checks.check_allocator()[0] == "absent"


def test_checks_are_plain_values():
    assert Check("a", "ok", "fine.") == Check("a", "ok", "fine.")
