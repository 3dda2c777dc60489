"""Flavors of MLflow: transformers, ONNX and TorchScript models are subjects like others; nothing is unpickled."""

import json
import shutil
import zipfile
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from auditor import Subject, fit, plugins
from auditor.errors import ModelError, TamperError

CHANNELS = 5  # as of satellites


def net(channels=CHANNELS):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(channels, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(6, 3),
        ).eval()  # fmt: skip


def images(n=40, channels=CHANNELS):
    return np.random.default_rng(0).random((n, channels, 16, 18)).astype("float32")


def signature(channels=CHANNELS):
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    return ModelSignature(inputs=Schema([TensorSpec(np.dtype("float32"), (-1, channels, 16, 18))]))


def explained(subject, layer):
    """Concepts of a layer add up to the logit, and the model answers as it did before."""
    concepts = fit("nmf", subject, images(), layer=layer, rank=2, refits=1, max_eval=10)
    for explanation in concepts.explain(subject, images(3)):
        assert explanation.gap() < 1e-3
    return concepts


def test_a_torchscript_model_is_read_without_unpickling_and_its_layers_explain(registry, tmp_path):
    script = torch.jit.trace(net(), torch.rand(2, CHANNELS, 16, 18))
    path = tmp_path / "m"
    mlflow.pytorch.save_model(
        script, str(path), signature=signature(), serialization_format="pickle", pip_requirements=["torch"]
    )
    subject = plugins.load_subject(str(path))
    assert subject.input_shape == (CHANNELS, 16, 18)
    x = torch.from_numpy(images(5))
    torch.testing.assert_close(subject.logits(x), net()(x), rtol=1e-4, atol=1e-5)
    explained(subject, subject.default_layer())


class Saves(nn.Module):
    def forward(self, x):
        return torch.from_file("/etc/hostname", False, 3)[None] + x.mean((1, 2, 3))[:, None]


def test_torchscript_that_touches_files_is_refused(registry, tmp_path):
    script = torch.jit.script(Saves())
    path = tmp_path / "m"
    mlflow.pytorch.save_model(
        script, str(path), signature=signature(), serialization_format="pickle", pip_requirements=["torch"]
    )
    with pytest.raises(TamperError, match="may read or write files"):
        plugins.load_subject(str(path))


@pytest.mark.parametrize(
    "way",
    [
        lambda name, code: (name, code + b"\n# torch . save (1, 'x')\n"),
        lambda name, code: (name, code + b"\n# ops.\\\n image.decode_png(1)\n"),
        lambda name, code: (name.replace("/code/", "/CODE/"), code + b"\n# from_file\n"),
        lambda name, code: (name[:-3] + ".PY", code + b"\n# write_file\n"),
    ],
)
def test_torchscript_cannot_hide_what_it_calls(registry, tmp_path, way):
    """torch finds records without regard to case and reads over spaces and ends of lines."""
    path = tmp_path / "m"
    mlflow.pytorch.save_model(
        torch.jit.trace(net(), torch.rand(2, CHANNELS, 16, 18)), str(path), signature=signature(),
        serialization_format="pickle", pip_requirements=["torch"],
    )  # fmt: skip
    file = path / "data" / "model.pth"
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    main = next(name for name in records if name.endswith("code/__torch__.py") or "/code/__torch__" in name)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("model/code/plain.py", b"")
        for name, content in records.items():
            archive.writestr(*(way(name, content) if name == main else (name, content)))
    with pytest.raises(TamperError, match="may read or write files"):
        plugins.load_subject(str(path))


def test_a_pickle_that_looks_like_torchscript_is_not_unpickled(registry, tmp_path):
    """torch.jit's reader takes tensors and plain values; a class to call is an error."""
    path = tmp_path / "m"
    mlflow.pytorch.save_model(
        torch.jit.trace(net(), torch.rand(2, CHANNELS, 16, 18)), str(path), signature=signature(),
        serialization_format="pickle", pip_requirements=["torch"],
    )  # fmt: skip
    flag, file = tmp_path / "ran", path / "data" / "model.pth"
    evil = b"cos\nsystem\n(S'touch " + str(flag).encode() + b"'\ntR."
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(name, evil if name.endswith("/data.pkl") else content)
    with pytest.raises(ModelError, match="torch cannot open its TorchScript"):
        plugins.load_subject(str(path), allow_pickle=True)
    assert not flag.exists()


