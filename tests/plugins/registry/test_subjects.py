"""Subjects in the registry: exported and pickled modules, frozen batches and free sizes, and ``subject.json``."""

from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from torch import nn

from auditor import plugins
from auditor.errors import ModelError, OptionError
from auditor.plugins.registry.location import resolve
from tests.other_device import ELSEWHERE, other_device

MODEL = "models:/digits/1"


def test_subject_json_is_verified_and_described(registry, digits, tmp_path):
    plugins.log_subject(digits, "described", experiment="tests")
    uri = "models:/described/1"
    names = [f"digit {i}" for i in range(10)]
    plugins.describe(uri, class_names=names, mean=[0.1], std=[0.5])
    subject = plugins.load_subject(uri)
    assert subject.class_names == tuple(names)
    assert (subject.preprocessing.mean, subject.preprocessing.std) == ((0.1,), (0.5,))
    with pytest.raises(OptionError, match="10 outputs, got 2 class names"):
        plugins.describe(uri, class_names=["a", "b"])
    assert plugins.verify(uri) == []
    (path,) = (Path(resolve(uri).root.removeprefix("file://")) / "auditor" / "subjects").iterdir()
    path.write_text(path.read_text().replace("0.1", "0.2"))
    assert [x.name for x in plugins.verify(uri)] == ["subject.json"]


def test_a_model_is_loaded_to_the_device_that_is_named(registry, digits, images, monkeypatch):
    plugins.log_subject(digits, "elsewhere", experiment="tests")
    with torch.no_grad():
        expected = plugins.load_subject("models:/elsewhere/1").logits(images)
    monkeypatch.setattr("auditor.subject.device.chosen_device", lambda: ELSEWHERE)
    with other_device(), torch.no_grad():
        subject = plugins.load_subject("models:/elsewhere/1")
        assert subject.device == ELSEWHERE
        torch.testing.assert_close(subject.logits(images).cpu(), expected)


def test_pickled_modules_only_when_allowed(registry, digits, images):
    with mlflow.start_run():
        mlflow.pytorch.log_model(
            nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
            name="p",
            serialization_format="pickle",
            registered_model_name="pickled",
            input_example=np.zeros((2, 1, 8, 8), "float32"),
            pip_requirements=["torch"],
        )
    with pytest.raises(ModelError, match="stored as a pickle, which can run any code"):
        plugins.load_subject("models:/pickled/1")
    subject = plugins.load_subject("models:/pickled/1", allow_pickle=True)
    assert subject.logits(images).shape == (len(images), 10)


def test_a_batch_frozen_at_one_still_works(registry, digits, images, digits_data):
    """MLflow exports a batch of one as constant; the subject then runs images one by one."""
    from auditor import fit

    with mlflow.start_run():
        mlflow.pytorch.log_model(
            digits.module.eval(),
            name="m",
            input_example=np.zeros((1, 1, 8, 8), "float32"),
            registered_model_name="frozen",
            pip_requirements=["torch"],
        )
    subject = plugins.load_subject("models:/frozen/1")
    assert subject.max_batch == 1
    torch.testing.assert_close(subject.logits(images), digits.logits(images), rtol=1e-4, atol=1e-4)
    from auditor import open_data

    e = fit("nmf", subject, open_data("sklearn:digits", limit=40), rank=4, refits=1)
    assert all(x.gap() < 1e-6 for x in e.explain(subject, images))


