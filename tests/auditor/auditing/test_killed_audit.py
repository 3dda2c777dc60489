"""An audit that is killed (SIGKILL) goes on where it stopped, and measures what it would have measured."""

import json
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from auditor import AuditConfig, Subject, audit, fit, open_data
from auditor.explainers.base import Explainer

folder, cache = Path(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)).eval()
subject = Subject(net, input_shape=(1, 8, 8))
if not (folder / "nmf").exists():
    few = open_data("sklearn:digits", limit=60)
    fit("nmf", subject, few, rank=3, refits=1, max_eval=10).save(folder / "nmf")
concepts = Explainer.load(folder / "nmf", subject)
config = AuditConfig(images=20, reliance=False, layers=False)
data = open_data("sklearn:digits", limit=160)
said = lambda line: print(line, flush=True)
result = audit(subject, data, {"concepts": concepts}, config, cache=cache, say=said)
metrics = {name: measure.to_json() for name, measure in result.metrics.items()}
print("RESULT " + json.dumps([metrics, [c["check"] for c in result.cost if "interruption" in c["note"]]]))
"""


def lines_of(folder, cache, kill_at=None):
    """Run the audit in a process of its own; kill it when it announces the check ``kill_at``."""
    command = [sys.executable, "-c", PROGRAM, str(folder), str(cache)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if kill_at is not None and line.startswith(kill_at):
            process.send_signal(signal.SIGKILL)
    return lines, process.wait()


@pytest.mark.slow
def test_a_killed_audit_goes_on_and_gives_what_it_would_have_given(tmp_path):
    undisturbed, code = lines_of(tmp_path, tmp_path / "one")
    assert code == 0
    _, code = lines_of(tmp_path, tmp_path / "two", kill_at="randomisation")
    assert code == -signal.SIGKILL
    assert len(list((tmp_path / "two").rglob("*.json"))) >= 2  # what was finished is on disk, whole
    again, code = lines_of(tmp_path, tmp_path / "two")
    assert code == 0
    metrics, resumed = json.loads(again[-1].removeprefix("RESULT "))
    assert {"faithfulness", "flipping"} <= set(resumed)
    assert not any(line.startswith(("faithfulness", "flipping")) for line in again)
    assert metrics == json.loads(undisturbed[-1].removeprefix("RESULT "))[0]
    assert not list((tmp_path / "two").rglob("*.json"))  # a finished audit leaves nothing behind
