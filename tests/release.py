"""Build wheel and sources in dist/ and look at what is in them: ``make release``.

The wheel is built from the unpacked sources, as pip does it. A warning of setuptools is an error; so is a version that
the changelog does not know, a module or template that the wheel lacks, and a source distribution without docs or tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "auditor": "auditor",
    "kernels": "auditor/kernels",
    "plugins": "auditor/plugins",
    "service": "auditor/service",
}
IN_SOURCES = ("docs/index.md", "mkdocs.yml", "tests/conftest.py", "constraints.txt", "Makefile", "CHANGELOG.md")
BUILD = "import setuptools.build_meta as b, sys; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
WARNING = re.compile(r"_Warning|DeprecationWarning|SetuptoolsDeprecation|is absent from the `packages`")


def build(what: str, folder: Path, to: Path) -> Path:
    """Build ``sdist`` or ``wheel`` of a folder; a warning ends it."""
    line = [sys.executable, "-W", "default", "-c", BUILD, what, str(to)]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if done.returncode:
        sys.exit(f"make release: {what} cannot be built:\n{output[-2000:]}")
    warned = [text for text in output.splitlines() if WARNING.search(text)]
    if warned:
        sys.exit(f"make release: {what} warns:\n" + "\n".join(warned))
    return to / done.stdout.splitlines()[-1].strip()


def missing_from_wheel(names: set[str]) -> list[str]:
    """Return what lies in the four folders and not in the wheel."""
    files = [
        p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts
    ]
    expected = set()
    for path in files:
        top, *rest = path.relative_to(ROOT).parts
        expected.add("/".join([FOLDERS[top], *rest]))
    return sorted(expected - names)


def version() -> str:
    """Return the version that the package says it has."""
    (found,) = re.findall(r'^__version__ = "([^"]+)"$', (ROOT / "auditor" / "__init__.py").read_text(), re.M)
    return str(found)


def main() -> None:
    """Build both and check them."""
    release = version()
    if f"## [{release}]" not in (ROOT / "CHANGELOG.md").read_text():
        sys.exit(f"make release: CHANGELOG.md has no section [{release}].")
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    sources = build("sdist", ROOT, dist)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(sources) as archive:
        archive.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        lacking = [name for name in IN_SOURCES if not (unpacked / name).is_file()]
        if lacking:
            sys.exit(f"make release: the sources lack {', '.join(lacking)}.")
        wheel = build("wheel", unpacked, dist)
    with zipfile.ZipFile(wheel) as content:
        lacking = missing_from_wheel(set(content.namelist()))
    if lacking:
        sys.exit(f"make release: the wheel lacks {', '.join(lacking[:10])}.")
    if release not in wheel.name or release not in sources.name:
        sys.exit(f"make release: {wheel.name} and {sources.name} are not of version {release}.")
    sys.stdout.write(f"{sources.relative_to(ROOT)}\n{wheel.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
