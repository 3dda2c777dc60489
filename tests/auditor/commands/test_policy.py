"""``auditor policy init``."""

from auditor.plugins import latest_audit
from auditor.release.gate import judge
from auditor.release.policy import parse_policy


def test_the_draft_is_a_policy_that_its_own_audit_passes(gated, policy):
    text = policy.read_text()
    rules = parse_policy(text, "the draft")
    assert 'limits."model/accuracy"' in text
    assert text.count("#") > 5  # every line is explained
    assert judge(latest_audit(gated[0]), rules).verdict == "pass"


def test_a_file_is_drafted_from_instead_of_the_stored_audit(cli, gated, policy):
    drafted = cli("policy", "init", "models:/digits/1", "--audit", gated[1] / "a.json")
    assert drafted.exit_code == 0
    assert drafted.stdout == policy.read_text()


def test_bad_input_is_one_line(cli, tmp_path):
    assert "has no stored audit" in cli.fails("policy", "init", "models:/digits/1")
    assert "cannot be read" in cli.fails("policy", "init", "models:/digits/1", "--audit", tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    assert "text.json" in cli.fails("policy", "init", "models:/digits/1", "--audit", tmp_path / "text.json")
