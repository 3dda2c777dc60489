"""The bento: it installs the locked packages and no others, and holds every folder the service imports."""

from pathlib import Path

import yaml

from tests.locking import bento_requirements, closure, pinned

ROOT = Path(__file__).parent.parent.parent


def test_it_installs_what_the_project_needs_each_file_by_its_hash():
    bento = yaml.safe_load((ROOT / "bentofile.yaml").read_text())
    assert bento["python"]["lock_packages"] is False
    lock = (ROOT / bento["python"]["requirements_txt"]).read_text()
    entries = {entry.partition("==")[0]: entry for entry in lock.split("\n") if "==" in entry}
    needed = closure(bento_requirements()) & set(pinned())
    assert needed <= set(entries), f"run make lock: {sorted(needed - set(entries))}"
    assert {"torch", "mlflow", "bentoml", "onnxruntime", "starlette"} <= needed
    assert not {"pytest", "ruff", "mypy"} & set(entries)


def test_every_folder_is_included():
    bento = yaml.safe_load((ROOT / "bentofile.yaml").read_text())
    assert {f"{name}/**" for name in ("auditor", "kernels", "plugins", "service")} <= set(bento["include"])
    module, _, name = bento["service"].partition(":")
    assert (ROOT / (module.replace(".", "/") + ".py")).is_file()
    assert name == "AuditorService"
