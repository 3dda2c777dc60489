"""Parquet and Arrow: the images that went in come out, in any cut, and damage is one sentence."""

import io

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from PIL import Image

from auditor.data.source import open_data
from auditor.errors import DataError
from tests.stores import COLOUR, picture, pixels_of, same_images, travelled, write_folder

N = 23


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUDITOR_CACHE", str(tmp_path / "cache"))


def table(start=0, stop=N):
    rows = range(start, stop)
    return pa.table({"id": list(rows), "image": [picture(k) for k in rows], "label": [k % 3 for k in rows]})


def write(tmp_path, form):
    """The same images in one of the forms, some with several files and parts."""
    target = tmp_path / form
    target.mkdir()
    if form == "parquet":
        pq.write_table(table(0, 11), target / "a.parquet", row_group_size=4)
        pq.write_table(table(11), target / "b.parquet", row_group_size=5)
    elif form == "feather":
        pa.feather.write_feather(table(), target / "a.arrow", chunksize=6, compression="zstd")
    elif form == "stream":
        with pa.ipc.new_stream(target / "a.arrow", table().schema) as writer:
            writer.write_table(table(), max_chunksize=7)
    else:
        columns = {"image": [{"bytes": picture(k), "path": None} for k in range(N)], "label": [k % 3 for k in range(N)]}
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(target, num_shards=3)
    return target


@pytest.mark.parametrize("form", ["parquet", "feather", "stream", "hugging_face"])
def test_every_form_gives_the_images_that_were_written(tmp_path, form):
    data = open_data(write(tmp_path, form))
    images = pixels_of(data)
    assert len(images) == len(data) == N
    for k, (image, label) in enumerate(images.values()):
        raw = np.array(Image.open(io.BytesIO(picture(k)))).transpose(2, 0, 1) / 255
        np.testing.assert_allclose(image, raw, atol=1e-6)  # 13x17 as they are: nothing is resized
        assert label == k % 3
    assert data.class_names == (("a", "b", "c") if form == "hugging_face" else None)
    whole, digest = list(images), data.digest
    fresh = open_data(tmp_path / form)
    assert fresh.digest == digest
    for shard in reversed(fresh.shards):  # any order, as workers read
        part = travelled(fresh).run(shard.start, shard.stop)
        assert list(pixels_of(part)) == whole[shard.start : shard.stop]
        assert fresh.layout.row(whole[shard.start]) == shard.start
    some = open_data(tmp_path / form, limit=5)
    assert set(pixels_of(some)) <= set(whole)
    assert len(some) == 5


def test_one_file_and_a_pattern_of_files_can_be_named(tmp_path):
    folder = write(tmp_path, "parquet")
    assert len(open_data(folder / "a.parquet")) == 11
    assert len(open_data(f"{folder}/{{a,b}}.parquet")) == N
    assert len(open_data(f"{folder}/*.parquet?label=id&image=image")) == N
    with pytest.raises(DataError, match="no image file"):
        open_data(f"{folder}/c*.parquet")


def test_columns_are_named_when_none_fits(tmp_path):
    pq.write_table(pa.table({"id": [1], "text": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(
        DataError, match=r"none of its columns holds images .* its columns: id \(int64\), text \(string\)"
    ):
        open_data(tmp_path / "x.parquet")
    pq.write_table(table(), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"x.parquet has no column 'image' as a.parquet has; its columns: id, text"):
        open_data(tmp_path)


@pytest.mark.parametrize("form", ["parquet", "feather", "stream"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_a_file_that_ends_early_is_one_sentence(tmp_path, form, keep):
    folder = write(tmp_path, form)
    file = sorted(folder.iterdir())[0]
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(DataError, match=r"is damaged|no image file|its files have no rows") as caught:
        pixels_of(open_data(file))
    assert len(str(caught.value)) < 400


def test_rows_without_an_image_are_named(tmp_path):
    rows = [picture(0), None, b"no image", picture(3)]
    pq.write_table(pa.table({"image": rows, "label": [0, 1, 0, 1]}), tmp_path / "x.parquet")
    data = open_data(tmp_path / "x.parquet")
    assert list(pixels_of(data)) == ["x.parquet#0", "x.parquet#3"]
    assert data.skipped == {"x.parquet#1": "no image in this row", "x.parquet#2": "cannot identify image file"}


def test_several_data_sets_in_one_folder_are_named(tmp_path):
    one = datasets.Dataset.from_dict({"image": [{"bytes": picture(0), "path": None}]})
    one = one.cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match=r"it holds several data sets \(test, train\); add \?split=NAME"):
        open_data(tmp_path / "both")
    assert len(open_data(f"{tmp_path / 'both'}?split=train")) == 1


def test_the_digest_is_of_the_content_and_not_of_how_it_is_compressed(tmp_path):
    folders = []
    for name, compression in (("a", "snappy"), ("b", "zstd")):
        (tmp_path / name).mkdir()
        pq.write_table(table(), tmp_path / name / "x.parquet", row_group_size=4, compression=compression)
        folders.append(tmp_path / name)
    assert open_data(folders[0]).digest == open_data(folders[1]).digest
    assert same_images(pixels_of(open_data(folders[0])), pixels_of(open_data(write_folder(tmp_path / "c", N)))) is False
    assert COLOUR.input_shape == (3, 13, 17)
