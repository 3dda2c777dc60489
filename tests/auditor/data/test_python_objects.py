"""Data objects: every form is the same images, labels and digest; what cannot be replayed or read is said."""

import io

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchvision import transforms
from torchvision.datasets import VisionDataset

from auditor import AuditConfig, audit, compare, fit, open_data
from auditor.data.image_items import Normalisation
from auditor.errors import DataError, OptionError
from auditor.plugins import ImageDataset

BYTES = np.random.default_rng(0).integers(0, 256, (40, 13, 17), dtype=np.uint8)
FLOATS = BYTES[:, None].astype("float32") / 255
LABELS = np.random.default_rng(1).integers(0, 3, 40)
NAMES = ["a", "b", "c"]
PILS = [Image.fromarray(image) for image in BYTES]
TENSORS = TensorDataset(torch.from_numpy(FLOATS), torch.from_numpy(LABELS))


class Pictures(Dataset):
    """A map-style data set of PIL images, or of what ``transform`` makes of them."""

    def __init__(self, transform=None, form=tuple):
        self.transform, self.form = transform, form

    def __len__(self):
        return len(PILS)

    def __getitem__(self, i):
        if not 0 <= i < len(PILS):
            raise IndexError(i)
        image = PILS[i] if self.transform is None else self.transform(PILS[i])
        return self.form((image, int(LABELS[i])))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(torch.from_numpy(FLOATS), LABELS.tolist(), strict=True))


class Vision(VisionDataset):
    """As torchvision's own: classes and targets beside the images."""

    classes = (("c", "sea"), ("a", "ay"), ("b", "bee"))
    targets = tuple(int(n + 1) % 3 for n in LABELS)

    def __len__(self):
        return len(PILS)

    def __getitem__(self, i):
        return self.transform(PILS[i]) if self.transform else PILS[i], self.targets[i]


def as_mapping(item):
    return dict(zip(("name", "image", "label"), ("x", *item), strict=True))


def png(image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def paths(folder):
    for i, image in enumerate(PILS):
        image.save(folder / f"{i:02d}.png")
    return sorted(folder.iterdir())


FORMS = {
    "arrays": lambda: (FLOATS, LABELS),
    "bytes of grey": lambda: (BYTES, LABELS.tolist()),
    "channels last": lambda: (BYTES[..., None], LABELS),
    "tensors": lambda: (torch.from_numpy(FLOATS), torch.from_numpy(LABELS)),
    "half precision": lambda: (torch.from_numpy(FLOATS).half(), LABELS),
    "one hot": lambda: (FLOATS, np.eye(3)[LABELS]),
    "TensorDataset": lambda: TENSORS,
    "loader of tensors": lambda: DataLoader(TENSORS, batch_size=7),
    "shuffled loader": lambda: DataLoader(TENSORS, batch_size=7, shuffle=True, drop_last=True),
    "map-style": Pictures,
    "map-style of mappings": lambda: Pictures(form=as_mapping),
    "loader of tensors made": lambda: DataLoader(Pictures(transforms.ToTensor(), as_mapping), batch_size=6),
    "own collate": lambda: DataLoader(
        Pictures(), batch_size=4, collate_fn=lambda items: list(zip(*items, strict=True))
    ),
    "collate to lists": lambda: DataLoader(Pictures(form=as_mapping), batch_size=4, collate_fn=list),
    "own batches": lambda: DataLoader(Pictures(transforms.ToTensor()), batch_sampler=BatchSampler(range(40), 9, False)),
    "iterable-style": Stream,
    "loader of iterable": lambda: DataLoader(Stream(), batch_size=11),
    "loader of single items": lambda: DataLoader(Stream(), batch_size=None),
    "generator of batches": lambda: iter(DataLoader(TENSORS, batch_size=8)),
    "Subset": lambda: Subset(TENSORS, range(40)),
    "two sets as one": lambda: ConcatDataset([Subset(Pictures(), range(10)), Subset(Pictures(), range(10, 40))]),
    "list of pairs": lambda: list(zip(PILS, LABELS, strict=True)),
    "images and labels": lambda: (PILS, LABELS),
    "encoded files": lambda: ([png(image) for image in PILS], LABELS),
    "frame": lambda: pd.DataFrame({"n": range(40), "picture": PILS, "Label": LABELS}),
    "frame of files": lambda: pd.DataFrame({"image": [{"bytes": png(i), "path": None} for i in PILS], "y": LABELS}),
    "ImageDataset": lambda: ImageDataset(FLOATS, LABELS),
}


def read(data, subject, size=16):
    batches = list(data.batches(subject, size))
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches]).tolist()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_images_and_labels_each_time(tiny, form):
    data = open_data(FORMS[form]())
    assert len(data) == 40
    for size in (16, 64):
        images, labels = read(data, tiny, size)
        np.testing.assert_allclose(images.numpy(), FLOATS, atol=5e-4 if form == "half precision" else 1e-6)
        assert labels == LABELS.tolist()
    assert data.digest == open_data(FORMS[form]()).digest
    some = data.only(data.draw(6))
    assert len(some) == 6
    assert sorted(read(some, tiny)[1]) == [0, 0, 1, 1, 2, 2]  # labels are known, so a draw is spread over them


