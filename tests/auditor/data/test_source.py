import numpy as np
import pytest
import torch
from PIL import Image

from auditor import Subject, open_data
from auditor.errors import DataError, ShapeError
from auditor.subject.preprocessing import Preprocessing, as_pixels, from_pil

GREY = Preprocessing.of((1, 13, 17), None, None, "stretch")
RGB = Preprocessing.of((3, 13, 17), None, None, "stretch")


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.fromarray(rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8)).save(tmp_path / name / f"{i}.png")
    return tmp_path


def test_folder_streams_labels_and_names(folder):
    data = open_data(f"folder:{folder}")
    batches = list(data.batches(RGB, 4))
    assert [len(b) for b in batches] == [4, 2]
    assert batches[0].images.shape == (4, 3, 13, 17)
    assert torch.cat([b.labels for b in batches]).tolist() == [0, 0, 0, 1, 1, 1]
    assert batches[0].ids[0] == "cat/0.png"
    assert data.class_names == ("cat", "dog")
    assert 0 <= float(batches[0].images.min()) <= float(batches[0].images.max()) <= 1


def test_digest_sees_every_byte(folder, tmp_path_factory):
    first = open_data(folder).digest
    assert open_data(folder).digest == first
    path = folder / "dog" / "1.png"
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    assert open_data(folder).digest != first


def test_digest_of_arrays_sees_the_middle_row(tmp_path):
    images = np.zeros((30, 13, 17), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(30))
    np.savez_compressed(tmp_path / "same.npz", images=images, labels=np.arange(30))
    images[14, 3, 3] = 1
    np.savez(tmp_path / "b.npz", images=images, labels=np.arange(30))
    a, same, b = (open_data(tmp_path / f"{n}.npz").digest for n in ("a", "same", "b"))
    assert a == same != b


def test_broken_images_are_named_counted_and_skipped(folder, caplog):
    (folder / "cat" / "9.png").write_text("hello")
    data = open_data(folder)
    with caplog.at_level("WARNING"):
        assert sum(len(b) for b in data.batches(RGB)) == 6
        list(data.batches(RGB))
    assert [r.getMessage() for r in caplog.records] == ["1 of 7 images could not be read and were skipped: cat/9.png"]
    with pytest.raises(DataError, match=r"cat/9\.png is broken"):
        list(open_data(folder, strict=True).batches(RGB))


def test_truncated_image_is_broken(folder):
    path = folder / "cat" / "0.png"
    path.write_bytes(path.read_bytes()[:-200])
    data = open_data(folder)
    assert sum(len(b) for b in data.batches(RGB)) == 5
    assert list(data.skipped) == ["cat/0.png"]


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "CMYK", "LA", "1", "I;16", "F"])
def test_every_mode_of_image_is_read(mode, tmp_path):
    ramp = np.linspace(0, 255, 30 * 40).reshape(30, 40).astype(np.uint8)
    if mode == "I;16":
        image = Image.fromarray(ramp.astype(np.uint16) * 257)
    elif mode == "F":
        image = Image.fromarray(ramp.astype(np.float32) / 255)
    else:
        image = Image.fromarray(ramp).convert(mode)
    for pre in (GREY, RGB):
        x = from_pil(image, pre)
        assert x.shape == pre.input_shape
        assert float(x.min()) < 0.2
        assert float(x.max()) > 0.8


def test_sixteen_bit_is_not_clipped():
    image = Image.fromarray(np.full((13, 17), 32768, dtype=np.uint16))
    np.testing.assert_allclose(from_pil(image, GREY), 0.5, atol=0.01)


def test_crop_keeps_proportions():
    image = Image.new("L", (34, 13), 0)
    image.paste(255, (8, 0, 26, 13))  # the middle half is white
    crop = Preprocessing.of((1, 13, 17), None, None, "crop")
    assert from_pil(image, crop).min() > 0.9
    assert from_pil(image, GREY).min() < 0.1


@pytest.mark.parametrize(
    ("shape", "dtype", "ok"),
    [
        ((5, 13, 17), np.uint8, True),
        ((5, 13, 17, 1), np.uint8, True),
        ((5, 1, 13, 17), np.float32, True),
        ((5, 12, 17), np.uint8, False),
        ((5, 13, 17, 3), np.uint8, False),
        ((5, 221), np.uint8, False),
    ],
)
def test_array_layouts(tmp_path, shape, dtype, ok):
    np.savez(tmp_path / "x.npz", images=np.zeros(shape, dtype=dtype))
    data = open_data(tmp_path / "x.npz")
    if ok:
        (batch,) = data.batches(GREY)
        assert batch.images.shape == (5, 1, 13, 17)
        assert batch.labels.tolist() == [-1] * 5
    else:
        with pytest.raises(ShapeError, match="for this model, got"):
            list(data.batches(GREY))


def refused(spec, sentence, **options):
    with pytest.raises(DataError, match=sentence):
        list(open_data(spec, **options).batches(GREY))


