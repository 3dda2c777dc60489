"""A disk error or Ctrl-C ends every command with one line that says what holds for this command, and nothing else."""

import errno
import importlib

import click
import pytest
from click.testing import CliRunner

from auditor.cli import auditor
from auditor.commands.group import now_holds, reports_errors

MODEL = "models:/digits/1"
# command: arguments, what it calls first that can take long (module, name), what must hold
COMMANDS = {
    "audit": (
        [MODEL, "--data", "sklearn:digits"],
        ("auditor.plugins", "run_audit"),
        "nothing was stored; the same command goes on from the parts that were finished",
    ),
    "policy init": ([MODEL], ("auditor.plugins", "latest_audit"), "no policy was written"),
    "gate": (
        [MODEL, "--policy", "POLICY"],
        ("auditor.plugins", "run_gate"),
        "there is no verdict and nothing was promoted",
    ),
    "policy check": (["POLICY"], ("auditor.release.policy", "read_policy"), "nothing was checked"),
    "keys new": (["alice"], ("auditor.signing.keys", "new_key"), "no key was made"),
    "keys hash": (["--new"], ("auditor.service.keys", "hashed"), "no hash was made"),
    "doctor": ([], ("auditor.commands.machine_checks", "run_checks"), "nothing was changed"),
    "keys list": ([], ("auditor.signing.keys", "read_trusted"), "nothing was changed"),
    "keys revoke": (["alice"], ("auditor.signing.keys", "revoke"), "the key counts as before"),
    "sign": ([MODEL], ("auditor.signing.keys", "current_signer"), "not everything was signed"),
    "log show": (["digits"], ("auditor.plugins.registry.history", "entries"), "nothing was changed"),
    "log verify": (["digits"], ("auditor.plugins.registry.history", "entries"), "not everything was checked"),
    "compare": (
        [MODEL, MODEL, "--data", "sklearn:digits"],
        ("auditor.plugins", "load_subject"),
        "there is no comparison",
    ),
    "compare-maps": ([MODEL, "IMAGE"], ("auditor.plugins", "load_subject"), "the maps are not finished"),
    "curves": (
        ["--data", "sklearn:digits"],
        ("auditor.training.learning_curves", "learning_curves"),
        "no picture was written",
    ),
    "demo": ([], ("auditor.plugins.demo_story", "run_story"), "the demo is not finished"),
    "explain": (
        [MODEL, "IMAGE"],
        ("auditor.plugins.registry.explain_image", "answer_image"),
        "the explanation is not finished, and neither are pictures in --out",
    ),
    "explain-all": (
        [MODEL, "--data", "sklearn:digits", "--out", "OUT"],
        ("auditor.plugins.registry.explain_all", "explain_version"),
        "finished files stay, and the same command goes on from there",
    ),
    "concepts": ([MODEL, "c", "--out", "c.html"], ("auditor.plugins", "load_subject"), "the page is not finished"),
    "fit": (
        ["nmf", MODEL, "--data", "sklearn:digits"],
        ("auditor.plugins", "load_subject"),
        "nothing was attached",
    ),
    "train": (
        [MODEL, "--data", "sklearn:digits", "--optimizer", "adam"],
        ("auditor.training.training_runs", "train_seeds"),
        "nothing was registered",
    ),
    "kinds": ([], ("auditor.explainers.kinds", "installed_kinds"), "nothing was changed"),
    "fidelity": (
        [MODEL, "--data", "sklearn:digits", "--attributes", "POLICY"],
        ("auditor.plugins", "load_subject"),
        "nothing was measured",
    ),
    "tcav": (
        [MODEL, "--data", "sklearn:digits", "--concept", "round=sklearn:digits"],
        ("auditor.plugins", "load_subject"),
        "there are no scores",
    ),
    "study new": (
        [MODEL, "--data", "sklearn:digits"],
        ("auditor.plugins.registry.studies", "new_study"),
        "no study was drawn",
    ),
    "study serve": (
        [f"{MODEL}#s"],
        ("auditor.plugins.registry.studies", "find_study"),
        "the server stopped; every saved answer is kept",
    ),
    "study erase": ([f"{MODEL}#s", "CODE"], ("auditor.plugins.registry.studies", "find_study"), "nothing was erased"),
    "study export": (
        [f"{MODEL}#s", "a.json"],
        ("auditor.plugins.registry.studies", "find_study"),
        "nothing was written",
    ),
    "study results": ([f"{MODEL}#s"], ("auditor.plugins.registry.studies", "find_study"), "nothing was stored"),
    "study plan": (["--difference", "0.1"], ("auditor.study.power", "plan"), "nothing was planned"),
    "list": ([MODEL], ("auditor.plugins.registry.location", "resolve"), "nothing was changed"),
    "verify": ([MODEL], ("auditor.plugins", "verify"), "not everything was checked"),
    "detach": ([MODEL, "c"], ("auditor.plugins", "detach"), "the explainer is attached as before"),
    "label": ([MODEL, "c", "0", "loop"], ("auditor.plugins", "load_subject"), "the concept has the name it had"),
    "layers": ([MODEL], ("auditor.plugins", "load_subject"), "nothing was changed"),
    "describe": ([MODEL], ("auditor.plugins", "describe"), "nothing was recorded"),
    "serve": ([MODEL], ("auditor.service.launch", "run_server"), "the server stopped"),
    "export": ([MODEL], ("auditor.plugins.registry.onnx_exports", "export"), "no graph was stored"),
    "revise": (
        [MODEL, "--remove", "concepts:0", "--data", "sklearn:digits"],
        ("auditor.plugins", "load_subject"),
        "nothing was registered",
    ),
    "xnn-table": ([MODEL, "--data", "sklearn:digits"], ("auditor.plugins", "load_subject"), "there is no table"),
    "xnn-sheet": (
        [MODEL, "x", "--data", "sklearn:digits"],
        ("auditor.plugins", "load_subject"),
        "the sheet is not finished",
    ),
}