@pytest.mark.parametrize("form", ["arrays", "loader of tensors", "ImageDataset", "TensorDataset"])
def test_arrays_have_the_digest_of_the_same_npz(form, tmp_path):
    np.savez(tmp_path / "x.npz", images=FLOATS, labels=LABELS)
    assert open_data(FORMS[form]()).digest == open_data(tmp_path / "x.npz").digest


def test_loaders_have_the_digest_of_their_data_set_whatever_their_batches():
    digests = {open_data(x).digest for x in (Pictures(), DataLoader(Pictures(), 3), DataLoader(Pictures(), 9, True))}
    assert len(digests) == 1
    PILS[20].putpixel((3, 3), PILS[20].getpixel((3, 3)) ^ 1)
    try:
        assert open_data(Pictures()).digest not in digests
    finally:
        PILS[20].putpixel((3, 3), PILS[20].getpixel((3, 3)) ^ 1)


def test_labels_that_stand_beside_the_images_are_in_the_digest():
    letters = [NAMES[n] for n in LABELS]
    frame = pd.DataFrame({"image": PILS, "label": letters})
    other = [*letters[:20], "a" if letters[20] != "a" else "b", *letters[21:]]
    sources = ((PILS, letters), (PILS, other), (PILS, [x.upper() for x in letters]), (PILS, LABELS), PILS)
    assert len({open_data(source).digest for source in sources}) == len(sources)
    assert open_data(frame).digest == open_data((PILS, letters)).digest
    before, after = open_data(Pictures(form=lambda x: (x[0], float(x[1]))), limit=9), open_data(Pictures(), limit=9)
    _ = len(before), after.labels  # whatever is asked first, the digest is the same
    assert before.digest == open_data(Pictures(form=lambda x: (x[0], float(x[1]))), limit=9).digest
    assert after.content_digest == open_data(Pictures()).content_digest


def test_images_without_labels(tiny, tmp_path):
    for source in (
        FLOATS,
        torch.from_numpy(FLOATS),
        PILS,
        list(FLOATS),
        (PILS, None),
        TensorDataset(torch.from_numpy(FLOATS)),
    ):
        images, labels = read(open_data(source), tiny)
        np.testing.assert_allclose(images.numpy(), FLOATS, atol=1e-6)
        assert labels == [-1] * 40
    files = paths(tmp_path)
    for source in (files, [str(file) for file in files]):
        data = open_data(source)
        assert next(data.batches(tiny, 2)).ids == [str(files[0]), str(files[1])]
        assert data.image_size(str(files[3])) == (17, 13)
        np.testing.assert_allclose(read(data, tiny)[0].numpy(), FLOATS, atol=1e-6)


def test_class_names_follow_and_match_the_model(tiny, caplog):
    data = open_data(Vision("."))
    assert data.class_names == ("c, sea", "a, ay", "b, bee")
    assert read(open_data(DataLoader(Vision("."), 8)), tiny)[1] == LABELS.tolist()
    assert read(open_data(Subset(Vision("."), [5, 3])), tiny)[1] == LABELS[[5, 3]].tolist()
    named = open_data((PILS, [NAMES[n] for n in LABELS]))
    assert (named.class_names, read(named, tiny)[1]) == (("a", "b", "c"), LABELS.tolist())
    frame = pd.DataFrame({"image": PILS, "kind": pd.Categorical.from_codes(LABELS, ["a", "b", "c"])})
    assert read(open_data(frame, label="kind"), tiny)[1] == LABELS.tolist()
    assert read(open_data(frame), tiny)[1] == [-1] * 40  # no column is called as labels are
    assert read(open_data(frame, label="kind", labels={"a": "b", "b": "a"}), tiny)[1] == [(1, 0, 2)[n] for n in LABELS]


