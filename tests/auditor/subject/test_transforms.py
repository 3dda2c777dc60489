"""Transforms of the field's libraries as preprocessing: pixel for pixel what they do, or refused in a sentence."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.models import ResNet18_Weights, ViT_B_16_Weights
from torchvision.transforms import v2

from auditor import Subject
from auditor.errors import OptionError, ShapeError
from auditor.subject.preprocessing import Preprocessing, from_pil
from auditor.subject.transforms import normalisation_in, random_step, steps_of

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = [(61, 47), (40, 90), (64, 64), (33, 200)]


def photo(size):
    width, height = size
    rng = np.random.default_rng(width)
    coarse = rng.integers(0, 256, (height // 6 + 2, width // 6 + 2, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def net(channels=3, classes=4):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(channels, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
            torch.nn.Linear(4, classes),
        )  # fmt: skip


def same_as(theirs, given, tolerance=1e-6, sizes=SIZES):
    """The model gets from our pixels what it gets from their transforms, for every size of photo."""
    subject = Subject(net(), preprocessing=given)
    for size in sizes:
        image = photo(size)
        ours = subject.normalise(subject.pixels(image))[0]
        wanted = theirs(image)
        assert ours.shape == wanted.shape
        assert float((ours - wanted).abs().max()) <= tolerance  # of values of about 2
        assert float(wanted.std()) > 0.1


CHAINS = {
    "stretched": [transforms.Resize((32, 48)), transforms.ToTensor()],
    "centre of a larger one": [transforms.Resize(40), transforms.CenterCrop(32), transforms.ToTensor()],
    "bicubic": [
        transforms.Resize(39, transforms.InterpolationMode.BICUBIC), transforms.CenterCrop(32), transforms.ToTensor(),
    ],
    "squashed, then cropped": [transforms.Resize((40, 40)), transforms.CenterCrop(32), transforms.ToTensor()],
    "as large as the crop": [transforms.Resize(32), transforms.CenterCrop((32, 32)), transforms.ToTensor()],
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("normalised", [True, False])
def test_torchvisions_chains(name, normalised):
    chain = transforms.Compose([*CHAINS[name], *([transforms.Normalize(MEAN, STD)] if normalised else [])])
    same_as(chain, chain)


def test_torchvisions_second_version_and_presets():
    chain = v2.Compose([
        v2.Resize(40), v2.CenterCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD),
    ])  # fmt: skip
    on_pil = transforms.Compose([*CHAINS["centre of a larger one"], transforms.Normalize(MEAN, STD)])
    same_as(on_pil, chain)
    preset = transforms._presets.ImageClassification(crop_size=32, resize_size=38)
    same_as(preset, preset)


@pytest.mark.parametrize("weights", [ResNet18_Weights.IMAGENET1K_V1, ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1])
def test_weights_bring_their_size_and_class_names(weights):
    steps = steps_of(weights)
    own = weights.transforms()
    assert steps.input_shape == (3, own.crop_size[0], own.crop_size[0])
    assert steps.class_names == tuple(weights.meta["categories"])
    pre = Preprocessing.of(steps.input_shape, steps.mean, steps.std, steps.resize)
    image = photo((600, 451))
    ours = pre.normalise(torch.from_numpy(from_pil(image, pre)))
    torch.testing.assert_close(ours, own(image), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("crop_pct", "mode", "interpolation"),
    [(0.875, "center", "bicubic"), (1.0, "center", "bilinear"), (0.9, "squash", "bilinear")],
)
def test_timms_data_config(crop_pct, mode, interpolation):
    config = {"input_size": (3, 32, 32), "interpolation": interpolation, "mean": MEAN, "std": STD}
    config |= {"crop_pct": crop_pct, "crop_mode": mode}
    data = pytest.importorskip("timm").data
    same_as(data.create_transform(**config), config)
    side = math.floor(32 / crop_pct)
    rule = {"center": f"crop-{side}", "squash": f"stretch-{side}"}[mode]
    assert steps_of(config).resize == rule + ("-bicubic" if interpolation == "bicubic" else "")


def test_a_model_of_timm_runs_by_its_own_config():
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet10t", num_classes=5)
    subject = Subject(model, preprocessing=timm.data.resolve_model_data_config(model))
    assert subject.input_shape == (3, 176, 176)
    assert subject.n_classes == 5
    theirs = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    image = photo((300, 240))
    with torch.no_grad():
        torch.testing.assert_close(
            subject.logits(subject.pixels(image)), model.eval()(theirs(image)[None]), rtol=1e-4, atol=1e-5
        )


def processors():
    transformers = pytest.importorskip("transformers")
    return {
        "vit": transformers.ViTImageProcessor(size={"height": 32, "width": 32}),
        "convnext": transformers.ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=0.875),
        "clip": transformers.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}),
    }


@pytest.mark.parametrize("name", ["vit", "convnext", "clip"])
def test_image_processors_of_transformers(name):
    processor = processors()[name]

    def theirs(image):
        return processor(image, return_tensors="pt")["pixel_values"][0]

    # theirs may resize tensors, whose rounding differs from PIL's by a step of a byte or two, and round an odd margin
    # down where torchvision rounds to even: sizes with even margins are compared
    sizes = [(60, 40), (40, 80), (64, 64)] if name == "clip" else SIZES
    same_as(theirs, processor, tolerance=3 / 255 / min(processor.image_std), sizes=sizes)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (transforms.Compose([transforms.RandomCrop(32), transforms.ToTensor()]), "RandomCrop draws at random"),
        (transforms.Compose([transforms.Resize(32), transforms.ToTensor()]), r"Resize\(32\) keeps proportions"),
        (transforms.Compose([transforms.Pad(3), transforms.ToTensor()]), "Pad is none that is known here"),
        (transforms.Compose([transforms.Resize(40, max_size=90), transforms.CenterCrop(32)]), "max_size"),
        (transforms.Compose([transforms.Resize((40, 50)), transforms.CenterCrop(32)]), "cannot be said here"),
        (v2.Compose([v2.Resize((8, 8)), v2.ToDtype(torch.float32)]), "leaves pixels as they are"),
        ({"mean": MEAN}, "data_config with input_size, got mean"),
        ({"input_size": (3, 32, 32), "crop_mode": "border"}, "crop_mode 'border'"),
        ({"input_size": (3, 32, 32), "interpolation": "sinc"}, "interpolation 'sinc' is not known"),
        (SimpleNamespace(image_mean=MEAN, do_rescale=True, rescale_factor=1 / 127.5), "rescales by 0.00784314"),
        (SimpleNamespace(image_mean=MEAN, do_rescale=False), "does not rescale pixels"),
        (SimpleNamespace(image_mean=MEAN, do_resize=True, size={"shortest_edge": 9}), "proportions without a crop"),
        ({"input_size": (3, 32, 32), "crop_pct": 0.1}, "crop-N or stretch-N with N pixels"),
    ],
)
def test_what_cannot_be_repeated_is_refused(given, sentence):
    with pytest.raises(OptionError, match=sentence):
        Subject(net(), preprocessing=given)


def test_what_is_said_goes_before_what_is_read():
    chain = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    with pytest.raises(ShapeError, match="say the size of images"):
        Subject(net(), preprocessing=chain)
    with pytest.raises(ShapeError, match="say the size of images"):
        Subject(net())
    subject = Subject(net(), preprocessing=chain, input_shape=(3, 20, 24), std=0.5)
    assert subject.preprocessing == Preprocessing.of((3, 20, 24), MEAN, (0.5,) * 3, "stretch")
    grey = transforms.Compose([transforms.Grayscale(), transforms.Resize((9, 8)), transforms.ToTensor()])
    assert Subject(net(1), preprocessing=grey).input_shape == (1, 9, 8)
    again = Subject(net(), preprocessing=subject.preprocessing)
    assert again.preprocessing == subject.preprocessing


def test_what_is_in_transforms():
    chain = transforms.Compose([transforms.Compose([transforms.ColorJitter()]), transforms.Normalize((0.1,), (0.2,))])
    assert normalisation_in(chain) == ((0.1,), (0.2,))
    assert normalisation_in(transforms.ToTensor()) is normalisation_in(None) is None
    assert (random_step(chain), random_step(transforms.ToTensor()), random_step(None)) == ("ColorJitter", None, None)


def test_the_resize_rule_travels_with_the_model():
    subject = Subject(net(), preprocessing={"input_size": (3, 32, 32), "crop_pct": 0.8, "interpolation": "bicubic"})
    notes = subject.describe()
    assert notes["resize"] == "crop-40-bicubic"
    other = Subject(net(), input_shape=notes["input_shape"], resize=notes["resize"])
    image = photo((70, 51))
    assert torch.equal(other.pixels(image), subject.pixels(image))
    assert not torch.equal(other.pixels(image), Subject(net(), input_shape=(3, 32, 32)).pixels(image))
