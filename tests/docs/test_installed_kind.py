"""The example of docs/adding-a-kind.md, installed: commands, the service, MLflow's server and a browser, all real.

The package is installed into an environment of its own, which borrows the packages of this one. MLflow's server runs
without it: what the Audits page shows of an artifact needs no code of its kind.
"""

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.benchmarks import live_server as ls
from tests.browser import chromium
from tests.free_port import free_port
from tests.plugins.server import mlflow_server

pytest.importorskip("captum")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "superpixel-ig"
MODEL = "models:/digits/1"
SENTENCE = "kind 'superpixel-ig' comes from the package superpixel-ig (fitted with version 0.1.0), which is not"
REGISTER = (
    "from auditor import plugins; from auditor.demo import train_digits\n"
    "from auditor.attribution.heatmap import to_rgb; from auditor.data.source import open_data; from PIL import Image\n"
    "subject = train_digits(0)[0]; print(plugins.log_subject(subject, 'digits'))\n"
    "image = next(open_data('sklearn:digits').batches(subject, 8)).images[3]\n"
    "Image.fromarray(to_rgb(image)[..., 0]).save('digit.png')"
)


class Environment:
    """One interpreter with the registry it uses; ``auditor`` runs a command there."""

    def __init__(self, python: Path, folder: Path, address: str) -> None:
        self.python, self.folder, self.address = str(python), folder, address

    def variables(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("AUDITOR_")}
        return clean | ls.QUIET | ls.at(self.address) | {"AUDITOR_CACHE": str(self.folder / "cache")}

    def run(self, code: str, *words: object) -> subprocess.CompletedProcess[str]:
        command = [self.python, "-c", code, *map(str, words)]
        return subprocess.run(
            command, env=self.variables(), cwd=self.folder, capture_output=True, text=True, timeout=900
        )

    def auditor(self, *words: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = self.run(ls.AUDITOR[2], *words)
        assert done.returncode == status, (words, done.stdout[-2000:], done.stderr[-3000:])
        return done

    def json(self, *words: object):
        return json.loads(self.auditor(*words, "--json").stdout)


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of a fresh environment into which pip installed the example."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    borrowed = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    source = tmp_path_factory.mktemp("source") / "superpixel-ig"
    shutil.copytree(EXAMPLE, source)  # building leaves files behind
    interpreter = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet"]
    done = subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--no-index", source], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert list(packages.glob("superpixel_ig-*.dist-info"))
    return interpreter


@pytest.fixture(scope="module")
def installed(python, tmp_path_factory):
    """The new environment, with a registry behind a real ``mlflow server --app-name auditor`` and the digits in it."""
    folder = tmp_path_factory.mktemp("installed")
    with mlflow_server(folder, "--app-name", "auditor") as address:
        environment = Environment(python, folder, address)
        done = environment.run(REGISTER)
        assert done.stdout.splitlines()[-1:] == [MODEL], done.stderr[-3000:]
        yield environment


def gap(explanation: dict) -> float:
    """Return how far the parts are from the target value."""
    parts = sum(c["contribution"] for c in explanation["concepts"])
    return abs(explanation["bias"] + parts + explanation["residual"] - explanation["target_value"])


def contributions(explanation: dict) -> dict[int, float]:
    return {c["index"]: c["contribution"] for c in explanation["concepts"]}


@pytest.fixture(scope="module")
def fitted(installed) -> dict:
    """What ``auditor fit`` prints of the explainer ``regions``, which is attached then."""
    options = ["--limit", 300, "--name", "regions", "--set", "n_regions=9", "--set", "steps=16"]
    return installed.json("fit", "superpixel-ig", MODEL, "--data", "sklearn:digits", *options)


def test_it_is_fitted_attached_verified_explained_audited_gated_served_and_shown(installed, fitted, tmp_path):
    listed = {row["kind"]: f"{row['package']} {row['version']}" for row in installed.json("kinds")}
    assert listed["superpixel-ig"] == "superpixel-ig 0.1.0"

    assert fitted["kind"] == "superpixel-ig"
    (row,) = installed.json("verify", MODEL)["explainers"]
    assert (row["name"], row["verified"]) == ("regions", True)
    (row,) = installed.json("list", MODEL)
    assert (row["name"], row["kind"], row["digest"]) == ("regions", "superpixel-ig", fitted["digest"])

    digit = installed.folder / "digit.png"
    (explanation,) = installed.json("explain", MODEL, digit)["explanations"]
    assert gap(explanation) < 1e-4
    assert len(explanation["concepts"]) == 9
    page = installed.folder / "page.html"
    installed.auditor("concepts", MODEL, "regions", "--out", page)
    assert page.stat().st_size > 1000

    audit = installed.json("audit", MODEL, "--data", "sklearn:digits", "--images", 30, "--report", tmp_path / "r.html")
    passed = [name for name, m in audit["metrics"].items() if "regions" in name and m["status"] == "passed"]
    assert len(passed) >= 5
    assert "superpixel-ig" in (tmp_path / "r.html").read_text()
    policy = tmp_path / "policy.toml"
    policy.write_text(installed.auditor("policy", "init", MODEL).stdout)
    gate = installed.json("gate", MODEL, "--policy", policy)
    assert gate["verdict"] == "pass"
    assert any("explainer/regions/" in check["metric"] for check in gate["checks"])

    port = free_port()
    command = [installed.python, *ls.AUDITOR[1:], "serve", MODEL, "--port", str(port)]
    served = installed.variables() | {"AUDITOR_SAMPLE_IMAGES": "sklearn:digits"}
    with ls.started(command, port, tmp_path / "serve", served) as live, chromium() as browser:
        status, answer = live.post("/explain?stability=off", digit.read_bytes(), {"content-type": "image/png"})
        assert status == 200, answer
        (same,) = answer["explanations"]
        assert (same["name"], same["kind"], same["digest"]) == ("regions", "superpixel-ig", fitted["digest"])
        assert contributions(same) == pytest.approx(contributions(explanation), abs=1e-6)
        status, gallery = live.get("/gallery/regions")
        assert (status, len(gallery["concepts"])) == (200, 9)

        browser.look(1400, 1000)
        browser.open(f"{live.address}/ui")
        browser.wait("document.querySelectorAll('#samples button').length > 3")
        browser.click("#samples button:nth-child(1)")
        browser.wait("document.querySelectorAll('.contributions tbody tr').length >= 3")
        assert "regions" in browser.text("#explanation")
        assert browser.text("tfoot .ok").startswith("✓ equals")
        browser.click("#tab-gallery")
        browser.wait("document.querySelectorAll('#gallery img, #gallery canvas').length >= 9")
        assert "row 1, column 1" in browser.text("#gallery")
        assert browser.messages() == []

        browser.open(f"{installed.address}/auditor/version?name=digits&version=1")
        browser.wait("!document.querySelector('[data-load]:not([data-done])')")
        shown = browser.text("body")
        assert "superpixel-ig" in shown
        assert "✓ verified" in shown
        assert "explainer/regions/" in shown


@pytest.mark.usefixtures("fitted")
def test_without_the_package_commands_name_the_kind_and_what_to_install(installed):
    without = Environment(Path(sys.executable), installed.folder, installed.address)
    row = without.json("list", MODEL)[0]
    assert row["verified"] is True
    assert row["needs"].startswith(SENTENCE)
    assert "pip install superpixel-ig" in row["needs"]
    assert without.json("verify", MODEL)["explainers"][0]["verified"] is True
    for words in (("explain", MODEL, "digit.png"), ("concepts", MODEL, "regions", "--out", "page2.html")):
        done = without.auditor(*words, status=2)
        (line,) = done.stderr.splitlines()
        assert SENTENCE in line
        assert "pip install superpixel-ig" in line
    assert not (installed.folder / "page2.html").exists()
