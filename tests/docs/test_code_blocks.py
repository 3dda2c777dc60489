"""Code blocks of README and of the pages: every command exists as it is written, and what can run by itself is run."""

import ast
import json
import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
import tomllib
import yaml

from auditor.cli import auditor

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", re.S | re.M)
# pages whose blocks are run as they stand, in a folder with photos/ and a registry that has models:/birds
RUN = (
    *("README.md", "docs/kinds/index.md", "docs/kinds/nmf.md", "docs/how-to/audit-in-ci.md"),
    *(
        "docs/how-to/your-data-and-models.md",
        "docs/how-to/write-a-policy.md",
        "docs/how-to/large-data.md",
        "docs/how-to/keys.md",
    ),
)
NOT_RUN = ("auditor serve", "make ", "curl ")  # servers and whole builds have tests of their own


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page in some languages, without the margin of a list."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [re.sub(rf"^{margin}", "", code, flags=re.M) for margin, language, code in found if language in languages]


def commands(page: Path) -> list[list[str]]:
    """The command lines of a page's blocks; a pipe or a file ends one."""
    lines = []
    for code in blocks(page, "sh", "console", "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            cut = next((i for i, word in enumerate(words) if word in ("|", ">", "&&", ";", "…")), len(words))
            lines.append(words[:cut])
    return [words for words in lines if words]


AUDITOR = [(page, words) for page in PAGES for words in commands(page) if words[0] == "auditor"]


def test_the_pages_have_commands():
    assert len(AUDITOR) > 60


@pytest.mark.parametrize(("page", "words"), AUDITOR, ids=[f"{p.stem}: {' '.join(w)[:60]}" for p, w in AUDITOR])
def test_a_command_exists_with_its_options(page, words):
    command, rest = auditor, words[1:]
    context = click.Context(auditor, info_name="auditor")
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        if command.name == "log" and rest[0] not in command.commands:
            rest = ["show", *rest]  # as the group itself does
        _, command, rest = command.resolve_command(context, list(rest))  # raises where there is no such command
        context = click.Context(command, parent=context)
    command.make_parser(context).parse_args(list(rest))  # raises what click would say of an unknown option


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_blocks_of_other_languages_can_be_read(page):
    for code in blocks(page, "python"):
        ast.parse(code)
    for code in blocks(page, "toml"):
        tomllib.loads(code)
    for code in blocks(page, "json"):
        json.loads(code)
    for code in blocks(page, "yaml"):
        yaml.safe_load(code)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, store):
    """A folder with photos/, sparrow.jpg and a registry with models:/birds, versions 1 (champion) to 8."""
    import mlflow

    from auditor import fit, open_data, plugins
    from auditor.demo import bird_versions
    from auditor.demo.birds import birds, write

    folder = tmp_path_factory.mktemp("blocks")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    client = mlflow.MlflowClient()
    client.create_experiment("blocks", artifact_location=(folder / "artifacts").as_uri())
    photos = open_data(write(birds(150, 0, stamped=False), folder / "photos"))
    shutil.copy(next((folder / "photos" / "hawk").glob("*.png")), folder / "sparrow.jpg")
    subjects = [bird_versions.train_birds(photos, seed, "training") for seed in (0, 1)]
    for version in range(1, 9):
        uri_of = plugins.log_subject(subjects[version == 8], "birds", experiment="blocks")
        if version in (1, 8):
            subject = plugins.load_subject(uri_of)
            plugins.attach(
                fit("nmf", subject, photos, rank=4, refits=1), uri_of, "concepts", subject=subject, attach_anyway=True
            )
    client.set_registered_model_alias("birds", "champion", "1")
    return folder, uri


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_the_blocks_of_a_page_run(name, workspace, monkeypatch):
    """Every block in order, in one folder; exit 1 of a gate is a verdict, 2 is an error."""
    import mlflow

    from tests.conftest import Cli

    folder, uri = workspace
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(folder)
    page = ROOT / name
    for code in blocks(page, "toml"):
        Path("audit.toml" if "[fit]" in code else "policy.toml").write_text(code)
    for code in blocks(page, "sh", "python"):
        if re.match(r"(from|import|def) ", code):
            exec(compile(code, name, "exec"), {})
            continue
        for line in code.replace("\\\n", " ").splitlines():
            if not line.strip() or line.startswith(NOT_RUN):
                continue
            words = shlex.split(line, comments=True)
            into = words.index(">") if ">" in words else len(words)
            result = Cli()(*words[1:into])
            allowed = (0, 1) if words[1] == "gate" else (0,)
            assert result.exit_code in allowed, (line, result.output[-800:])
            if into < len(words):
                Path(words[into + 1]).write_text(result.stdout)