FAMILIES = ["resnet18", "vgg11", "squeezenet1_1", "mobilenet_v3_small", "vit_b_16"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_torchvision_families_through_the_registry(registry, name, tmp_path):
    """Registered by plain MLflow, not by us: the same layers, activations and explanations as in memory."""
    import torchvision

    from auditor import Subject, fit, open_data

    size = 224 if name == "vit_b_16" else 64
    torch.manual_seed(0)
    net = getattr(torchvision.models, name)(weights=None, num_classes=7).eval()
    if name == "vit_b_16":
        nn.init.normal_(net.heads.head.weight, std=0.1)
    memory = Subject(net, input_shape=(3, size, size))
    with mlflow.start_run():
        mlflow.pytorch.log_model(
            net,
            name=name,
            input_example=np.zeros((2, 3, size, size), "float32"),
            registered_model_name=name,
            pip_requirements=["torch"],
        )
    subject = plugins.load_subject(f"models:/{name}/1")
    assert not subject.identity.differences(memory.identity)
    layer = memory.default_layer()
    assert subject.default_layer() == layer
    x = torch.rand(2, 3, size, size)
    with torch.no_grad():
        (a, za), (b, zb) = memory.run(x, [layer]), subject.run(x, [layer])
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(za[layer], zb[layer], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(subject.forward_from(layer, zb[layer]), b, rtol=1e-4, atol=1e-4)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", images=rng.integers(0, 255, (12, size, size, 3), dtype=np.uint8))
    e = fit("nmf", subject, open_data(tmp_path / "x.npz"), rank=4, refits=1, batch_size=4, max_iter=40)
    assert all(item.gap() < 1e-4 for item in e.explain(subject, x))
    assert [i.gap() < 1e-4 for i in e.explain(memory, x)] == [True, True]


def test_a_model_for_any_size_needs_one_to_be_given(registry):
    """Exported with free height and width: the size is asked for once, then travels with the version."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()
    with mlflow.start_run():
        mlflow.pytorch.log_model(
            net,
            name="m",
            signature=ModelSignature(inputs=Schema([TensorSpec(np.dtype("float32"), (-1, 1, -1, -1))])),
            input_example=np.zeros((2, 1, 20, 24), "float32"),
            registered_model_name="anysize",
            pip_requirements=["torch"],
        )
    with pytest.raises(ModelError, match="its input size is not recorded; say it with `auditor describe"):
        plugins.load_subject("models:/anysize/1")
    plugins.describe("models:/anysize/1", size=[16, 18])
    assert plugins.load_subject("models:/anysize/1").input_shape == (1, 16, 18)
    assert plugins.load_subject("models:/anysize/1", size=[20]).input_shape == (1, 20, 20)


def test_the_way_to_pickles_is_closed_again(registry, digits, monkeypatch):
    import os

    variable = "MLFLOW_ALLOW_PICKLE_DESERIALIZATION"
    for before in (None, "false"):
        monkeypatch.delenv(variable, raising=False)
        if before is not None:
            monkeypatch.setenv(variable, before)
        with mlflow.start_run():
            info = mlflow.pytorch.log_model(
                nn.Linear(4, 2), name="p", serialization_format="pickle", pip_requirements=["torch"]
            )
        with pytest.raises(ModelError, match="its input size is not recorded"):  # after the pickle was loaded
            plugins.load_subject(info.model_uri, allow_pickle=True)
        assert os.environ.get(variable) == before
        monkeypatch.setenv(variable, "true")
        with pytest.raises(ModelError, match="its input size is not recorded"):
            plugins.load_subject(info.model_uri)


def test_folders_that_hold_no_such_model_are_refused(registry, tmp_path):
    with pytest.raises(ModelError, match="there is no MLmodel file at its source"):
        plugins.load_subject(str(tmp_path))
    (tmp_path / "MLmodel").write_text("flavors: {sklearn: {}, python_function: {}}")
    with pytest.raises(
        ModelError, match="want an MLflow model of flavor pytorch, transformers or onnx, got python_function, sklearn"
    ):
        plugins.load_subject(str(tmp_path))
    (tmp_path / "MLmodel").write_text("flavors: {pytorch: {model_data: data}}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "model.pt2").write_bytes(b"PK no archive")
    with pytest.raises(ModelError, match=r"model .*: "):
        plugins.load_subject(str(tmp_path))


def test_describe_keeps_what_is_not_given_and_refuses_names_twice(registry, tiny):
    uri = plugins.log_subject(tiny, "kept-notes", experiment="tests")
    before = plugins.describe(uri)
    assert before == {**tiny.describe(), "output_evidence": "the model's outputs are logits", "changed": []}
    after = {**before, "changed": ["preprocessing"]}
    assert plugins.describe(uri, mean=[0.25]) == {**after, "mean": [0.25]}
    assert plugins.describe(uri, resize="crop") == {**after, "mean": [0.25], "resize": "crop"}
    with pytest.raises(OptionError, match="class names must differ"):
        plugins.describe(uri, class_names=["a", "b", "a"])
    with pytest.raises(ModelError, match=r"does not run on images of shape \(1, 20, 20\)"):
        plugins.load_subject(uri, size=[20])


def test_a_missing_file_is_called_missing_and_no_pickle(registry, tiny, tmp_path):
    import shutil

    uri = plugins.log_subject(tiny, "whole", experiment="tests")
    folder = tmp_path / "model"
    shutil.copytree(resolve(uri).root.removeprefix("file://"), folder)
    (folder / "data" / "model.pt2").unlink()
    with pytest.raises(ModelError, match=r"neither data/model\.pt2 nor data/model\.pth; restore them") as error:
        plugins.load_subject(str(folder))
    assert "pickle" not in str(error.value)
