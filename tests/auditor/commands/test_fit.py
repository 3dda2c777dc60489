"""``auditor fit``."""

import pytest

from auditor.errors import WeakFitError
from auditor.plugins import attach, list_attached, load

MODEL = "models:/digits/1"
FIT = ("fit", "nmf", MODEL, "--data", "sklearn:digits")
SMALL = ("--limit", "60", "--set", "rank=2", "--set", "refits=1", "--attach-anyway")


def attached(model: str = MODEL) -> list[tuple[str, str]]:
    return [(x.name, x.digest) for x in list_attached(model)]


def test_an_explainer_is_fitted_measured_and_attached(cli):
    try:
        answer = cli.json(*FIT, "--name", "fitted", "--set", "rank=5", "--set", "refits=1")
        assert (answer["name"], answer["kind"], answer["layer"]) == ("fitted", "nmf", "features")
        assert answer["metrics"]["f_cls"] > 0.8
        assert ("fitted", answer["digest"]) in attached()
        explainer = load(MODEL, "fitted")
        assert explainer.config.rank == 5
        assert explainer.metrics == pytest.approx(answer["metrics"])
    finally:
        cli("detach", MODEL, "fitted")


def test_at_the_terminal_it_says_where_it_was_attached_and_what_it_measured(cli):
    try:
        shown = cli(*FIT, *SMALL).stdout
        assert f"nmf 'nmf' of layer features attached to {MODEL}" in shown  # the kind is the default name
        assert dict(attached())["nmf"][:12] in shown
        assert "f_cls" in shown
    finally:
        cli("detach", MODEL, "nmf")


def test_a_dry_run_attaches_nothing(cli):
    before = attached()
    answer = cli.json(*FIT, *SMALL, "--dry-run")
    assert answer["digest"] is None
    assert answer["metrics"]
    assert attached() == before
    assert "fitted, not attached" in cli(*FIT, *SMALL, "--dry-run").stdout


def test_the_seed_decides(cli):
    runs = [cli.json(*FIT, *SMALL, "--set", "init=random", "--dry-run", "--seed", seed) for seed in ("1", "1", "2")]
    assert runs[0]["metrics"] == runs[1]["metrics"] != runs[2]["metrics"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("fit", "nosuch", MODEL, "--data", "sklearn:digits"), "unknown explainer kind 'nosuch'"),
        (("fit", "nmf", "models:/nosuch/1", "--data", "sklearn:digits"), "no registered model"),
        (("fit", "nmf", MODEL, "--data", "/no/such"), "no such file or folder"),
        ((*FIT, "--layer", "nosuch"), "no layer 'nosuch'"),
        ((*FIT, "--target", "12"), "class index must be 0 to 9"),
        ((*FIT, "--name", "a/b"), "explainer name 'a/b'"),
        ((*FIT, "--set", "rank=999999"), "rank must be at most 64"),
        ((*FIT, "--set", "nosuch=1"), "unknown option 'nosuch'"),
        ((*FIT, "--set", "rank"), "--set wants KEY=VALUE"),
        ((*FIT, "--export", "--dry-run"), "leave --dry-run out"),
        ((*FIT, "--register"), "kind nmf makes no network of its own"),
    ],
)
def test_bad_input_is_one_line(cli, arguments, sentence):
    before = attached()
    assert sentence in cli.fails(*arguments)
    assert attached() == before


def test_images_of_another_size_are_refused(cli, tiny_npz):
    assert "13, 17); resize" in cli.fails("fit", "nmf", MODEL, "--data", str(tiny_npz))


def test_labels_of_a_probe_set_stay_apart_from_the_classes(cli, scratch, strokes, tmp_path):
    result = cli(
        "fit", "coupled", scratch, "--data", strokes, "--name", "probe", "--set", "rank=3", "--json", "--attach-anyway"
    )
    assert "3 of 3 labels are no class of the model and stay apart" in result.stderr
    probe = load(scratch, "probe")
    assert probe.label_names_ == ("mixed", "round", "straight")
    n = [len(list((strokes / name).iterdir())) for name in probe.label_names_]
    assert len(probe.labels_) < sum(n)  # some are held out
    assert set(probe.labels_.tolist()) == {0, 1, 2}
    assert probe.class_score_.shape == (3, 3)
    cli("concepts", scratch, "probe", "--out", tmp_path / "probe.html")
    page = (tmp_path / "probe.html").read_text()
    assert all(f"({name}), score" in page for name in probe.label_names_)


def test_a_kind_that_learns_from_labels_refuses_those_of_other_classes(cli, scratch, strokes):
    for kind in ("xnn", "tree", "deepfacto"):
        assert "3 of its 3 labels are no class of the model" in cli.fails("fit", kind, scratch, "--data", strokes)


def test_a_fit_that_does_not_stand_in_is_attached_only_on_request(cli, scratch):
    weak = ("fit", "nmf", scratch, "--data", "sklearn:digits", "--limit", "200", "--name", "weak", "--set", "rank=1")
    before = attached(scratch)
    line = cli.fails(*weak)
    assert "nmf 'weak' does not stand in for the model and is not attached: the model's class survives on" in line
    assert "Try this: more concepts" in line
    assert attached(scratch) == before
    result = cli(*weak, "--attach-anyway")
    assert result.exit_code == 0
    assert "weak does not stand in for the model" in result.stderr
    assert [name for name, _ in attached(scratch)] == ["concepts", "weak"]
    weak_one = load(scratch, "weak")
    with pytest.raises(WeakFitError):
        attach(weak_one, scratch, "again")
    attach(weak_one, scratch, "again", attach_anyway=True)
    assert cli("label", scratch, "weak", "0", "strokes").exit_code == 0  # what is attached can be renamed
