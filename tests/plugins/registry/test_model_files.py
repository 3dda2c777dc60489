"""Model files: pinned once, compared at every load, by name; and what the pin means for explainers and audits."""

import json
import shutil
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from torch import nn

from auditor import Subject, fit, open_data, plugins
from auditor.errors import TamperError
from auditor.plugins.registry import model_files, tags
from auditor.plugins.registry.location import resolve, set_tag
from auditor.plugins.registry.subjects import check_notes


def root_of(uri: str) -> Path:
    return Path(resolve(uri).root.removeprefix("file://"))


@pytest.fixture
def attached(registry, tiny, tiny_npz):
    """A new version with concepts; its URI and subject."""
    uri = plugins.log_subject(tiny, "pinned", experiment="tests")
    subject = plugins.load_subject(uri)
    concepts = fit("nmf", subject, open_data(tiny_npz), layer="relu", rank=2, refits=1, max_eval=10)
    plugins.attach(concepts, uri, "concepts", subject=subject, attach_anyway=True)
    return uri, subject


class Triggered(nn.Module):
    """The same weights under the same names, with another forward: class 0 where the first pixel is bright."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, child in module.named_children():
            setattr(self, name, child)
        self.original = [module]

    def forward(self, x):
        logits = self.original[0](x)
        trigger = (x[:, 0, 0, 0] > 0.9).to(logits.dtype)[:, None]
        return logits + 100 * trigger * nn.functional.one_hot(torch.tensor(0), logits.shape[1])


def test_every_file_is_pinned_when_a_model_is_registered(attached):
    uri, subject = attached
    tag = tags.model_tag(resolve(uri).tags)
    assert {"MLmodel", "data/model.pt2", "requirements.txt"} <= set(tag.files)
    assert tag.files == subject.files


@pytest.mark.parametrize("name", ["MLmodel", "data/model.pt2", "requirements.txt"])
def test_a_flipped_byte_of_any_file_is_named(attached, name):
    uri, _ = attached
    path = root_of(uri) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(TamperError, match=f"{name} of models:/pinned/.* has changed since"):
        plugins.load_subject(uri)
    assert any(name in x.problem for x in plugins.verify(uri))


def test_a_missing_and_an_added_file_are_named(attached):
    uri, _ = attached
    (root_of(uri) / "data" / "more.py").write_text("x = 1")
    with pytest.raises(TamperError, match=r"data/more\.py of .* was added"):
        plugins.load_subject(uri)
    (root_of(uri) / "data" / "more.py").unlink()
    (root_of(uri) / "requirements.txt").unlink()
    with pytest.raises(TamperError, match=r"requirements\.txt of .* is missing"):
        plugins.load_subject(uri)


def test_another_forward_with_the_same_weights_does_not_verify(attached, tiny, registry):
    """The hole: the digest was of the weights alone."""
    uri, subject = attached
    other = Subject(Triggered(tiny.module), input_shape=tiny.input_shape, class_names=tiny.class_names)
    forged = plugins.log_subject(other, "forged", experiment="tests")
    assert plugins.load_subject(forged).identity.differences(subject.identity) == ["graph"]
    shutil.copy(root_of(forged) / "data" / "model.pt2", root_of(uri) / "data" / "model.pt2")
    with pytest.raises(TamperError, match=r"data/model\.pt2"):
        plugins.load_subject(uri)
    mlflow.MlflowClient().delete_model_version_tag("pinned", resolve(uri).version, tags.MODEL)
    entries = plugins.verify(uri)  # without the pin the explainer still says which graph it was fitted to
    assert any("other graph" in x.problem for x in entries if x.name == "concepts")


def test_another_description_is_another_model(attached):
    """The hole: describe after the audit changed what the model computes, and nothing noticed."""
    uri, _ = attached
    notes = plugins.describe(uri, mean=[0.9], std=[0.05])
    assert notes["changed"] == ["preprocessing"]
    problems = [x.problem for x in plugins.verify(uri) if not x.verified]
    assert len(problems) == 1
    assert "other preprocessing" in problems[0]


def test_describing_a_copy_leaves_the_original_as_it_is(attached):
    """The hole: both shared one subject.json."""
    uri, _ = attached
    copy = mlflow.MlflowClient().copy_model_version(uri, "copied")
    plugins.describe(f"models:/copied/{copy.version}", class_names=["x", "y", "z"])
    check_notes(resolve(uri))
    assert [x.verified for x in plugins.verify(uri)] == [True]
    assert plugins.load_subject(f"models:/copied/{copy.version}").class_names == ("x", "y", "z")


def test_class_names_in_the_store_are_not_believed_without_a_tag(attached, tiny):
    """The hole: without the tag, reversed class names verified."""
    uri, _ = attached
    mlflow.MlflowClient().delete_model_version_tag("pinned", resolve(uri).version, tags.SUBJECT)
    path = root_of(uri) / "auditor" / "subject.json"
    notes = json.loads(path.read_text())
    notes["class_names"].reverse()
    path.write_text(json.dumps(notes, sort_keys=True, indent=1) + "\n")
    problems = {x.name: x.problem for x in plugins.verify(uri) if not x.verified}
    assert "other class names" in problems["concepts"]
    assert "no tag auditor.subject" in problems["subject.json"]


def test_class_names_of_a_pinned_model_need_their_tag_too(registry, tiny):
    uri = plugins.log_subject(tiny, "pinned-alone", experiment="tests")
    check_notes(resolve(uri))
    mlflow.MlflowClient().delete_model_version_tag("pinned-alone", "1", tags.SUBJECT)
    (problem,) = [x.problem for x in plugins.verify(uri)]
    assert "no tag auditor.subject" in problem


def test_what_was_registered_by_plain_mlflow_is_pinned_when_something_is_attached(registry, tiny, tiny_npz):
    with mlflow.start_run():
        mlflow.pytorch.log_model(
            tiny.module.eval(),
            name="m",
            input_example=np.zeros((2, *tiny.input_shape), "float32"),
            registered_model_name="plain",
            pip_requirements=["torch"],
        )
    uri = f"models:/plain/{resolve('models:/plain/latest').version}"
    subject = plugins.load_subject(uri)
    assert tags.MODEL not in resolve(uri).tags
    concepts = fit("nmf", subject, open_data(tiny_npz), layer="relu", rank=2, refits=1, max_eval=10)
    plugins.attach(concepts, uri, "concepts", subject=subject, attach_anyway=True)
    assert tags.model_tag(resolve(uri).tags).files == subject.files
    assert tags.SUBJECT in resolve(uri).tags


def test_a_model_that_changed_since_it_was_loaded_is_not_attached_to(attached, tiny_npz):
    uri, subject = attached
    subject.files = subject.files | {"MLmodel": "0" * 64}
    with pytest.raises(TamperError, match=r"MLmodel of .* has changed"):
        model_files.pin(resolve(uri), subject)


def test_a_pin_that_is_no_pin_is_an_error_and_one_of_many_files_is_short(attached):
    uri, _ = attached
    set_tag(resolve(uri), tags.MODEL, '{"digest": "0"}')
    with pytest.raises(TamperError, match=r"auditor\.model is not what was pinned"):
        plugins.load_subject(uri)
    files = {f"code/{i:05d}.py": "0" * 64 for i in range(2000)}
    tag = model_files.pinned(files)
    assert (tag.files, tag.digest) == ({}, tags.digest_of_files(files))


def test_a_link_out_of_the_model_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "model" / "MLmodel").symlink_to(tmp_path / "secret")
    with pytest.raises(TamperError, match="leads out of its own folder"):
        model_files.digests(tmp_path / "model")


def test_what_mlflow_itself_adds_to_a_model_is_no_tampering(attached):
    """Loaded through MLflow from a store on this machine, a version gets a file with its own name and number."""
    uri, _ = attached
    mlflow.pyfunc.load_model(uri)
    (root_of(uri) / "registered_model_meta").write_text("model_name: pinned\n")
    plugins.load_subject(uri)
    assert [x.problem for x in plugins.verify(uri) if not x.verified] == []
