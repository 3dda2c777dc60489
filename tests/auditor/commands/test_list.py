"""``auditor list``."""


def test_rows_name_kind_layer_digest_and_metrics(cli, shown):
    rows = {row["name"]: row for row in cli.json("list", shown)}
    assert set(rows) == {"concepts", "heads"}
    assert (rows["concepts"]["kind"], rows["heads"]["kind"]) == ("nmf", "xnn")
    assert all(row["verified"] is True for row in rows.values())
    assert rows["concepts"]["layer"] == "features"
    assert len(rows["concepts"]["digest"]) == 64
    assert rows["concepts"]["metrics"]["f_cls"] > 0.5


def test_the_table_shows_the_headline_metrics(cli, shown):
    lines = cli("list", shown).stdout.splitlines()
    assert lines[0].split() == ["name", "kind", "digest", "layer", "verified", "metrics"]
    (line,) = [line for line in lines if line.startswith("concepts")]
    assert "yes" in line
    assert "f_cls " in line


def test_a_version_without_explainers_says_what_to_do(cli, tiny):
    from auditor.plugins import log_subject

    bare = log_subject(tiny, "bare", experiment="tests")
    assert cli.json("list", bare) == []
    assert f"try: auditor fit nmf {bare}" in cli("list", bare).stdout


def test_bad_input_is_one_line(cli):
    assert "no registered model" in cli.fails("list", "models:/nosuch/1")
    assert "nosuch" in cli.fails("list", "models:/digits@nosuch")
    assert "999" in cli.fails("list", "models:/digits/999")


def test_an_explainer_of_a_kind_that_is_missing_verifies_and_says_what_to_install(cli, scratch, monkeypatch):
    from auditor.explainers import kinds

    fewer = {kind: where for kind, where in kinds.BUILT_IN.items() if kind != "nmf"}
    monkeypatch.setattr(kinds, "BUILT_IN", fewer)
    (row,) = cli.json("list", scratch)
    assert row["verified"] is True
    assert row["needs"].startswith("unknown explainer kind 'nmf'; the kinds are coupled, ")
    line, needs = cli("list", scratch).stdout.splitlines()[-2:]
    assert line.split()[0] == "concepts"
    assert needs == f"concepts: {row['needs']}"
