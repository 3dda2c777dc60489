"""``auditor label``."""

from auditor.plugins import list_attached, load


def digest(uri: str) -> str:
    (entry,) = [x for x in list_attached(uri) if x.name == "concepts"]
    return entry.digest


def test_a_name_is_stored_as_a_new_revision_that_verifies(cli, scratch):
    before = digest(scratch)
    answer = cli.json("label", scratch, "concepts", "2", "upper  loop")
    assert (answer["name"], answer["concept"], answer["label"]) == ("concepts", 2, "upper loop")
    assert answer["digest"] == digest(scratch) != before
    assert load(scratch, "concepts").label(2) == "upper loop"
    assert cli.json("verify", scratch)["verified"] is True
    shown = cli("label", scratch, "concepts", "0", "dots").stdout
    assert shown == f"Concept 0 of concepts is now 'dots' ({digest(scratch)[:12]}).\n"
    assert load(scratch, "concepts").label(2) == "upper loop"


def test_bad_input_is_one_line_and_changes_nothing(cli, scratch):
    before = digest(scratch)
    assert "has concepts 0 to 5, got 6" in cli.fails("label", scratch, "concepts", "6", "dots")
    assert "1 to 80 printable characters" in cli.fails("label", scratch, "concepts", "0", " ")
    assert "no explainer called 'absent'" in cli.fails("label", scratch, "absent", "0", "dots")
    assert cli("label", scratch, "concepts", "first", "dots").exit_code == 2
    assert digest(scratch) == before
