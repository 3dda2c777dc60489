"""Prometheus: all workers add up, and a disk that fills up later ends nobody."""

import os
import subprocess
import sys

from auditor.service import prometheus


def run(folder, code):
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_without_workers_the_process_answers_for_itself():
    prometheus.RELOADS.labels("served").inc(0)
    text, media = prometheus.exposition()
    assert b"auditor_reloads_total" in text
    assert media.startswith("text/plain")


def test_two_workers_add_up_whichever_is_asked(tmp_path):
    count = "from auditor.service.prometheus import REQUESTS; REQUESTS.labels('/explain', '200').inc({})"
    run(tmp_path / "new", count.format(2))  # the folder is made when it is missing
    run(tmp_path / "new", count.format(5))
    text = run(tmp_path / "new", "from auditor.service import prometheus as p; print(p.exposition()[0].decode())")
    assert 'auditor_requests_total{route="/explain",status="200"} 7.0' in text


def test_files_are_claimed_on_the_disk_from_the_start(tmp_path):
    run(tmp_path, "import auditor.service.prometheus")
    files = list(tmp_path.glob("*.db"))
    assert files
    for file in files:
        assert file.stat().st_size == prometheus.ROOM
        assert file.stat().st_blocks * 512 >= prometheus.ROOM  # not a hole


def test_a_disk_without_room_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / f"counter_{os.getpid()}.db").write_bytes(b"x")
    (tmp_path / "counter_1.db").write_bytes(b"x")  # another process's is left alone
    claimed = []

    def full(file, start, size):
        claimed.append(size)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prometheus, "FOLDER", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level("WARNING"):
        prometheus.claim_room()
    assert claimed == [1]
    assert "no room could be claimed" in caplog.text


def test_a_killed_worker_is_not_counted_as_ready(tmp_path):
    """Old code kept the gauges of killed workers: auditor_ready counted processes that were gone."""
    ready = "from auditor.service import prometheus as p; p.READY.set(1); p.REQUESTS.labels('/x', '200').inc(); "
    run(tmp_path, ready)
    text = run(tmp_path, ready + "print(p.exposition()[0].decode())")
    assert "auditor_ready 1.0" in text
    assert 'auditor_requests_total{route="/x",status="200"} 2.0' in text  # what it counted stays
