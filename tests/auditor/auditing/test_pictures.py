"""Pictures of an audit's page: different classes first, the strongest concepts first, none where none can be made."""

import base64
import io

import torch
from PIL import Image

from auditor.auditing.images import AuditImages
from auditor.auditing.pictures import N_CONCEPTS, N_PARTS, N_SHOTS, SIDE, _varied, data_url, pictures
from auditor.errors import NumericsError
from tests.auditor.auditing.linear_case import PixelWise


def decoded(url):
    kind, _, content = url.partition(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


def test_a_picture_comes_back_from_its_url():
    picture = Image.new("RGB", (5, 3), (10, 200, 30))
    again = decoded(data_url(picture))
    assert again.size == (5, 3)
    assert again.getpixel((4, 2)) == (10, 200, 30)


def test_examples_are_of_different_classes_as_far_as_there_are():
    logits = torch.zeros(9, 4)
    classes = [0, 0, 0, 1, 1, 2, 2, 2, 2]
    logits[torch.arange(9), torch.tensor(classes)] = 1
    chosen = AuditImages(torch.zeros(9, 1, 2, 2), logits, torch.full((9,), -1), [str(i) for i in range(9)])
    for n in (1, 2, 3):
        picked = _varied(chosen, n)
        assert len(picked) == n == len(set(picked.logits.argmax(1).tolist()))
    four = _varied(chosen, 4)
    assert len(set(four.ids)) == 4
    assert set(four.logits.argmax(1).tolist()) == {0, 1, 2}
    assert len(_varied(chosen, 100)) == 9


def test_concepts_and_examples_of_the_digits(trained, concepts, audited):
    shown = audited.pictures["concepts"]
    assert len(shown["concepts"]) == min(6, N_CONCEPTS)
    for k, row in enumerate(shown["concepts"]):
        assert row["index"] == k
        sizes = [abs(v) for _, v in row["classes"]]
        assert len(sizes) == 3
        assert sizes == sorted(sizes, reverse=True)
        assert 1 <= len(row["shots"]) <= N_SHOTS
        assert max(decoded(row["shots"][0]["src"]).size) > 8
    for example in shown["examples"]:
        assert max(decoded(example["src"]).size) == SIDE
        assert len(example["parts"]) == N_PARTS
        assert example["more"] == 6 - N_PARTS
        parts = [abs(p["contribution"]) for p in example["parts"]]
        assert parts == sorted(parts, reverse=True)
        assert 0 < example["probability"] <= 1


def test_an_explainer_that_cannot_explain_shows_no_examples(linear, chosen):
    class Broken(PixelWise):
        def explain(self, subject, images, target=None):
            raise NumericsError("no numbers today.")

    good = PixelWise()
    good.subject_digest_ = linear.digest
    shown = pictures(linear, {"bad": Broken(), "good": good}, chosen, 2)
    assert shown["bad"] == {"concepts": [], "examples": []}  # and no gallery, so no concepts
    assert [e["truth"] for e in shown["good"]["examples"]] == [e["prediction"] for e in shown["good"]["examples"]]
    assert shown["good"]["examples"][0]["more"] == 35 - N_PARTS
