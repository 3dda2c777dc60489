"""Leftovers: found, told from what a killed upload leaves, and a changed byte in one of them noticed."""

from pathlib import Path

import pytest

from auditor import fit, open_data, plugins
from auditor.plugins.registry import leftovers
from auditor.plugins.registry.location import resolve
from tests.plugins.registry.stored_files import files_of


@pytest.fixture
def left(registry, tiny, tiny_npz):
    """A version with one explainer, and its artifact folder with one that was replaced and one that was detached."""
    uri = plugins.log_subject(tiny, "with-leftovers", experiment="tests")
    subject, data = plugins.load_subject(uri), open_data(tiny_npz)
    for seed, name in ((0, "kept"), (1, "kept"), (0, "gone")):
        explainer = fit("nmf", subject, data, layer="relu", rank=2, refits=1, max_eval=10, seed=seed)
        plugins.attach(explainer, uri, name, subject=subject, attach_anyway=True)
    plugins.detach(uri, "gone")
    return uri


def test_what_no_tag_points_to_is_found_and_is_no_problem(left):
    kept = plugins.list_attached(left)[0].location
    found = leftovers.find(resolve(left))
    assert sorted(path.split("/")[1] for path in found) == ["gone", "kept"]
    assert kept not in found
    assert [entry.problem for entry in leftovers.check(resolve(left))] == ["", ""]
    assert [entry.name for entry in plugins.verify(left)] == ["kept"]


def test_a_changed_byte_in_a_leftover_is_noticed_and_named(left):
    for path in files_of(left, "gone"):
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(flipped) // 2] ^= 1
        path.write_bytes(flipped)
        (entry,) = [x for x in plugins.verify(left) if not x.verified]
        assert (entry.kind, path.name in entry.problem, entry.name.startswith("explainers/gone/")) == (
            "leftover",
            True,
            True,
        )
        path.write_bytes(content)
    extra = files_of(left, "gone")[0].parent / "more.txt"
    extra.write_text("x")
    assert "more.txt in explainers/gone/" in next(x.problem for x in plugins.verify(left) if not x.verified)
    extra.unlink()


def test_an_upload_killed_before_its_first_file_is_no_problem(left):
    files = files_of(left, "gone")
    for path in files:
        path.unlink()
    assert files[0].parent.is_dir()
    assert [entry.problem for entry in leftovers.check(resolve(left))] == ["", ""]
    assert all(entry.verified for entry in plugins.verify(left))


def test_what_a_killed_upload_leaves_is_no_problem(left, tmp_path):
    import shutil

    whole = files_of(left, "gone")[0].parent
    location = f"explainers/gone/{whole.name}"
    names = sorted(p.name for p in whole.iterdir())
    for name in names:
        for n_bytes in (None, 0, 100):  # not there, empty, cut short
            folder = Path(shutil.copytree(whole, tmp_path / f"{name}-{n_bytes}"))
            content = (folder / name).read_bytes()
            (folder / name).unlink()
            if n_bytes is not None:
                (folder / name).write_bytes(content[:n_bytes])
            cut_manifest = name == "manifest.json" and n_bytes == 100
            assert bool(leftovers.changed(folder, location)) is cut_manifest
    assert leftovers.changed(whole, location) == ""
    assert "manifest.json" in leftovers.changed(whole, "explainers/gone/" + "0" * 12)
