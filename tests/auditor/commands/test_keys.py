"""``auditor keys``: hashed for the service; made, listed and revoked for signatures."""

import json
from importlib.util import find_spec

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


needs_signing = pytest.mark.skipif(find_spec("securesystemslib") is None, reason="the extra sign is not installed")


@needs_signing
def test_a_key_is_made_listed_and_revoked(cli, tmp_path):
    made = cli.json("keys", "new", "alice", "--dir", tmp_path)
    assert made["private"].endswith("alice.pem")
    assert "secret key in" in cli("keys", "new", "bob", "--dir", tmp_path, "--expires", "2099-01-01").stdout
    keys = cli.json("keys", "list", "--dir", tmp_path)
    assert [(k["name"], k["problem"]) for k in keys] == [("alice", ""), ("bob", "")]
    assert keys[0]["keyid"] == made["keyid"]
    assert "counts" in cli("keys", "list", "--dir", tmp_path).stdout
    assert "alice was revoked" in cli("keys", "revoke", "alice", "--dir", tmp_path).stdout
    assert "revoked" in cli.json("keys", "list", "--dir", tmp_path)[0]["problem"]


@needs_signing
def test_bad_names_dates_and_folders_are_one_line(cli, tmp_path):
    assert "key name '../x'" in cli.fails("keys", "new", "../x", "--dir", tmp_path)
    assert "--expires wants a day" in cli.fails("keys", "new", "a", "--dir", tmp_path, "--expires", "soon")
    assert "no such folder" in cli.fails("keys", "list", "--dir", tmp_path / "none")
    cli.json("keys", "new", "a", "--dir", tmp_path)
    assert "is there already" in cli.fails("keys", "new", "a", "--dir", tmp_path)
    assert "trusts no key 'b'" in cli.fails("keys", "revoke", "b", "--dir", tmp_path)
