"""Stores: a real S3 server gives what a folder gives; what fails for a while is asked for again, the rest is said."""

import io

import pytest

from auditor.data.source import open_data
from auditor.data.store import LocalStore, Stored
from auditor.errors import DataError
from tests.stores import pixels_of, same_images, travelled, upload, write_folder


@pytest.fixture
def photos(tmp_path):
    return write_folder(tmp_path / "photos", 12)


def test_a_bucket_gives_what_the_folder_gives(s3, photos):
    upload(s3, photos, "set/")
    data, local = open_data("s3://photos/set"), open_data(photos)
    assert same_images(pixels_of(data), pixels_of(local))
    assert data.class_names == local.class_names
    assert data.digest == local.digest
    assert data.image_file("cat/000.png") == (photos / "cat" / "000.png").read_bytes()


def test_a_second_command_reads_no_image_for_the_digest(s3, photos):
    upload(s3, photos, "set/")
    digest = open_data("s3://photos/set").digest
    again = open_data("s3://photos/set")
    assert again.digest == digest
    assert again.read_bytes == 0
    s3.put_object(Bucket="photos", Key="set/cat/000.png", Body=(photos / "dog" / "001.png").read_bytes())
    changed = open_data("s3://photos/set")
    assert changed.digest != digest
    assert changed.read_bytes > 0


def test_a_source_travels_without_its_connections(s3, photos):
    upload(s3, photos, "set/")
    data = open_data("s3://photos/set")
    whole = list(pixels_of(data))
    assert list(pixels_of(travelled(data).run(3, 7))) == whole[3:7]


def test_what_is_missing_or_forbidden_is_one_sentence(s3, monkeypatch):
    with pytest.raises(DataError, match="nosuch/: no image file there, it is empty; give"):
        open_data("s3://photos/nosuch/")
    with pytest.raises(DataError, match="data s3://nosuch/x: the prefix is not there"):
        open_data("s3://nosuch/x")
    with pytest.raises(DataError, match=r"data s3://photos/a.parquet: a.parquet is not there"):
        open_data("s3://photos/a.parquet")
    with pytest.raises(DataError, match="want a bucket or a server behind s3://"):
        open_data("s3://")
    with pytest.raises(DataError, match="hdfs:// is no store that is known here; there are s3, gs, az"):
        open_data("hdfs://a/b")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(DataError, match="the prefix needs credentials"):
        open_data("s3://photos/set")


def test_packages_that_are_missing_are_named():
    with pytest.raises(DataError, match=r"gs:// needs a package .* pip install 'mlflow-auditor\[gs\]'"):
        open_data("gs://bucket/photos")
    with pytest.raises(DataError, match=r"az:// needs a package .* pip install 'mlflow-auditor\[az\]'"):
        open_data("az://bucket/photos")


def test_an_object_that_comes_503_or_short_for_a_while_is_asked_for_again(proxy, s3, photos):
    upload(s3, photos, "set/")
    proxy.fault = lambda path, n: 503 if n == 1 else "cut" if n == 2 and ".png" in path else None
    data = open_data("s3://photos/set")
    images = pixels_of(data)
    assert same_images(images, pixels_of(open_data(photos)))
    assert not data.skipped
    assert data.digest == open_data(photos).digest
    assert max(proxy.asked.values()) >= 3


def test_a_store_that_stays_ill_is_one_sentence_when_patience_ends(proxy, s3, photos, monkeypatch):
    upload(s3, photos, "set/")
    monkeypatch.setenv("AUDITOR_STORE_PATIENCE_S", "1.5")
    proxy.fault = lambda path, n: 503 if "dog/004" in path else None
    with pytest.raises(DataError, match=r"dog/004.png could not be read within 2 s, the last answer was: .*; try"):
        pixels_of(open_data("s3://photos/set"))
    monkeypatch.setenv("AUDITOR_STORE_PATIENCE_S", "soon")
    with pytest.raises(DataError, match="AUDITOR_STORE_PATIENCE_S must be seconds, got 'soon'"):
        open_data("s3://photos/set")


def test_an_object_that_may_not_be_read_is_said_at_once(proxy, s3, photos):
    upload(s3, photos, "set/")
    proxy.fault = lambda path, n: 403 if "dog/004" in path else None
    with pytest.raises(DataError, match=r"dog/004.png may not be used: no permission"):
        pixels_of(open_data("s3://photos/set"))
    proxy.fault = lambda path, n: 403
    with pytest.raises(DataError, match=r"data s3://photos/set: the prefix may not be used: no permission"):
        open_data("s3://photos/set")


def test_secrets_are_in_no_message(proxy, s3, photos, monkeypatch, caplog):
    upload(s3, photos, "set/")
    monkeypatch.setenv("AUDITOR_STORE_PATIENCE_S", "0.5")
    proxy.fault = lambda path, n: 503
    with caplog.at_level(0), pytest.raises(DataError) as caught:
        open_data("s3://photos/set")
    assert "secret-of-the-tests" not in str(caught.value) + "".join(
        r.getMessage() for r in caplog.records if r.name.startswith("auditor")
    )


def test_a_local_file_can_be_read_from_anywhere(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(range(100)))
    store = LocalStore(tmp_path, "here")
    assert store.read("a.bin", 10, 13) == bytes([10, 11, 12])
    assert list(store.read_many([("a.bin", 100)])) == [bytes(range(100))]
    with pytest.raises(DataError, match=r"a.bin became shorter while it was read"):
        store.read("a.bin", 90, 120)
    with pytest.raises(DataError, match=r"b.bin cannot be read \(No such file or directory\)"):
        store.stat("b.bin")


def test_a_far_file_reads_like_a_stream(s3):
    from auditor.data.store import S3Store

    s3.put_object(Bucket="photos", Key="x/a.bin", Body=bytes(range(250)))
    stream = S3Store("s3://photos/x", "here").open(Stored("a.bin", 250, ""))
    assert stream.read(3) == bytes([0, 1, 2])
    stream.seek(-2, io.SEEK_END)
    assert stream.read() == bytes([248, 249])
    assert stream.tell() == 250