def names_of(group: click.Group, before: str = "") -> set[str]:
    """All commands below a group, "policy init" for one in a group of its own."""
    names = set()
    for name, command in group.commands.items():
        names |= names_of(command, f"{name} ") if isinstance(command, click.Group) else {before + name}
    return names


def test_no_command_is_missing_here():
    assert names_of(auditor) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("cause", ["disk", "interrupt"])
def test_each_command_says_what_holds(name, cause, registry, tmp_path, monkeypatch):
    arguments, (module, function), outcome = COMMANDS[name]
    (tmp_path / "policy.toml").write_text('[limits."model/accuracy"]\nmin = 0.5\n')
    (tmp_path / "image.png").write_bytes(b"")
    values = {"POLICY": str(tmp_path / "policy.toml"), "IMAGE": str(tmp_path / "image.png")}
    error = OSError(errno.ENOSPC, "No space left on device", "/full/disk") if cause == "disk" else KeyboardInterrupt()

    def fails(*args, **kwargs):
        raise error

    monkeypatch.chdir(tmp_path)
    home = importlib.import_module(module)
    getattr(home, function)  # loads a name that is looked up lazily, so that it can be replaced
    monkeypatch.setattr(home, function, fails, raising=False)
    result = CliRunner().invoke(auditor, [*name.split(), *(values.get(a, a) for a in arguments)])
    why = "error: No space left on device (/full/disk)" if cause == "disk" else "interrupted"
    assert result.stderr == f"auditor: {why}; {outcome}.\n"
    assert result.exit_code == (2 if cause == "disk" else 130)


def test_after_the_commit_fit_does_not_deny_it(registry, monkeypatch, concepts):
    import auditor.commands.terminal as terminal
    import auditor.plugins.registry.lineage as lineage

    run = ["fit", "nmf", MODEL, "--data", "sklearn:digits", "--limit", "60", "--name", "committed", "--set", "rank=2"]

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # while attaching, which of both holds is not known here
        patch.setattr("auditor.plugins.registry.attachments.logged_metrics", interrupted)
        result = CliRunner().invoke(auditor, run)
        assert result.stderr.endswith(
            f"interrupted; auditor list {MODEL} says whether 'committed' is attached already.\n"
        )
    with monkeypatch.context() as patch:
        patch.setattr(terminal, "table", interrupted)
        result = CliRunner().invoke(auditor, run)
        assert result.stderr.endswith("interrupted; 'committed' is attached.\n")
    with monkeypatch.context() as patch:
        patch.setattr(lineage, "check_has_network", lambda cls: None)
        patch.setattr(lineage, "register_network", interrupted)
        result = CliRunner().invoke(auditor, [*run, "--register"])
        assert result.stderr.endswith("interrupted; 'committed' is attached, its network is not registered.\n")
    assert CliRunner().invoke(auditor, ["detach", MODEL, "committed"]).exit_code == 0


def test_a_gate_that_has_judged_says_its_verdict(tmp_path, monkeypatch, audited):
    from auditor.release.gate import judge
    from auditor.release.policy import parse_policy

    (tmp_path / "policy.toml").write_text('[limits."model/accuracy"]\nmin = 0.5\n')
    gate = judge(audited, parse_policy((tmp_path / "policy.toml").read_text()))
    blocked = tmp_path / "policy.toml" / "j.xml"  # below a file: not writable

    def judged(*_args, before_promotion, **_options):
        before_promotion(gate)
        raise AssertionError("a report that cannot be written stops the gate")

    monkeypatch.setattr("auditor.plugins.run_gate", judged, raising=False)
    run = ["gate", MODEL, "--policy", str(tmp_path / "policy.toml"), "--junit", str(blocked)]
    result = CliRunner().invoke(auditor, run)
    assert result.exit_code == 2
    words = "the verdict is pass, nothing was promoted, the files asked for may be missing"
    assert f"; {words}.\n" in result.stderr


def test_a_fresh_audit_keeps_no_parts_and_does_not_say_so(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("auditor.plugins.run_audit", interrupted, raising=False)
    result = CliRunner().invoke(auditor, ["audit", MODEL, "--data", "sklearn:digits", "--fresh"])
    assert result.stderr == "auditor: interrupted; nothing was stored.\n"


def test_a_reader_that_goes_away_is_no_disk_error():
    @click.command()
    @reports_errors("nothing was written")
    def broken():
        now_holds("half of it was read")
        raise BrokenPipeError

    result = CliRunner().invoke(broken)
    assert "nothing was written" not in result.output
    assert "half of it" not in result.output