def test_several_labels_per_image(tiny):
    sets = [[0, 2], [1], [], [2]]
    data = open_data([{"img": PILS[i], "label": sets[i]} for i in range(4)])
    (batch,) = data.batches(tiny)
    assert batch.label_sets.int().tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert batch.labels.tolist() == [-1, 1, -1, 2]
    (batch,) = open_data((FLOATS[:3], [[1, 1, 0], [0, 0, 1], [0, 0, 0]])).batches(tiny)
    assert batch.label_sets.int().tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_hugging_face_data_sets(tiny, caplog):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"photo": datasets.Image(), "label": datasets.ClassLabel(names=["b", "a", "c"])})
    numbers = [(1, 0, 2)[n] for n in LABELS]
    source = datasets.Dataset.from_dict({"photo": PILS, "label": numbers}, features=features)
    data = open_data(source)
    assert data.class_names == ("b", "a", "c")
    images, labels = read(data, tiny)
    np.testing.assert_allclose(images.numpy(), FLOATS, atol=1e-6)
    assert labels == LABELS.tolist()
    normalised = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5], [0.25])])
    changed = source.with_transform(
        lambda rows: {"pixel_values": [normalised(x) for x in rows["photo"]], "label": rows["label"]}
    )
    images, labels = read(open_data(changed, mean=0.5, std=0.25), tiny)
    np.testing.assert_allclose(images.numpy(), FLOATS, atol=1e-6)
    assert labels == LABELS.tolist()
    streamed = open_data(source.to_iterable_dataset())
    assert read(streamed, tiny)[1] == numbers  # a stream does not say the names of its numbers
    assert "has no length, so it is read once" in caplog.text
    with pytest.raises(DataError, match="several data sets; give one of train, test"):
        open_data(datasets.DatasetDict({"train": source, "test": source}))
    with pytest.raises(DataError, match=r"no image 'picture' in its items; they have photo, label"):
        open_data(source, image="picture")


def test_a_normalize_among_the_transforms_is_undone(tiny):
    steps = [transforms.Resize((13, 17)), transforms.ToTensor(), transforms.Normalize([0.4], [0.2])]
    for source in (
        Pictures(transforms.Compose(steps)),
        DataLoader(Vision(".", transform=transforms.Compose(steps)), 8),
    ):
        np.testing.assert_allclose(read(open_data(source), tiny)[0].numpy(), FLOATS, atol=1e-6)
    applied = (torch.from_numpy(FLOATS) - 0.4) / 0.2
    with pytest.raises(DataError, match=r"float images must lie in \[0, 1\].*open_data\(…, mean=…, std=…\) does it"):
        read(open_data(applied), tiny)
    np.testing.assert_allclose(read(open_data(applied, mean=[0.4], std=[0.2]), tiny)[0].numpy(), FLOATS, atol=1e-6)
    assert open_data(applied, mean=0.4, std=0.2).digest != open_data(applied, mean=0.4, std=0.3).digest


@pytest.mark.parametrize("shape", [(3, 13, 17), (13, 17, 3), (1, 13, 17)])
def test_undoing_is_the_inverse_of_normalize(shape):
    x = np.random.default_rng(0).random((4, *shape))
    mean, std = np.array([0.1, 0.5, 0.9]), np.array([0.2, 1.5, 0.7])
    if shape[0] == 1:
        mean, std = mean[:1], std[:1]
    place = (-1, 1, 1) if shape[0] in (1, 3) else (-1,)
    done = (x - mean.reshape(place)) / std.reshape(place)
    np.testing.assert_allclose(Normalisation.of(mean, std).undone(done), x, atol=1e-6)
    with pytest.raises(DataError, match="mean and std of 2 channels"):
        Normalisation.of([0.1, 0.2], 1).undone(done)
    with pytest.raises(OptionError, match="std above 0"):
        Normalisation.of(0.1, 0.0)


def test_random_transforms_are_said_and_one_reading_can_be_kept(tiny, caplog):
    flips = transforms.Compose([transforms.RandomErasing(p=0.01), transforms.ToTensor()])
    with pytest.raises(DataError, match="its transforms hold RandomErasing, so its images are not the same each time"):
        open_data(DataLoader(Pictures(flips), 4))

    def noisy(image):
        return transforms.functional.to_tensor(image) * torch.rand(1)

    state = torch.random.get_rng_state()
    with pytest.raises(DataError, match="image 0 differs between two readings"):
        open_data(Pictures(noisy))
    assert torch.equal(state, torch.random.get_rng_state())
    data = open_data(Pictures(noisy), keep=True)
    first, labels = read(data, tiny)
    assert torch.equal(first, read(data, tiny, 7)[0])
    assert labels == LABELS.tolist()
    assert "is read once, as asked: 40 images" in caplog.text


