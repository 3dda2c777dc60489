"""``--config``: a file's table as the options of a command, the command line before it, one line for what is wrong."""

import json

import pytest


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "audit.toml"
        path.write_text(text)
        return path

    return write


def test_a_fit_is_written_in_a_file_and_the_command_line_goes_before_it(cli, config):
    path = config(
        '[fit]\nkind = "nmf"\nmodel = "models:/digits/1"\ndata = "sklearn:digits"\nlimit = 60\nname = "from-file"\n'
        "dry-run = true\nset = { rank = 3, refits = 1, class_weights = false }\n"
    )
    assert cli.json("fit", "--config", path)["name"] == "from-file"
    answer = cli.json("fit", "--config", path, "--name", "from-line", "--set", "rank=2")
    assert answer["name"] == "from-line"
    assert len(answer["metrics"]) > 2


def test_an_audit_is_written_in_a_file(cli, config, monkeypatch):
    from auditor.plugins.registry import audits

    calls = []

    def run_audit(model, source, **options):
        calls.append((model, source.sample, options["config"], options["store"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("auditor.plugins.run_audit", run_audit)
    path = config(
        '[audit]\nmodel = "models:/digits/1"\ndata = "sklearn:digits"\nlimit = 90\nimages = 25\n'
        'explainers = ["concepts"]\n'
        'checks = ["performance", "layers"]\nno_store = true\nno-reliance = true\n[fit]\nkind = "nmf"\n'
    )
    assert cli("audit", "--config", path, "--images", "30").exit_code == 130
    ((model, sample, options, store),) = calls
    assert (model, len(sample.rows), store) == ("models:/digits/1", 90, False)
    assert (options.images, options.explainers, options.checks, options.reliance) == (
        30, ("concepts",), ("performance", "layers"), False,
    )  # fmt: skip
    assert audits.run_audit is not run_audit


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[gate]\nx = 1", r"wanted a table \[fit\], it has gate"),
        ("", r"wanted a table \[fit\], it has nothing"),
        ("fit = 3", r"wanted a table \[fit\]"),
        ("[fit]\nlayers = 'x'", "has no option 'layers'; there are kind, model, data"),
        ("[fit]\nstrict = 'yes'", "strict: wanted true or false, got 'yes'"),
        ("[fit]\nname = true", "name: wanted a value, got True"),
        ("[fit]\nname = { a = 1 }", "name: wanted a value"),
        ("[fit\n", "not TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_one_line(cli, config, text, sentence):
    import re

    assert re.search(sentence, cli.fails("fit", "--config", config(text)))


def test_a_file_that_is_not_there_is_one_line(cli, tmp_path):
    assert "No such file" in cli.fails("audit", "--config", tmp_path / "nosuch.toml")


def test_help_with_a_kind_lists_its_options_with_defaults(cli):
    printed = " ".join(cli("fit", "nmf", "--help").stdout.split())
    assert "Options of nmf (--set KEY=VALUE):" in printed
    assert "Sweeps at most. [default: 300]" in printed
    assert "Options of" not in cli("fit", "--help").stdout
    assert "nosuch" in cli.fails("fit", "nosuch", "--help")
    (entry,) = json.loads(cli("kinds", "nmf", "--json").stdout)
    assert entry["options"]["max_iter"]["default"] == 300
