"""The version in one place, and what `make release` refuses."""

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib

import auditor
from tests import release

ROOT = Path(__file__).parent.parent


def test_the_version_is_said_once_and_the_changelog_has_it():
    assert release.version() == auditor.__version__
    assert re.search(
        rf"^## \[{re.escape(auditor.__version__)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "auditor.__version__"}


def test_the_terminal_says_it(cli):
    assert auditor.__version__ in cli("--version").stdout


def test_a_wheel_without_a_template_is_noticed():
    files = {p for p in (ROOT / "auditor").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    names = {f"auditor/{p.relative_to(ROOT / 'auditor').as_posix()}" for p in files}
    lacking = release.missing_from_wheel(names)
    assert all(not name.startswith("auditor/pages") for name in lacking)
    assert "auditor/service/page/index.html" in lacking
    style = "auditor/pages/templates/style.css"
    assert style in release.missing_from_wheel(names - {style})


def test_a_warning_ends_a_build(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "BUILD", "import warnings; warnings.warn('_Warning: it is absent'); print('x.whl')")
    with pytest.raises(SystemExit, match="wheel warns"):
        release.build("wheel", tmp_path, tmp_path)
    monkeypatch.setattr(release, "BUILD", "raise SystemExit(3)")
    with pytest.raises(SystemExit, match="cannot be built"):
        release.build("wheel", tmp_path, tmp_path)


@pytest.mark.slow
def test_the_release_is_built_and_its_client_needs_no_torch(tmp_path):
    """Wheel and sources, and the service's client from the wheel in an environment that has httpx and pydantic only."""
    release.main()
    (wheel,) = (ROOT / "dist").glob(f"*{release.version()}*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path / "site")
    light = ["httpx", "httpcore", "h11", "anyio", "idna", "certifi", "pydantic", "pydantic_core", "annotated_types"]
    light += ["typing_extensions", "typing_inspection", "sniffio"]
    for name in light:
        try:
            files = importlib.metadata.files(name.replace("_", "-")) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            target = tmp_path / "site" / str(file)
            if ".." not in file.parts and file.locate().is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.locate().read_bytes())
    use = "from auditor.service.client import Client; import auditor; print(auditor.__version__)"
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {use}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == release.version(), done.stderr
