"""The page about clusters: its commands have these options, and its RayJob the fields that KubeRay's v1 knows."""

import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from auditor.cli import auditor

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "how-to" / "cluster.md").read_text(encoding="utf-8")


def commands():
    text = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.S)).replace("\\\n", " ")
    lines = [line[line.index("auditor ") :] for line in text.splitlines() if "auditor " in line]
    return [line for line in lines if not line.startswith("auditor[")]


def check(line):
    """Let the command read its options, without running it."""
    name, *arguments = shlex.split(line)[1:]
    auditor.commands[name].make_context(name, arguments)


@pytest.mark.parametrize("line", commands())
def test_commands_are_as_the_page_has_them(line):
    check(line)


def thing(required, **fields):
    return {"type": "object", "required": required, "additionalProperties": False, "properties": fields}


TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
VARIABLES = {"type": "array", "items": thing(["name", "value"], name=TEXT, value=TEXT)}
SECRETS = {"type": "array", "items": thing(["secretRef"], secretRef=thing(["name"], name=TEXT))}
AMOUNTS = {
    "type": "object",
    "patternProperties": {"^(cpu|memory|nvidia.com/gpu)$": TEXT},
    "additionalProperties": False,
}
CONTAINER = thing(
    ["name", "image"], name=TEXT, image=TEXT, resources=thing(["limits"], limits=AMOUNTS), env=VARIABLES,
    envFrom=SECRETS,
)  # fmt: skip
POD = thing(["spec"], spec=thing(["containers"], containers={"type": "array", "minItems": 1, "items": CONTAINER}))
PARAMETERS = {"type": "object", "additionalProperties": TEXT}
HEAD = thing(["rayStartParams", "template"], rayStartParams=PARAMETERS, template=POD)
GROUP = thing(
    ["groupName", "rayStartParams", "template"], groupName=TEXT, replicas=WHOLE, minReplicas=WHOLE, maxReplicas=WHOLE,
    rayStartParams=PARAMETERS, template=POD,
)  # fmt: skip
CLUSTER = thing(
    ["headGroupSpec"], rayVersion=TEXT, headGroupSpec=HEAD, workerGroupSpecs={"type": "array", "items": GROUP}
)
RAY_JOB = thing(  # names and types of the fields that are used here, of KubeRay's ray.io/v1
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=thing(["name"], name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}),
    spec=thing(
        ["entrypoint", "rayClusterSpec"],
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        backoffLimit=WHOLE,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=WHOLE,
        rayClusterSpec=CLUSTER,
    ),
)


def test_the_ray_job_has_the_fields_of_its_kind():
    job = yaml.safe_load((ROOT / "docs" / "examples" / "rayjob.yaml").read_text())
    jsonschema.validate(job, RAY_JOB)
    check(job["spec"]["entrypoint"])
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == pinned.group(1)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**job, "spec": {**job["spec"], "entryPoint": "x"}}, RAY_JOB)
