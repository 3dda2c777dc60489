"""Web servers: what a listing links to is read, and nothing that lies elsewhere."""

import pytest

from auditor.data.source import open_data
from auditor.errors import DataError
from tests.stores import pixels_of, same_images, write_folder


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUDITOR_CACHE", str(tmp_path / "cache"))


def test_a_listing_gives_what_the_folder_gives(web):
    folder, address, _ = web
    write_folder(folder / "a set & more", 9)
    data = open_data(f"{address}/a set & more/".replace(" ", "%20").replace("&", "%26"))
    assert same_images(pixels_of(data), pixels_of(open_data(folder / "a set & more")))
    assert data.digest == open_data(folder / "a set & more").digest


def test_one_file_can_be_named_and_its_server_needs_no_ranges(web):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests.stores import picture

    folder, address, _ = web
    pq.write_table(pa.table({"image": [picture(k) for k in range(5)], "label": [0, 1, 0, 1, 0]}), folder / "x.parquet")
    data = open_data(f"{address}/x.parquet")
    assert len(pixels_of(data)) == 5
    assert data.digest == open_data(folder / "x.parquet").digest


def test_links_that_lead_elsewhere_are_not_followed(web):
    folder, address, requests = web
    write_folder(folder / "in", 3)
    write_folder(folder / "out", 3)
    (folder / "in" / "index.html").write_text(
        '<a href="cat/000.png">a</a> <a href="../out/cat/000.png">b</a> <a href="/out/dog/001.png">c</a>'
        '<a href="http://127.0.0.1:9/owl/x.png">d</a> <a href="?C=M">e</a> <a href="cat/000.png#x">f</a>'
    )
    assert list(pixels_of(open_data(f"{address}/in/"))) == ["cat/000.png"]
    assert not [path for _, path in requests if "/out/" in str(path)]


def test_bad_addresses_are_said(web, monkeypatch):
    _, address, _ = web
    monkeypatch.setenv("AUDITOR_STORE_PATIENCE_S", "0.5")
    with pytest.raises(DataError, match=r"x.npz is not there"):
        open_data(f"{address}/x.npz")
    with pytest.raises(DataError, match="an address with a password in it would be stored"):
        open_data("http://me:secret@127.0.0.1/photos/")
    with pytest.raises(DataError, match=r"unknown option X-Amz-Signature behind the question mark"):
        open_data(f"{address}/x.parquet?X-Amz-Signature=abc")
    with pytest.raises(DataError, match="could not be read within"):
        open_data("http://127.0.0.1:9/photos/")
