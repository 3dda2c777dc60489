"""Image runs: the same batches whoever reads them, broken images and digests included."""

import torch
from torch import nn

from auditor.data.source import open_data
from auditor.runners.image_runs import RUN, OfBatch, counted, cut, over_batches
from auditor.runners.runner import LocalRunner, using
from auditor.subject.subject import Subject
from tests.stores import travelled, write_folder

N = 23


class Elsewhere(LocalRunner):
    """Runs everything on what another process would get: functions and items travel, and so do results."""

    @property
    def is_remote(self):
        return True

    def stream(self, work, items):
        for item in items:
            for part in travelled(work)(travelled(item)):
                yield travelled(part)


def subject():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 11 * 15, 3))
    return Subject(net, input_shape=(3, 13, 17), class_names=["cat", "dog", "owl"])


def logits(subject, batch, positions):
    with torch.no_grad():
        return subject.logits(batch.images)


def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUDITOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("auditor.data.folder_images.FILES", 4)
    monkeypatch.setattr("auditor.runners.image_runs.RUN", 6)
    write_folder(tmp_path / "photos", N)
    (tmp_path / "photos" / "owl" / "005.png").write_bytes(b"broken")
    return tmp_path / "photos"


def test_batches_positions_and_digest_are_the_same_in_other_processes(tmp_path, monkeypatch):
    path = folder(tmp_path, monkeypatch)
    monkeypatch.setattr("auditor.data.read_cache.user_key", lambda folder: b"")
    model, readings = subject(), []
    for runner in (LocalRunner(), Elsewhere()):
        data, done = open_data(path), []
        with using(runner):
            parts = list(over_batches(logits, model, data, batch_size=4, progress=done.append))
        assert all(isinstance(part, OfBatch) for part in parts)
        assert done[-1] == N - 1
        assert list(data.skipped) == ["owl/005.png"]
        data._contents = None  # the digest must be there already
        readings.append((parts, data.digest))
    (local, digest), (far, same) = readings
    assert digest == same == open_data(path).digest
    for a, b in zip(local, far, strict=True):
        assert torch.equal(a.given, b.given)
        assert a.positions.tolist() == b.positions.tolist()
    positions = torch.cat([part.positions for part in local]).tolist()
    assert positions == [k for k in range(N) if k != open_data(path).rows_of(["owl/005.png"])[0]]


def test_a_source_that_cannot_be_read_elsewhere_is_read_here_once(digits_data, digits):
    with using(Elsewhere()):
        far = list(over_batches(logits, digits, digits_data, batch_size=64))
    near = list(over_batches(logits, digits, digits_data, batch_size=64))
    assert [part.n for part in far] == [part.n for part in near] == [64] * 28 + [5]
    assert all(torch.equal(a.given, b.given) for a, b in zip(far, near, strict=True))


def test_runs_end_with_shards_and_hold_all_rows_of_a_sample(tmp_path, monkeypatch):
    path = folder(tmp_path, monkeypatch)
    for data in (open_data(path), open_data(path, limit=7)):
        runs = list(cut(data))
        assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
        assert runs[-1].stop == len(data)
    assert {run.stop % 4 for run in list(cut(open_data(path)))[:-1]} == {0}
    assert RUN == 256


def test_progress_names_the_stage():
    lines = []
    counted(lambda *said: lines.append(said), "reading", 9)(4)
    assert lines == [("reading", 4, 9)]
