"""Model records: what a version's model is, read without torch, is what torch says, or nothing."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from auditor import plugins
from auditor.errors import TamperError
from auditor.plugins.registry import tags
from auditor.plugins.registry.location import resolve
from auditor.plugins.registry.model_record import ARCHIVE, ModelRecord, VersionModel, read_record

MODEL = "models:/digits/1"
HEAVY = ("torch", "scipy.stats", "onnxruntime", "bentoml", "sklearn", "PIL.Image", "torchvision", "matplotlib")
COMMANDS = """
import json, sys
from click.testing import CliRunner
from auditor.cli import auditor
policy, model, folder, *heavy = sys.argv[1:]
said = []
for command in (["list", model, "--json"], ["verify", model, "--json"], ["policy", "init", model],
                ["policy", "check", policy, "--json"], ["log", "show", model.split("/")[1], "--json"],
                ["gate", model, "--policy", policy, "--json", "--junit", folder + "/j.xml"]):
    result = CliRunner().invoke(auditor, command)
    said.append([command[0], result.exit_code, sorted(m for m in heavy if m in sys.modules), result.output[-300:]])
print(json.dumps(said))
"""


def test_a_record_is_that_of_the_model_that_torch_loads(registry):
    version = resolve(MODEL)
    assert read_record(version) == ModelRecord.of(plugins.load_subject(version))


def test_a_file_that_has_changed_is_an_error_and_a_version_without_a_pin_is_loaded(registry):
    version = resolve(MODEL)
    assert read_record(replace(version, tags={k: v for k, v in version.tags.items() if k != tags.MODEL})) is None
    assert read_record(replace(version, tags={k: v for k, v in version.tags.items() if k != tags.SUBJECT})) is None
    file = Path(version.root.removeprefix("file://")) / ARCHIVE
    original = file.read_bytes()
    try:
        file.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        with pytest.raises(TamperError, match=r"data/model\.pt2 of models:/digits/1 has changed"):
            read_record(version)
    finally:
        file.write_bytes(original)


def test_a_model_that_was_loaded_speaks_for_itself(registry):
    version = resolve(MODEL)
    model = VersionModel(version)
    assert not model.is_loaded
    before = model.record
    assert not model.is_loaded
    assert model.subject is model.subject
    assert model.is_loaded
    assert model.record == before
    assert VersionModel(version, subject=model.subject).record == before


def test_commands_on_a_stored_audit_load_no_torch(registry, gated, tmp_path):
    """Every one of them cost six seconds for imports; what they need now is MLflow."""
    policy = tmp_path / "p.toml"
    policy.write_text('[limits."model/accuracy"]\nmin = 0.0\n')
    program = [sys.executable, "-c", COMMANDS, str(policy), gated[0], str(tmp_path), *HEAVY]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": registry}
    done = subprocess.run(program, capture_output=True, text=True, check=True, env=environment)
    for name, code, loaded, output in json.loads(done.stdout):
        assert (name, code, loaded) == (name, 0, []), output
