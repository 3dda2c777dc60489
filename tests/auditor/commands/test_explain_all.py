"""``auditor explain-all``: every image into Parquet, on workers too; killed at any moment, it goes on.

.venv/bin/python -m pytest tests/auditor/commands/test_explain_all.py -m slow
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from tests.stores import settle, write_folder

ARGUMENTS = ["--stability", "off"]


def test_all_images_are_explained_and_a_second_command_has_nothing_to_do(cli, shown, tmp_path):
    out = tmp_path / "out"
    said = cli.json("explain-all", shown, "--data", "sklearn:digits", "--limit", "40", "--out", out, *ARGUMENTS)
    rows = pq.read_table(out).to_pylist()
    assert len(rows) == said["images"] == 40
    assert {e["name"] for e in rows[0]["explanations"]} == {"concepts", "heads"}
    assert said["work"]["workers"]["this process"]["images"] == 40
    again = cli("explain-all", shown, "--data", "sklearn:digits", "--limit", "40", "--out", out, *ARGUMENTS)
    assert "40 images explained into 1 files, 1 of them finished before" in again.stdout
    line = cli.fails("explain-all", shown, "--data", "sklearn:digits", "--limit", "41", "--out", out, *ARGUMENTS)
    assert "it holds explanations of another data (images: 40 there, 41 here)" in line


def test_bad_input_is_one_line(cli, shown, store, tmp_path):
    out = str(tmp_path / "out")
    common = ("--data", "sklearn:digits", "--limit", "20", "--out")
    assert "nothing is attached to models:/digits/1" in cli.fails("explain-all", "models:/digits/1", *common, out)
    assert "no explainer 'nosuch'" in cli.fails("explain-all", shown, *common, out, "--explainers", "nosuch")
    assert "want a folder, or an address" in cli.fails("explain-all", shown, *common, "ftp://x/y")
    line = cli.fails("explain-all", shown, *common, out, "--cluster", "ray://127.0.0.1:9")
    assert "cluster ray://127.0.0.1:9: nothing answers there within" in line
    line = cli.fails("fit", "nmf", shown, "--data", "sklearn:digits", "--cluster", "nosuch://x")
    assert "want auto, local or ray://HOST:PORT" in line


def started(arguments, store, tmp_path):
    variables = {"MLFLOW_TRACKING_URI": store, "AUDITOR_CACHE": str(tmp_path / "cache"), "AUDITOR_CLUSTER_WORKERS": "2"}
    command = [str(Path(sys.executable).parent / "auditor"), *map(str, arguments)]
    return subprocess.Popen(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def workers():
    """Ray's processes on this machine that run our actors."""
    return [p for p in psutil.process_iter(["cmdline"]) if "ray::_Actor" in " ".join(p.info["cmdline"] or [])]


def wait_for(condition, seconds=240):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError("it did not happen in time")


@pytest.fixture
def photos(tmp_path):
    folder = write_folder(tmp_path / "photos", 6000)
    settle(folder, 100)
    return folder


@pytest.mark.slow
def test_a_killed_command_leaves_no_worker_and_the_next_goes_on(cli, shown, store, photos, tmp_path):
    before = {p.pid for p in workers()}
    out = tmp_path / "out"
    arguments = ["explain-all", shown, "--data", photos, "--out", out, "--cluster", "local", "--explainers", "concepts"]
    arguments += ["--noise-samples", "32"]
    command = started(arguments, store, tmp_path)
    wait_for(lambda: len(list(out.glob("part-*.parquet"))) >= 3)
    command.send_signal(signal.SIGKILL)
    command.wait()
    n = len(list(out.glob("part-*.parquet")))
    wait_for(lambda: not {p.pid for p in workers()} - before, 60)
    second = started([*arguments, "--json"], store, tmp_path)
    stdout, stderr = second.communicate(timeout=500)
    assert second.returncode == 0, stderr
    said = json.loads(stdout)
    assert said["parts_before"] >= n - 2
    assert pq.read_table(out).num_rows == 6000
    whole = pq.read_table(out)
    alone = tmp_path / "alone"
    cli.json("explain-all", shown, "--data", photos, "--out", alone, "--explainers", "concepts", *ARGUMENTS)
    assert whole.column("image").equals(pq.read_table(alone).column("image"))
    assert whole.column("prediction").equals(pq.read_table(alone).column("prediction"))


@pytest.mark.slow
def test_ctrl_c_says_what_holds_and_leaves_no_worker(shown, store, photos, tmp_path):
    before = {p.pid for p in workers()}
    out = tmp_path / "out"
    arguments = ["explain-all", shown, "--data", photos, "--out", out, "--cluster", "local", "--noise-samples", "32"]
    command = started(arguments, store, tmp_path)
    wait_for(lambda: len(list(out.glob("part-*.parquet"))) >= 1)
    command.send_signal(signal.SIGINT)
    _, stderr = command.communicate(timeout=120)
    assert command.returncode == 130
    assert "interrupted; finished files stay, and the same command goes on from there." in stderr
    wait_for(lambda: not {p.pid for p in workers()} - before, 60)


@pytest.mark.slow
@pytest.mark.parametrize("phase", [0.15, 0.5, 0.85])
def test_a_worker_killed_in_a_fit_changes_nothing(cli, shown, store, photos, tmp_path, phase):
    """Of the fit's two passes over 6,000 images, one worker is killed in the first, between them, or in the second."""
    alone = cli.json("fit", "nmf", shown, "--data", photos, "--set", "rank=4", "--dry-run")
    before = {p.pid for p in workers()}
    arguments = ["-v", "fit", "nmf", shown, "--data", photos, "--set", "rank=4", "--dry-run", "--cluster", "local"]
    command = started([*arguments, "--json"], store, tmp_path)
    wait_for(lambda: len({p.pid for p in workers()} - before) >= 2)
    time.sleep(2 + 8 * phase)
    victims = [p for p in workers() if p.pid not in before]
    if victims and command.poll() is None:
        victims[0].kill()
    stdout, stderr = command.communicate(timeout=500)
    assert command.returncode == 0, stderr
    said = json.loads(stdout)
    for name, value in alone["metrics"].items():
        assert said["metrics"][name] == pytest.approx(value, abs=1e-9), name