def test_samplers_that_draw_give_the_images_they_are_about(tiny, caplog):
    chosen = DataLoader(TENSORS, 4, sampler=SubsetRandomSampler([9, 2, 30]))
    assert read(open_data(chosen), tiny)[1] == LABELS[[2, 9, 30]].tolist()
    assert "draws other images" not in caplog.text
    drawn = open_data(DataLoader(TENSORS, 4, sampler=WeightedRandomSampler(torch.ones(40), 25)))
    assert len(drawn) == 25
    assert "its sampler draws other images each time; 25 images of one draw are used" in caplog.text


def test_streams_end_at_the_limit_and_at_the_memory(tiny, monkeypatch, caplog):
    def forever():
        while True:
            yield FLOATS[0], 1

    assert read(open_data(forever(), limit=5), tiny)[1] == [1] * 5
    monkeypatch.setattr("auditor.data.python_objects.MOST_KEPT", 10 * FLOATS[0].nbytes)
    with pytest.raises(DataError, match=r"it has no length, and its first 11 images take .* give a limit"):
        open_data(forever())
    with pytest.raises(DataError, match="an iterator that was read before is empty"):
        open_data(iter([]))


def test_workers_read_the_same(tiny):
    data = open_data(DataLoader(Pictures(transforms.ToTensor()), 4, num_workers=1))
    assert data.digest == open_data(Pictures(transforms.ToTensor())).digest
    assert read(data, tiny)[1] == LABELS.tolist()


class NoLength(Dataset):
    def __getitem__(self, i):
        return PILS[i]


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        (lambda: DataLoader([{"text": "a", "label": 1}] * 3), {}, "its items have no image; they have text, label"),
        (lambda: DataLoader([("a", 1)] * 3), {}, r"its items have no image; they are \(str, int\)"),
        (lambda: [1, 2, 3], {}, r"item 0 is no image \(int\)"),
        (lambda: ["no/such/file.png"], {}, "item 0 'no/such/file.png' is no image"),
        (list, {}, "the list holds no image"),
        (lambda: (FLOATS, LABELS[:5]), {}, "40 images and 5 labels"),
        (lambda: (PILS, LABELS[:5]), {}, "40 images and 5 labels"),
        (lambda: (FLOATS, LABELS + 0.5), {}, "labels must be class numbers from 0, names, or rows of 0 and 1"),
        (lambda: (FLOATS, LABELS - 5), {}, "labels must be class numbers from 0"),
        (lambda: np.zeros((3, 4)), {}, "want images as numbers of shape"),
        (NoLength, {}, "must say its length"),
        (lambda: pd.DataFrame({"a": [1]}), {}, r"no column holds images; name it: open_data\(…, image=…\)"),
        (lambda: pd.DataFrame({"a": PILS, "b": PILS}), {}, "2 columns may hold images"),
        (lambda: pd.DataFrame({"a": PILS}), {"label": "b"}, "label column b: the table has no such column"),
        (lambda: object(), {}, "want a DataLoader, a data set, arrays or tensors"),
        (lambda: "sklearn:digits", {"mean": 0.5}, "are for objects of Python, not for a name"),
        (lambda: Subset(Pictures(), []), {}, "it is empty"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence_when_it_is_opened(source, options, sentence):
    with pytest.raises(DataError, match=sentence) as error:
        open_data(source(), **options)
    assert "\n" not in str(error.value)


def test_labels_out_of_the_models_range(tiny):
    with pytest.raises(DataError, match="labels must be 0 to 2 like the model's classes, got 5"):
        audit(tiny, (FLOATS, LABELS + 3))


def test_broken_files_of_a_list_are_skipped_and_counted(tiny, tmp_path, caplog):
    files = paths(tmp_path)
    files[4].write_text("hello")
    data = open_data((files, LABELS))
    images, labels = read(data, tiny)
    assert len(images) == 39
    assert labels == [n for i, n in enumerate(LABELS.tolist()) if i != 4]
    assert "1 of 40 images could not be read" in caplog.text
    with pytest.raises(DataError, match=r"04\.png is broken"):
        read(open_data(files, strict=True), tiny)


@pytest.mark.parametrize("form", ["loader of tensors", "map-style", "arrays"])
def test_fit_audit_compare_and_explain_take_objects(tiny, form):
    source = FORMS[form]()
    concepts = fit("nmf", tiny, source, layer="relu", rank=2, refits=1, max_eval=10)
    assert concepts.data_digest_ == open_data(source).digest
    said = audit(tiny, source, {}, AuditConfig(images=20, reliance=False, layers=False))
    assert said.data["n"] == 40
    assert compare(tiny, tiny, source, layer="relu", rank=2, refits=5, max_eval=10).n_images == 40
    explained = concepts.explain(tiny, source)
    assert len(explained) == 40
    assert explained[3].target_value == pytest.approx(concepts.explain(tiny, PILS[3])[0].target_value, abs=1e-5)
