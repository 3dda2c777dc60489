"""The way of an installed kind through the whole product, in a process of its own; prints what came out as JSON."""

import io
import json
import os
import sys
import time
from pathlib import Path


def main(folder: Path) -> None:
    """Do everything in an embedded store in ``folder``."""
    import mlflow
    import torch
    from click.testing import CliRunner
    from PIL import Image

    from auditor import AuditConfig, plugins
    from auditor.attribution.heatmap import to_rgb
    from auditor.cli import auditor
    from auditor.data.source import open_data
    from auditor.demo import train_digits
    from auditor.release.policy import parse_policy
    from auditor.release.policy_draft import draft_policy

    uri = f"sqlite:///{folder / 'mlflow.db'}"
    os.environ["MLFLOW_TRACKING_URI"] = os.environ["MLFLOW_REGISTRY_URI"] = uri
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    mlflow.MlflowClient().create_experiment("tests", artifact_location=(folder / "artifacts").as_uri())
    model = plugins.log_subject(train_digits(0)[0], "digits", experiment="tests")

    def command(*words: str):
        done = CliRunner().invoke(auditor, [*words, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    result = {"uri": uri}
    result["kinds"] = {row["kind"]: f"{row['package']} {row['version']}" for row in command("kinds")}
    command(
        "fit", "superpixel-ig", model, "--data", "sklearn:digits", "--limit", "300",
        "--name", "regions", "--set", "n_regions=9", "--set", "steps=16",
    )  # fmt: skip
    result["verified"] = [row["verified"] for row in command("verify", model)["explainers"]]
    assert [row["name"] for row in command("list", model)] == ["regions"]

    subject = plugins.load_subject(model)
    image = next(open_data("sklearn:digits").batches(subject, 8)).images[3]
    png = folder / "digit.png"
    Image.fromarray(to_rgb(image)[..., 0]).save(png)
    (explanation,) = command("explain", model, str(png), "--explainers", "regions")["explanations"]
    result["terminal"] = sorted(c["contribution"] for c in explanation["concepts"])
    result["gap"] = gap(explanation)

    config = AuditConfig(images=30, seed=0)
    audit = plugins.run_audit(model, "sklearn:digits", config=config, subject=subject)
    result["audited"] = sum(m.status == "passed" for name, m in audit.metrics.items() if "regions" in name)
    gate = plugins.run_gate(model, parse_policy(draft_policy(audit), "policy.toml"))
    result["gate"] = gate.verdict

    result |= served(model, png)
    result["page"] = audits_page(uri)
    torch.set_num_threads(1)
    sys.stdout.write("\n" + json.dumps(result) + "\n")


def gap(explanation: dict) -> float:
    """Return how far the parts are from the target value."""
    parts = sum(c["contribution"] for c in explanation["concepts"])
    return abs(explanation["bias"] + parts + explanation["residual"] - explanation["target_value"])


def served(model: str, png: Path) -> dict:
    """Ask the service's ASGI application."""
    from starlette.testclient import TestClient

    os.environ |= {"AUDITOR_MODEL": model, "AUDITOR_POLL_S": "3600", "AUDITOR_LOG_REQUESTS": "false"}
    from auditor.service.service import AuditorService

    with TestClient(AuditorService.to_asgi(), raise_server_exceptions=False) as http:
        deadline = time.monotonic() + 300
        while http.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline, http.get("/model").text
            time.sleep(0.1)
        content = io.BytesIO(png.read_bytes())
        answer = http.post("/explain", files={"image": ("digit.png", content)}, data={"stability": "off"})
        assert answer.status_code == 200, answer.text
        (explanation,) = answer.json()["explanations"]
        listed = http.get("/explainers").json()
        rows = listed["explainers"] if isinstance(listed, dict) else listed
        return {
            "rest": sorted(c["contribution"] for c in explanation["concepts"]),
            "rest_gap": gap(explanation),
            "explainers": [[row["name"], row["kind"], row["n_concepts"]] for row in rows],
            "gallery": len(http.get("/gallery/regions").json()["concepts"]),
            "ui": http.get("/ui").status_code,
        }


def audits_page(uri: str) -> str:
    """Return the page of the version inside MLflow's own application."""
    from mlflow.server import handlers
    from starlette.testclient import TestClient

    os.environ["_MLFLOW_SERVER_FILE_STORE"] = uri
    handlers._tracking_store = handlers._model_registry_store = None
    from auditor.plugins.server import create_app

    page = TestClient(create_app(), base_url="http://localhost").get("/auditor/version?name=digits&version=1&full=1")
    assert page.status_code == 200, page.text
    assert "superpixel-ig" in page.text
    return page.text


if __name__ == "__main__":
    main(Path(sys.argv[1]))
