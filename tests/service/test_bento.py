"""The bento: its requirements are the project's, and it holds every folder the service imports."""

from pathlib import Path

import tomllib
import yaml

ROOT = Path(__file__).parent.parent.parent


def test_requirements_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expected = project["dependencies"] + [
        item for extra in ("serve", "onnx") for item in project["optional-dependencies"][extra]
    ]
    bento = yaml.safe_load((ROOT / "bentofile.yaml").read_text())
    assert sorted(bento["python"]["packages"]) == sorted(expected), "copy the new requirements into bentofile.yaml"
    assert bento["python"]["lock_packages"] is False


def test_every_folder_is_included():
    bento = yaml.safe_load((ROOT / "bentofile.yaml").read_text())
    assert {f"{name}/**" for name in ("auditor", "kernels", "plugins", "service")} <= set(bento["include"])
    module, _, name = bento["service"].partition(":")
    assert (ROOT / (module.replace(".", "/") + ".py")).is_file()
    assert name == "AuditorService"
