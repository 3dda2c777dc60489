"""The page about replicas: its commands have these options, and its manifests name what the service has."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from auditor.cli import auditor
from auditor.service.routes import TABLE
from auditor.service.settings import options

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "how-to" / "replicas.md").read_text(encoding="utf-8")
VARIABLES = {"AUDITOR_MODEL", *(f"AUDITOR_{option.name.upper()}" for option in options())}
ROUTES = {route.path for route in TABLE} | {"/livez", "/readyz"}


def lines():
    text = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.S))
    return [line for line in text.splitlines() if line.startswith("auditor ")]


@pytest.mark.parametrize("line", lines())
def test_commands_are_as_the_page_has_them(line):
    name, *arguments = shlex.split(line)[1:]
    auditor.commands[name].make_context(name, arguments)


def documents(name):
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def containers():
    (deployment, *_), (service,) = documents("kubernetes.yaml"), documents("inferenceservice.yaml")
    pod = deployment["spec"]["template"]["spec"]["containers"]
    return [("kubernetes.yaml", pod[0]), ("inferenceservice.yaml", service["spec"]["predictor"]["containers"][0])]


@pytest.mark.parametrize(("name", "container"), containers())
def test_containers_use_variables_and_routes_that_exist(name, container):
    ours = [v["name"] for v in container["env"] if v["name"].startswith("AUDITOR_")]
    assert "AUDITOR_MODEL" in ours
    assert set(ours) <= VARIABLES, name
    probes = [container[key]["httpGet"]["path"] for key in container if key.endswith("Probe")]
    assert len(probes) >= 2
    assert set(probes) <= ROUTES


def test_service_budget_and_ingress_find_the_deployment():
    deployment, service, budget, ingress = documents("kubernetes.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (deployment["spec"]["selector"], budget["spec"]["selector"]):
        assert selector["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend["name"] == service["metadata"]["name"]
    assert budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]
    volumes = {volume["name"] for volume in deployment["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_bento_for_a_gpu_holds_what_the_other_one_holds():
    plain = yaml.safe_load((ROOT / "bentofile.yaml").read_text())
    (gpu,) = documents("bentofile.gpu.yaml")
    for key in ("service", "name", "include", "exclude", "python"):
        assert gpu[key] == plain[key], key
    cuda = re.search(r"nvidia/cuda:(\d+)\.", gpu["docker"]["base_image"]).group(1)
    assert f"-cu{cuda}==" in (ROOT / "requirements-bento.lock").read_text(), "torch brings CUDA of another version"
    assert "services.auditor.resources.gpu=1" in [v["value"] for v in gpu["envs"]]
