"""``auditor kinds``."""

import pytest

pytestmark = pytest.mark.usefixtures("registry")
OURS = ["coupled", "deepfacto", "nmf", "rde", "tree", "xnn"]


def test_every_kind_is_listed_with_its_package_and_options(cli):
    rows = {row["kind"]: row for row in cli.json("kinds")}
    assert set(OURS) <= set(rows)
    assert rows["nmf"]["package"] == rows["rde"]["package"]
    assert rows["nmf"]["class"].endswith("NmfExplainer")
    assert rows["nmf"]["options"]["rank"]["description"]
    assert rows["nmf"]["options"]["seed"]["default"] == 0
    assert "max_steps" in rows["rde"]["options"]


def test_the_table_names_options_and_one_kind_describes_them(cli):
    lines = cli("kinds").stdout.splitlines()
    assert lines[0].split()[:2] == ["kind", "from"]
    assert {line.split()[0] for line in lines[1:]} >= set(OURS)
    shown = cli("kinds", "nmf").stdout
    assert shown.startswith("nmf comes from ")
    (rank,) = [line for line in shown.splitlines() if line.startswith("rank ")]
    assert cli.json("kinds", "nmf")[0]["options"]["rank"]["description"] in rank


def test_bad_input_is_one_line(cli):
    assert "unknown explainer kind 'nosuch'" in cli.fails("kinds", "nosuch")
