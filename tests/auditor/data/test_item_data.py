"""Images handed out one by one: labels beside them or with them, names, broken ones, and a digest over all of it."""

import io

import numpy as np
import pytest
from PIL import Image

from auditor.data.item_data import ItemData
from auditor.data.item_labels import ItemLabels
from auditor.errors import DataError
from auditor.subject.preprocessing import Preprocessing

IMAGES = np.random.default_rng(3).integers(0, 256, (7, 4, 6), dtype=np.uint8)
PRE = Preprocessing.of((1, 4, 6), (0.0,), (1.0,), "stretch")


def data(images=IMAGES, labels=None, beside=None, **options):
    labels = [None] * len(images) if labels is None else labels
    asked = []

    def read(rows):
        for row in rows:
            asked.append(int(row))
            yield images[row], labels[row]

    made = ItemData("mine", len(images), read, labels=beside, **options)
    made.asked = asked
    return made


def read_all(source, size=3):
    batches = list(source.batches(PRE, size))
    images = np.concatenate([b.images.numpy() for b in batches])
    return images, np.concatenate([b.labels.numpy() for b in batches]).tolist(), [i for b in batches for i in b.ids]


def test_images_labels_and_names_come_in_order():
    images, labels, ids = read_all(data(labels=list("abacaba")))
    np.testing.assert_allclose(images[:, 0], IMAGES / 255, atol=1e-7)
    assert labels == [0, 1, 0, 2, 0, 1, 0]
    assert ids == [str(i) for i in range(7)]
    named = data(beside=ItemLabels(np.arange(7)), ids=[f"image {i}" for i in range(7)])
    assert read_all(named)[2][4] == "image 4"


def test_labels_beside_the_images_cost_no_reading():
    source = data(beside=ItemLabels(np.arange(7) % 2, ("x", "y")))
    assert source.class_names == ("x", "y")
    assert source.labels.single.tolist() == [0, 1] * 3 + [0]
    assert source.asked == []


def test_labels_with_the_images_are_read_once_and_the_digest_with_them():
    source = data(labels=list("abacaba"))
    assert source.labels.names == ("a", "b", "c")
    assert source.asked == list(range(7))
    assert source.digest
    assert source.asked == list(range(7))


def test_digest_follows_images_labels_and_order():
    digests = {
        data(labels=list("abacaba")).digest,
        data(labels=list("abacabb")).digest,
        data(labels=list("abacaba"), images=IMAGES[::-1]).digest,
        data(labels=list("abacaba"), images=IMAGES ^ 1).digest,
        data(labels=list("abacab"), images=IMAGES[:6]).digest,
    }
    assert len(digests) == 5
    assert data(labels=list("abacaba")).digest in digests
    beside = ItemLabels(np.array([0, 1, 0, 2, 0, 1, 0]), ("a", "b", "c"))
    assert data(beside=beside).digest == data(labels=list("abacaba")).digest


def test_a_sample_has_a_digest_of_its_own():
    whole, some = data(labels=list("abacaba")), data(labels=list("abacaba"), limit=4)
    assert len(some) == 4
    assert some.digest != whole.digest
    assert some.content_digest == whole.content_digest


def test_broken_files_are_named_and_left_out():
    buffer = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(buffer, "PNG")
    files = [buffer.getvalue(), b"this is no image", buffer.getvalue()]
    source = data(images=files, labels=[0, 1, 1])
    _, labels, ids = read_all(source)
    assert (labels, ids, list(source.skipped)) == ([0, 1], ["0", "2"], ["1"])
    with pytest.raises(DataError, match="1 is broken"):
        read_all(data(images=files, labels=[0, 1, 1], strict=True))


def test_numbers_that_are_no_pixels_are_an_error_and_not_skipped():
    with pytest.raises(DataError):
        read_all(data(images=np.full((2, 4, 6), 7.5, dtype=np.float32), labels=[0, 1]))


def test_an_item_without_an_image_is_an_error():
    with pytest.raises(DataError, match="data mine: item 1 has no image but int"):
        read_all(data(images=[IMAGES[0], 5], labels=[0, 1]))


def test_size_before_it_is_resized():
    pictures = [Image.fromarray(image) for image in IMAGES]
    assert data(images=pictures).image_size("2") == (6, 4)
    assert data(images=pictures, ids=list("abcdefg")).image_size("c") == (6, 4)
