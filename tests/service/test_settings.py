"""Settings: every field by every way, and a wrong value is one sentence."""

import logging
from pathlib import Path

import pytest

from auditor.cli import auditor
from auditor.errors import OptionError
from auditor.plugins.deployments import target_help
from auditor.plugins.local_service import LocalServices, check_config
from auditor.service import launch
from auditor.service.settings import OLD_NAMES, Settings, as_variables, from_environment, options, to_environment

# a value of every setting that is not its default
GIVEN = {
    "model": "models:/m@champion", "engine": "onnx", "device": "cuda:1", "precision": "float16", "workers": 3,
    "threads": 2, "allow_pickle": True, "require_verdict": Path("trusted"),
    "max_batch": 5, "max_wait_ms": 2.5, "queue": 77, "slow_queue": 9,
    "request_timeout_s": 12.5, "search_timeout_s": 0.75, "max_search_timeout_s": 4.5, "max_body_mb": 1.5,
    "max_pixels": 12345, "decoders": 3, "decode_timeout_s": 3.5, "decode_memory_mb": 640,
    "upload_timeout_s": 7.5, "api_keys": Path("keys.txt"), "keys_grace_s": 9.5,
    "oidc_issuer": "https://id.example", "oidc_audience": "auditor", "oidc_scope": "explain",
    "oidc_rate_per_minute": 30.0, "allowed_hosts": "a.example,b.example", "allowed_origins": "https://a.example",
    "poll_s": 0.5,
    "sample_images": "sklearn:digits", "log_requests": False, "otlp_endpoint": "http://c:4318/v1/traces",
    "trace_rate": 0.25,
}  # fmt: skip
WANTED = Settings(**GIVEN)
FIELDS = [name for name in Settings.model_fields if name != "model"]


def as_text(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture
def served(monkeypatch):
    """The settings with which ``auditor serve`` would start, and nothing started."""
    caught = []

    def run_server(model, *, host, port, **options):
        caught.append(from_environment(as_variables({"model": model, **options})))

    monkeypatch.setattr(launch, "run_server", run_server)

    def serve(*arguments) -> Settings:
        caught.clear()
        auditor.main(["serve", *arguments], prog_name="auditor", standalone_mode=False)
        return caught[0]

    return serve


def test_there_is_a_value_for_every_field_and_none_is_the_default():
    assert set(GIVEN) == set(Settings.model_fields)
    assert not [name for name, field in Settings.model_fields.items() if field.default == GIVEN[name]]


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_arrives_by_all_four_ways(name, served):
    value = as_text(GIVEN[name])
    expected = Settings(model=GIVEN["model"], **{name: GIVEN[name]})
    # the environment
    assert from_environment({"AUDITOR_MODEL": GIVEN["model"], f"AUDITOR_{name.upper()}": value}) == expected
    # the command
    (option,) = [option for option in options() if option.name == name]
    assert served(GIVEN["model"], *option.flags(value)) == expected
    # the deployments client, which starts the command
    command = LocalServices(serve=()).command(GIVEN["model"], check_config({name: value}), "127.0.0.1", 3000)
    assert served(*command) == expected
    # both helps
    assert f"    {name}: {Settings.model_fields[name].description}" in target_help()
    flags = {flag for p in auditor.commands["serve"].params for flag in p.opts if not getattr(p, "hidden", False)}
    assert option.flag in flags


def test_all_of_them_at_once(served):
    flags = [flag for option in options() for flag in option.flags(as_text(GIVEN[option.name]))]
    assert served(GIVEN["model"], *flags) == WANTED
    assert from_environment(to_environment(WANTED)) == WANTED
    assert from_environment(to_environment(Settings())) == Settings()


def test_the_helps_show_defaults_and_descriptions(served):
    text = target_help()
    assert "    queue: Images that may wait; beyond it callers get 429. (256)" in text
    assert "{settings}" not in text
    for field in Settings.model_fields.values():
        assert field.description


@pytest.mark.parametrize("old", OLD_NAMES)
def test_an_old_name_works_by_all_ways_with_a_warning(old, served, caplog, capsys):
    new, value = OLD_NAMES[old], "sklearn:digits"
    assert new in Settings.model_fields
    assert old not in Settings.model_fields
    warning = f"the setting {old} is called {new} now"
    expected = Settings(model="m", **{new: value})

    def by_environment():
        return from_environment({"AUDITOR_MODEL": "m", f"AUDITOR_{old.upper()}": value})

    def by_command():
        return served("m", f"--{old}", value)

    def by_client():
        return served(*LocalServices(serve=()).command("m", check_config({old: value}), "127.0.0.1", 3000))

    for way in (by_environment, by_command, by_client):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert way() == expected
        assert warning in caplog.text + capsys.readouterr().err  # the command writes its log to standard error
    caplog.clear()
    both = {f"AUDITOR_{old.upper()}": "old", f"AUDITOR_{new.upper()}": "new"}
    assert getattr(from_environment(both), new) == "new"
    assert not caplog.text
    assert [p.hidden for p in auditor.commands["serve"].params if f"--{old}" in p.opts] == [True]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("QUEUE", "0"), ("TRACE_RATE", "1.5"), ("ENGINE", "tensorrt"), ("WORKERS", "many"), ("OTLP_ENDPOINT", "c:4318")],
)
def test_a_wrong_value_is_one_sentence(variable, value):
    with pytest.raises(OptionError, match=rf"AUDITOR_{variable}: .*got '{value}'; see auditor serve --help"):
        from_environment({f"AUDITOR_{variable}": value})


def test_an_unknown_setting_is_an_error_and_an_empty_variable_is_none():
    with pytest.raises(OptionError, match="there is no setting quue; there are: model, engine"):
        as_variables({"quue": 3})
    with pytest.raises(OptionError, match="config: unknown quue"):
        check_config({"quue": 3})
    assert from_environment({"AUDITOR_QUEUE": ""}) == Settings()


def test_settings_travel_through_the_environment(tmp_path):
    settings = Settings(model="models:/m@a", max_batch=3, api_keys=tmp_path / "k", log_requests=False, poll_s=0.5)
    assert from_environment(to_environment(settings)) == settings
    with pytest.raises(OptionError, match=r"AUDITOR_QUEUE: .*got '0'"):
        from_environment({"AUDITOR_QUEUE": "0"})