def test_an_onnx_model_is_audited_as_a_torch_module(registry, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnx2torch")
    file = tmp_path / "m.onnx"
    torch.onnx.export(
        net(), (torch.rand(2, CHANNELS, 16, 18),), str(file), dynamo=False, input_names=["x"],
        dynamic_axes={"x": {0: "n"}},
    )  # fmt: skip
    path = tmp_path / "m"
    mlflow.onnx.save_model(onnx.load(str(file)), str(path), save_as_external_data=False, pip_requirements=["onnx"])
    subject = plugins.load_subject(str(path))
    assert subject.input_shape == (CHANNELS, 16, 18)
    x = torch.from_numpy(images(5))
    torch.testing.assert_close(subject.logits(x), net()(x), rtol=1e-4, atol=1e-5)
    explained(subject, "3/Relu")
    model = onnx.load(str(file))
    onnx.save_model(
        model, str(path / "model.onnx"), save_as_external_data=True, location="outside.bin", size_threshold=0
    )
    with pytest.raises(ModelError, match=r"its weights lie outside model\.onnx; save it as one file"):
        plugins.load_subject(str(path))


@pytest.fixture(scope="module")
def vit():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        id2label={0: "cat", 1: "dog", 2: "eel"}, label2id={"cat": 0, "dog": 1, "eel": 2},
    )  # fmt: skip
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4]
    )
    return transformers.ViTForImageClassification(config).eval(), processor


@pytest.fixture(scope="module")
def pipeline_folder(vit, tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("pipeline") / "m"
    pipe = transformers.pipeline("image-classification", model=vit[0], image_processor=vit[1], device="cpu")
    mlflow.transformers.save_model(pipe, str(folder), pip_requirements=["transformers"])
    return folder


def test_a_transformers_pipeline_brings_processor_and_class_names(registry, vit, pipeline_folder):
    subject = plugins.load_subject(str(pipeline_folder))
    assert subject.input_shape == (3, 32, 32)
    assert subject.class_names == ("cat", "dog", "eel")
    assert subject.preprocessing.mean == pytest.approx((0.5, 0.4, 0.3))
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    with torch.no_grad():
        theirs = vit[0](**vit[1](photo, return_tensors="pt")).logits
    torch.testing.assert_close(subject.logits(subject.pixels(photo)), theirs, rtol=1e-4, atol=1e-5)
    assert any(layer.explainable for layer in subject.layers())


def test_what_a_transformers_model_may_not_be(registry, pipeline_folder, tmp_path):
    def changed(name, change):
        folder = tmp_path / name
        shutil.copytree(pipeline_folder, folder)
        change(folder)
        with pytest.raises((ModelError, TamperError)) as error:
            plugins.load_subject(str(folder))
        return str(error.value)

    def pickled(folder):
        (weights,) = folder.rglob("*.safetensors")
        weights.rename(weights.with_name("pytorch_model.bin"))

    def other_task(folder):
        (folder / "MLmodel").write_text(
            (folder / "MLmodel").read_text().replace("image-classification", "text-generation")
        )

    def outside(folder):
        (folder / "MLmodel").write_text(
            (folder / "MLmodel").read_text().replace("model_binary: model", "model_binary: ../..")
        )

    def rescaled(folder):
        (file,) = folder.rglob("preprocessor_config.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rescale_factor": 1 / 127.5}))

    assert "its weights are no safetensors but a pickle" in changed("pickled", pickled)
    assert "want a transformers model for image-classification, got text-generation" in changed("task", other_task)
    assert "names a file outside the model" in changed("outside", outside)
    assert "rescales by 0.00784314" in changed("rescaled", rescaled)


class Answers(nn.Module):
    """A model that answers with a mapping, a tuple, or a mapping without a name for its logits."""

    def __init__(self, form):
        super().__init__()
        self.net, self.form = net(1), form

    def forward(self, x):
        z = self.net(x)
        return {
            "tuple": (z, x),
            "logits": {"features": x, "logits": z},
            "one": {"whatever": z},
            "odd": {"a": z, "b": x},
        }[self.form]


@pytest.mark.parametrize("form", ["tuple", "logits", "one"])
def test_models_that_answer_with_more_than_a_tensor(form):
    subject = Subject(Answers(form), input_shape=(1, 16, 18), output="logits")
    x = torch.rand(2, 1, 16, 18)
    torch.testing.assert_close(subject.logits(x), net(1)(x))


def test_an_answer_without_a_name_for_logits_is_said():
    with pytest.raises(
        ModelError, match="the model must put out one tensor, got dict with a, b; name its logits one of"
    ):
        Subject(Answers("odd"), input_shape=(1, 16, 18))


def test_transparent_files_for_models_of_four_channels(tmp_path):
    subject = Subject(net(4), input_shape=(4, 16, 18))
    pixels = np.random.default_rng(0).integers(0, 256, (16, 18, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    np.testing.assert_allclose(
        subject.pixels([Image.open(tmp_path / "x.png")])[0].numpy(), pixels.transpose(2, 0, 1) / np.float32(255)
    )
    with pytest.raises(Exception, match="takes 5 channels and image files have 1, 3 or 4; give arrays"):
        Subject(net(), input_shape=(5, 16, 18)).pixels([Image.open(tmp_path / "x.png")])


def test_flavors_that_are_no_models_of_images_are_named(registry, tmp_path):
    folder = Path(tmp_path / "m")
    folder.mkdir()
    (folder / "MLmodel").write_text("flavors:\n  sklearn: {}\n")
    with pytest.raises(ModelError, match="want an MLflow model of flavor pytorch, transformers or onnx, got sklearn"):
        plugins.load_subject(str(folder))
