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


def test_a_file_is_drafted_from_instead_of_the_stored_audit(cli, gated, policy, tmp_path):
    (tmp_path / "a.json").write_bytes(latest_audit(gated[0]).sealed())
    drafted = cli("policy", "init", "models:/digits/1", "--audit", tmp_path / "a.json")
    assert drafted.exit_code == 0
    assert drafted.stdout == policy.read_text()


def test_bad_input_is_one_line(cli, tmp_path):
    assert "has no stored audit" in cli.fails("policy", "init", "models:/digits/1")
    assert "cannot be read" in cli.fails("policy", "init", "models:/digits/1", "--audit", tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    assert "text.json" in cli.fails("policy", "init", "models:/digits/1", "--audit", tmp_path / "text.json")


def test_a_policy_file_is_said_in_words(cli, tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(
        'explainers = ["concepts"]\n[limits."model/accuracy"]\nmin = 0.9\nmax_absolute_loss = 0.01\n'
        '[pins]\nseed = 3\nkinds = ["nmf"]\nauditor = ">=0.1"\nbaseline_differs = true\n'
        '[signers]\naudit = ["alice", "carol"]\ndiffer = true\n'
    )
    text = cli("policy", "check", path).stdout
    for line in (
        "model/accuracy: at least 0.9, and worse than the baseline by at most 0.01.",
        "The explainer concepts is attached and verifies.",
        "The seed of the audit is 3.",
        "The audit was made by mlflow-auditor >=0.1.",
        "There is an explainer of kind nmf.",
        "The audit is signed by alice or carol.",
        "Whoever signed the audit did not sign the model.",
        "needs --baseline MODEL",
        "needs --trusted keys/",
    ):
        assert line in text
    answer = cli.json("policy", "check", path)
    assert answer["needs_baseline"]
    assert len(answer["words"]) == 8


def test_a_policy_file_that_is_none_is_one_line(cli, tmp_path):
    path = tmp_path / "p.toml"
    limits = '[limits."model/accuracy"]\nmin = 0.9\n'
    for text, words in (
        (limits + "[pins]\nsead = 1\n", "'pins.sead' is not known here; known are data_digest"),
        (limits + "[pins]\ndata_digest = 'x'\n", "pins.data_digest"),
        (limits + "[pins]\nauditor = 'new'\n", "is no range of versions"),
        (limits + "[signers]\nowner = ['a']\n", "'signers.owner' is not known here; known are audit, model, differ"),
        ("[pins]\nseed = 1\n", "it sets no limits"),
    ):
        path.write_text(text)
        assert words in cli.fails("policy", "check", path)
    assert "cannot be read" in cli.fails("policy", "check", tmp_path / "none.toml")
