"""Host and origin: a page of another site gets nothing."""

import socket

import pytest

from auditor.service.host_check import HostCheck
from auditor.service.problems import Problem
from auditor.service.settings import Settings


def code(settings=None, host="127.0.0.1:3000", origin=None) -> str:
    headers = {b"host": host.encode()} if host else {}
    if origin:
        headers[b"origin"] = origin.encode()
    try:
        HostCheck(settings or Settings()).check(headers)
    except Problem as problem:
        return problem.code if problem.status == 403 else str(problem)
    return ""


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:3000", "127.0.0.1", "[::1]:3000", "10.1.2.3:80", "localhost.", ""]
)
def test_names_of_this_machine_and_addresses_are_answered(host):
    assert code(host=host) == ""
    assert code(host=socket.gethostname() + ":3000") == ""


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:3000", "127.0.0.1.evil.example", "localhost.evil.example", "1", "a:b:c"],
)
def test_a_name_that_somebody_pointed_here_is_not(host):
    assert code(host=host) == "host_not_allowed"


def test_a_guarded_server_answers_to_every_name_unless_names_are_given(tmp_path):
    guarded = Settings(api_keys=tmp_path / "keys")
    assert code(guarded, "service.example") == ""
    assert code(Settings(oidc_issuer="https://id.example"), "service.example") == ""
    named = guarded.model_copy(update={"allowed_hosts": "Service.example, other.example"})
    assert code(named, "service.example:443") == code(named, "other.example.") == ""
    assert code(named, "evil.example") == "host_not_allowed"
    assert code(Settings(allowed_hosts="*"), "evil.example") == ""


def test_only_its_own_page_and_named_sites_may_ask():
    assert code(origin="http://127.0.0.1:3000") == ""
    for origin in ("http://evil.example", "null", "http://127.0.0.1:3001", "http://127.0.0.1", "http://[", "x"):
        assert code(origin=origin) == "origin_not_allowed"
    named = Settings(allowed_origins="https://app.example/, https://b.example")
    assert code(named, origin="https://app.example") == ""
    assert code(named, origin="http://app.example") == "origin_not_allowed"
    assert code(Settings(allowed_origins="*"), origin="null") == ""
