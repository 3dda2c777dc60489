"""A study on disk: the same bytes again, and every edit found."""

import pytest

from auditor.errors import AuditError
from auditor.study.folder import read_study, write_study
from tests.auditor.study.drawn import small_study


def test_writing_and_reading_is_identity_and_gives_the_same_digest(tmp_path):
    study, pictures = small_study()
    digest = write_study(tmp_path / "a", study, pictures)
    assert write_study(tmp_path / "b", study, pictures) == digest
    assert read_study(tmp_path / "a", digest) == (study, pictures, digest)


@pytest.mark.parametrize("name", ["study.json", "pictures.zip", "manifest.json"])
def test_one_changed_byte_is_found(tmp_path, name):
    study, pictures = small_study()
    write_study(tmp_path / "a", study, pictures)
    path = tmp_path / "a" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(AuditError, match="not what was"):
        read_study(tmp_path / "a")


def test_what_is_no_study_is_one_sentence(tmp_path):
    with pytest.raises(AuditError, match="no drawn study"):
        read_study(tmp_path)
    study, pictures = small_study()
    write_study(tmp_path / "a", study, pictures)
    (tmp_path / "a" / "more.txt").write_text("x")
    with pytest.raises(AuditError, match=r"more\.txt in artifact a is not listed"):
        read_study(tmp_path / "a")
    with pytest.raises(AuditError, match="something in it already"):
        write_study(tmp_path / "a", study, pictures)
