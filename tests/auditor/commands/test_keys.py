"""``auditor keys``."""

import json

import pytest
from click.testing import CliRunner

from auditor.cli import auditor
from auditor.service.keys import Keys, hashed

KEY = "a-key-of-some-length"


def run(*args: str, given: str = ""):
    return CliRunner().invoke(auditor, ["keys", *args], input=given)


def test_a_key_is_hashed_as_the_service_reads_it(tmp_path):
    result = run("hash", given=f"{KEY}\n")
    assert result.exit_code == 0
    assert result.stdout == hashed(KEY) + "\n"
    (tmp_path / "keys").write_text(result.stdout)
    assert Keys(tmp_path / "keys").admit(KEY, "/explain", "digits")
    assert json.loads(run("hash", "--json", given=KEY).stdout) == {"hash": hashed(KEY)}


def test_a_new_key_is_another_every_time_and_its_hash_fits():
    made = [json.loads(run("hash", "--new", "--json").stdout) for _ in range(2)]
    assert made[0]["key"] != made[1]["key"]
    assert all(hashed(one["key"]) == one["hash"] and len(one["key"]) >= 40 for one in made)
    shown = dict(line.split() for line in run("hash", "--new").stdout.splitlines())
    assert hashed(shown["key"]) == shown["hash"]


@pytest.mark.parametrize("given", ["", "short", "a key with spaces in it", "x" * 15])
def test_bad_input_is_one_line(given):
    result = run("hash", given=given)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "at least 16 characters" in result.stderr
