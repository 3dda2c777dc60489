"""``auditor curves``."""

import pytest

OPTIONS = ("--limit", "200", "--epochs", "2", "--hidden", "12", "--methods", "block-admm,sgd")


def test_a_picture_and_a_row_per_optimizer(cli, tmp_path):
    rows = cli.json("curves", *OPTIONS, "--out", tmp_path / "c.png")
    assert [row["method"] for row in rows] == ["block-admm", "sgd"]
    assert all(len(row["accuracy"]) == 2 for row in rows)
    assert (tmp_path / "c.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "c.png").stat().st_size > 10_000


def test_at_the_terminal(cli, tmp_path):
    lines = cli("curves", *OPTIONS, "--out", tmp_path / "c.png").stdout.splitlines()
    assert lines[0].startswith("optimizer")
    assert [line.split()[0] for line in lines[1:3]] == ["block-admm", "sgd"]
    assert lines[-1] == f"picture in {tmp_path / 'c.png'}"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--methods", "nosuch"), "not known; choose from block-admm"),
        (("--hidden", "0"), "--hidden wants"),
        (("--hidden", "wide"), "--hidden wants numbers"),
        (("--data", "/no/such"), "no such file or folder"),
    ],
)
def test_bad_input_is_one_line(cli, options, sentence):
    assert sentence in cli.fails("curves", *options)