def test_bad_sources_are_said(tmp_path):
    refused("/no/such/place", "no such file or folder")
    refused("sklearn:nosuch", "only image set here is sklearn:digits")
    refused("sklearn:digits?split=nosuch", "split must be one of")
    refused("torchvision:MNIST", "say where it lies")
    refused(f"torchvision:MNIST?root={tmp_path}", "neither t10k-images-idx3-ubyte nor")
    refused(f"torchvision:NoSuch?root={tmp_path}", "no data set called 'NoSuch'")
    refused(f"torchvision:CIFAR10?root={tmp_path}", "torchvision could not open it")
    refused(tmp_path, "no image file")
    (tmp_path / "x.txt").write_text("x")
    refused(tmp_path / "x.txt", "want an image folder, Parquet, Arrow, tar or an .npz")
    (tmp_path / "x.npz").write_text("x")
    refused(tmp_path / "x.npz", "not a readable .npz")
    np.savez(tmp_path / "y.npz", pictures=np.zeros((2, 13, 17)))
    refused(tmp_path / "y.npz", "want a member called images, got pictures")
    np.savez(tmp_path / "z.npz", images=np.zeros((0, 13, 17), dtype=np.uint8))
    refused(tmp_path / "z.npz", "holds no readable image")
    np.savez(tmp_path / "n.npz", images=np.full((2, 13, 17), np.nan))
    refused(tmp_path / "n.npz", "NaN or infinite")
    np.savez(tmp_path / "r.npz", images=np.full((2, 13, 17), -2.5))
    refused(tmp_path / "r.npz", r"must lie in \[0, 1\], got -2.5")
    np.savez(tmp_path / "l.npz", images=np.zeros((2, 13, 17), dtype=np.uint8), labels=np.arange(3))
    refused(tmp_path / "l.npz", "labels must be 2 integers")
    refused("sklearn:digits", "limit must be at least 1", limit=0)


def test_limit_and_batches_do_not_change_the_images():
    data = open_data("sklearn:digits", limit=10)
    pre = Preprocessing.of((1, 8, 8), None, None, "stretch")
    a, b = (torch.cat([x.images for x in data.batches(pre, n)]) for n in (3, 64))
    assert len(a) == len(data) == 10
    assert torch.equal(a, b)


def test_as_pixels_takes_the_usual_forms():
    array = np.random.default_rng(0).integers(0, 256, (13, 17, 3), dtype=np.uint8)
    image = Image.fromarray(array)
    expected = torch.from_numpy(array.transpose(2, 0, 1).astype(np.float32) / 255)[None]
    for form in (image, [image], array, array[None], expected, expected[0]):
        torch.testing.assert_close(as_pixels(form, RGB), expected)
    with pytest.raises(DataError, match="must be pixels in"):
        as_pixels(expected * 3, RGB)
    with pytest.raises(DataError, match="got str"):
        as_pixels("x.png", RGB)


def subject_of(names):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 13 * 17, len(names)))
    return Subject(net, input_shape=(3, 13, 17), class_names=names)


def labels_of(data, subject):
    batches = list(data.batches(subject, 4))
    return torch.cat([b.labels for b in batches]).tolist(), torch.cat([b.source_labels for b in batches]).tolist()


def test_labels_become_the_classes_of_the_model_by_name(folder):
    data = open_data(folder)
    assert labels_of(data, subject_of(["bird", "Dog", "CAT"])) == ([2, 2, 2, 1, 1, 1], [0, 0, 0, 1, 1, 1])
    data.check_labels(subject_of(["bird", "Dog", "CAT"]))
    assert data.foreign_labels(subject_of(["bird", "Dog", "CAT"])) is None
    assert data.labels_digest == ""


def test_labels_that_are_no_class_stay_apart_and_are_named_once(folder, caplog):
    data, subject = open_data(folder), subject_of(["bird", "dog", "fish"])
    with caplog.at_level("WARNING"):
        assert labels_of(data, subject) == ([-1, -1, -1, 1, 1, 1], [0, 0, 0, 1, 1, 1])
        labels_of(data, subject)
    assert [r.message.count("1 of 2 labels are no class") for r in caplog.records] == [1]
    assert data.foreign_labels(subject) == ("cat", "dog")
    with pytest.raises(DataError, match=r"1 of its 2 labels are no class of the model: 'cat'; the model has 3 classes"):
        data.check_labels(subject)


def test_classes_without_names_take_labels_in_order_and_say_so(folder, caplog):
    with caplog.at_level("WARNING"):
        assert labels_of(open_data(folder), subject_of(["0", "1"]))[0] == [0, 0, 0, 1, 1, 1]
    assert "no names, so labels are taken in alphabetical order: cat = 0, dog = 1" in caplog.text
    assert labels_of(open_data(folder), subject_of(["0", "1", "2"]))[0] == [-1] * 6


def test_a_table_says_which_label_is_which(folder, tmp_path):
    subject = subject_of(["bird", "puppy", "fish"])
    (tmp_path / "map.csv").write_text("folder,class\ncat,-\ndog,puppy\n")
    data = open_data(folder, labels=tmp_path / "map.csv")
    data.check_labels(subject)
    assert labels_of(data, subject)[0] == [-1, -1, -1, 1, 1, 1]
    assert labels_of(open_data(folder, labels={"cat": "2", "dog": "0"}), subject)[0] == [2, 2, 2, 0, 0, 0]
    assert data.labels_digest != open_data(folder, labels={"cat": "2", "dog": "0"}).labels_digest != ""
    nothing = open_data(folder, labels="none")
    nothing.check_labels(subject)
    assert labels_of(nothing, subject) == ([-1] * 6, [0, 0, 0, 1, 1, 1])


def test_a_table_for_labels_that_are_numbers_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", images=np.zeros((4, 13, 17, 3), np.uint8), labels=np.arange(4) % 2)
    with pytest.raises(DataError, match="its labels are numbers without names, so --labels has nothing to match"):
        open_data(tmp_path / "x.npz", labels={"cat": "0"}).check_labels(subject_of(["a", "b"]))
    assert labels_of(open_data(tmp_path / "x.npz", labels="none"), subject_of(["a", "b"]))[0] == [-1] * 4
