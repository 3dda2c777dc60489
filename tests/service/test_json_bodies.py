"""JSON bodies: the images apart from the rest, whatever form they come in."""

import base64
import json
import tracemalloc

import numpy as np
import pytest

from auditor.service.json_bodies import from_base64, from_lists, split_body
from auditor.service.problems import Problem

ENCODED = base64.b64encode(b"bytes").decode()


@pytest.mark.parametrize(
    "text",
    [
        "+/+/AA==",
        "data:image/png;base64,+/+/AA==",
        "data:;base64,+/+/AA==",
        "-_-_AA==",  # the alphabet of URLs
        "-_-_AA",  # without its padding
        "+/+/\nAA==\r\n",  # line breaks, as the command writes them
    ],
)
def test_base64_in_every_form_gives_the_same_bytes(text):
    assert from_base64(text) == b"\xfb\xff\xbf\x00"


@pytest.mark.parametrize(
    "text", ["%%%", "a", "ab*d", "data:image/png,abcd", "data:image/png;base64", "é", "\x00\x00\x00\x00"]
)
def test_what_is_not_base64_is_a_400(text):
    with pytest.raises(Problem) as caught:
        from_base64(text)
    assert (caught.value.status, caught.value.code) == (400, "bad_base64")


def test_text_of_spaces_takes_no_more_memory_than_its_length():
    """Old code split such a text into millions of words: seconds, and half a GB."""
    text = "a " * 4_000_000
    tracemalloc.start()
    try:
        assert len(from_base64(text)) == 3_000_000
        assert tracemalloc.get_traced_memory()[1] < 6 * len(text)
    finally:
        tracemalloc.stop()


def test_the_images_are_apart_from_the_rest():
    rest, (part,) = split_body(json.dumps({"image": ENCODED, "seed": 3}).encode(), "image")
    assert rest == {"image": "given", "seed": 3}
    assert part.file == b"bytes"
    rest, parts = split_body(json.dumps({"images": [ENCODED, ENCODED]}).encode(), "images")
    assert rest == {"images": ["given"] * 2}
    assert [part.file for part in parts] == [b"bytes"] * 2


def test_instances_in_every_form():
    given = [ENCODED, {"b64": ENCODED}, {"image": {"b64": ENCODED}, "seed": 1}, {"image_bytes": ENCODED}, [[0.5, 1]]]
    rest, parts = split_body(json.dumps({"instances": given, "parameters": {"seed": 2}}).encode(), "instances")
    assert rest == {"instances": ["given"] * 5, "parameters": {"seed": 2}}
    assert [part.file for part in parts] == [b"bytes"] * 4 + [None]
    assert [part.options for part in parts] == [{}, {}, {"seed": 1}, {}, {}]
    np.testing.assert_array_equal(parts[4].numbers, np.array([[0.5, 1]], np.float32))


@pytest.mark.parametrize("body", [b"[]", b"3", b"null", b'{"image": 3}', b'{"image": ""}', b'{"images": [3]}', b"{}"])
def test_what_does_not_fit_stays_for_the_type_to_refuse(body):
    for images in ("image", "images", "instances"):
        assert split_body(body, images) == (json.loads(body), [])


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"nul"])
def test_what_is_not_json_is_a_400(body):
    with pytest.raises(Problem) as caught:
        split_body(body, "image")
    assert (caught.value.status, caught.value.code) == (400, "bad_json")


@pytest.mark.parametrize("value", [None, 3, "", {}, {"b64": 3}, {"image": {"x": 1}}, "%%%", [0.5], [[0.5, "x"]]])
def test_a_bad_instance_is_named(value):
    with pytest.raises(Problem, match=r"instances\.1: ") as caught:
        split_body(json.dumps({"instances": [ENCODED, value]}).encode(), "instances")
    assert caught.value.status in (400, 422)


@pytest.mark.parametrize("values", [[1, [2]], ["a"], [0.5], [[[[0.5]]]], 0.5, [[0.5, "x"]], {"a": 1}, None])
def test_numbers_of_another_shape_are_a_422(values):
    with pytest.raises(Problem) as caught:
        from_lists(values)
    assert (caught.value.status, caught.value.code) == (422, "bad_image")
