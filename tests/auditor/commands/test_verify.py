"""``auditor verify``."""

from pathlib import Path

from auditor.plugins.registry.location import resolve


def test_what_is_untouched_verifies(cli, shown):
    answer = cli.json("verify", shown)
    assert answer["verified"] is True
    assert [row["name"] for row in answer["explainers"]] == ["concepts", "heads"]
    result = cli("verify", shown)
    assert result.exit_code == 0
    assert "2 of 2 attached explainers verify." in result.stdout


def test_one_changed_byte_is_exit_1_and_named(cli, scratch):
    root = Path(resolve(scratch).root.removeprefix("file://"))
    (tensors,) = root.glob("explainers/concepts/*/tensors.safetensors")
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    result = cli("verify", scratch)
    assert result.exit_code == 1
    assert "0 of 1 attached explainers verify." in result.stdout
    assert "concepts: " in result.stderr
    answer = cli("verify", scratch, "--json")
    assert answer.exit_code == 1
    assert '"verified": false' in answer.stdout


def test_nothing_attached_is_said(cli, tiny):
    from auditor.plugins import log_subject

    bare = log_subject(tiny, "bare", experiment="tests")
    result = cli("verify", bare)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == f"Nothing is attached to {bare}."
    assert "Signatures were not looked at" in result.stdout


def test_bad_input_is_one_line(cli):
    assert "no registered model" in cli.fails("verify", "models:/nosuch/1")
