"""Studies of registered versions: drawn, attached like an explainer, and their results.

A study's folder goes to ``auditor/studies/<name>/<digest12>/`` beside the model, its results to
``auditor/studies/<name>/results/<digest12>/``; one tag each, set last, makes them visible. The results' metrics,
``study/<name>/<metric>/<condition>``, become part of the version's audits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import OptionError, StudyError, TamperError
from auditor.explainers.manifest import check_content, seal, sha256, unseal
from auditor.metrics.measure import Measure, skipped
from auditor.plugins.registry import history, tags
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve, set_tag
from auditor.plugins.registry.metrics_log import logged_metrics
from auditor.study.design import Study, StudyConfig, shows
from auditor.study.folder import read_study, write_study

if TYPE_CHECKING:
    from auditor.auditing.record import Audit
    from auditor.data.source import Data
    from auditor.progress import Progress

RESULTS = "results.json"
AGAIN = "run auditor study results again"
CHANGED = "the study {name} was drawn from the model as it was before it was described anew; draw another"


@dataclass(frozen=True)
class FoundStudy:
    """A study read and verified, and the version it was read from, if any."""

    study: Study
    pictures: Mapping[str, bytes]
    digest: str
    version: ModelVersion | None = None


@dataclass(frozen=True)
class Wanted:
    """One data set of a study to draw: the model to ask, where its images are, its classes, its name."""

    model: str
    data: Data
    name: str
    classes: tuple[str, ...] | str = "alike"


def new_study(
    wanted: Sequence[Wanted],
    config: StudyConfig,
    folder: Path,
    *,
    attach: bool = True,
    allow_pickle: bool | None = None,
    progress: Progress | None = None,
) -> tuple[Study, str]:
    """Draw a study from registered versions, write it to ``folder``, attach it to each; return it and its digest."""
    from auditor.plugins.registry.attachments import load
    from auditor.plugins.registry.subjects import load_subject
    from auditor.progress import silent
    from auditor.study.drawing import Source, draw_study

    if folder.exists() and any(folder.iterdir()):
        raise OptionError(f"study new: {folder} is not empty; choose another --out.")
    helping = [name for name in config.conditions if shows(name) == "concepts"]
    versions = {uri: resolve(uri, registered=True) for uri in dict.fromkeys(w.model for w in wanted)}
    subjects = {uri: load_subject(version, allow_pickle=allow_pickle) for uri, version in versions.items()}
    explainers = {
        uri: {name: load(version, name, subject=subjects[uri]) for name in helping} for uri, version in versions.items()
    }
    sources = [
        Source(w.name, subjects[w.model], w.data, explainers[w.model], versions[w.model].label, w.classes)
        for w in wanted
    ]
    study, pictures = draw_study(sources, config, progress or silent)
    digest = write_study(folder, study, pictures)
    if attach:
        for version in versions.values():
            attach_study(folder, version, study, digest)
    return study, digest


def attach_study(folder: Path, version: ModelVersion, study: Study, digest: str) -> None:
    """Attach a drawn study to a version; the tag is set last."""
    _check_is_of(study, version)
    location = f"auditor/studies/{study.name}/{digest[:12]}"
    with mlflow_errors(f"attach the study {study.name} to {version.label}"):
        version.repository().log_artifacts(str(folder), location)
        with tempfile.TemporaryDirectory(prefix="auditor-") as copy:
            read_study(version.download(location, Path(copy)), digest)
        set_tag(version, tags.STUDY + study.name, tags.StudyTag(study.name, digest, location, _now()).encode())
        history.append(version, "study", {f"study/{study.name}": digest})


def find_study(text: str) -> FoundStudy:
    """Return the study that a user names: a folder, ``models:/birds/3#gulls``, or the version's only one."""
    if not text.startswith(("models:/", "runs:/")):
        return FoundStudy(*read_study(text))
    uri, _, name = text.partition("#")
    version = resolve(uri, registered=True)
    attached = {tag.name: tag for tag in tags.study_tags(version.tags)}
    if not name and len(attached) == 1:
        (name,) = attached
    if name not in attached:
        listed = ", ".join(attached) or "none"
        what = f"no study called {name!r}" if name else "no single study"
        raise StudyError(f"{version.label} has {what}; attached are: {listed}. Name one as {uri}#NAME.")
    tag = attached[name].usable()
    with mlflow_errors(f"study {name} of {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        study, pictures, digest = read_study(version.download(tag.location, Path(folder)), tag.digest)
    _check_is_of(study, version)
    return FoundStudy(study, pictures, digest, version)


def _check_is_of(study: Study, version: ModelVersion) -> None:
    if version.label not in study.models:
        raise StudyError(
            f"the study {study.name!r} was drawn from {', '.join(study.models)}, not from {version.label}; draw one "
            "from this version (auditor study new)."
        )


def store_results(version: ModelVersion, study: Study, document: Mapping[str, Any], pages: Mapping[str, bytes]) -> str:
    """Store the results of a study with the version, log their metrics, and put them into its stored audit.

    ``document`` holds ``metrics`` by name; ``pages`` are further files (the page, the table). Returns the digest.
    """
    content = seal(document)
    digest = sha256(content)
    location = f"auditor/studies/{study.name}/results/{digest[:12]}"
    measures = {name: Measure.from_json(entry) for name, entry in document["metrics"].items()}
    with mlflow_errors(f"results of {study.name}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        for name, page in {RESULTS: content, **pages}.items():
            (Path(folder) / name).write_bytes(page)
        version.repository().log_artifacts(folder, location)
        check_content(_read(version, f"{location}/{RESULTS}"), digest, f"{location}/{RESULTS}", AGAIN)
        values = {name: m.value for name, m in measures.items() if m.is_taken}
        run_name = f"study {study.name} of {version.name}/{version.version}"
        with logged_metrics(version, values, run_name=run_name, data_digest=study.data[0].digest):
            tag = tags.StudyTag(study.name, digest, location, _now())
            set_tag(version, tags.STUDY_RESULTS + study.name, tag.encode())
        history.append(version, "study results", {f"study/{study.name}/{RESULTS}": digest})
    return digest


def study_measures(version: ModelVersion, model_digest: str = "") -> tuple[dict[str, Measure], dict[str, str]]:
    """Return the metrics of all studies with results, and the digest of each; what does not verify is an error.

    With ``model_digest`` those of a study that was drawn from the model as it was before are skipped, with the reason.
    """
    measures: dict[str, Measure] = {}
    digests: dict[str, str] = {}
    for tag in tags.study_tags(version.tags, tags.STUDY_RESULTS):
        where = f"{RESULTS} of the study {tag.name} of {version.label}"
        with mlflow_errors(where):
            content = _read(version, f"{tag.usable().location}/{RESULTS}")
        document = unseal(check_content(content, tag.digest, where, AGAIN), where, AGAIN)
        named = f"study/{tag.name}/"
        for name, entry in document.get("metrics", {}).items():
            if not name.startswith(named):
                raise TamperError(f"{where} has a metric {name[:60]!r} of another name; {AGAIN}.")
            measures[name] = Measure.from_json(entry)
            if model_digest and model_digest not in document.get("model_digests", [model_digest]):
                measures[name] = skipped(CHANGED.format(name=tag.name), measures[name].direction)
        digests[tag.name] = tag.digest
    return measures, digests


def with_studies(audit: Audit, version: ModelVersion) -> Audit:
    """Return an audit with the metrics of the version's studies as they are now, those of before left out."""
    measures, digests = study_measures(version, str(audit.model.get("digest", "")))
    if digests == audit.model.get("studies", {}):
        return audit
    metrics = {name: m for name, m in audit.metrics.items() if not name.startswith("study/")}
    model = {k: v for k, v in audit.model.items() if k != "studies"} | ({"studies": digests} if digests else {})
    return replace(audit, metrics=metrics | measures, model=model)


def check_studies(version: ModelVersion) -> None:
    """Raise when a study of the version, or the results of one, are not what was attached."""
    for tag in tags.study_tags(version.tags):
        tag.usable()
        find_study(f"{version.label}#{tag.name}")
    study_measures(version)


def _read(version: ModelVersion, path: str) -> bytes:
    repository = version.repository()
    if not any(entry.path == path for entry in repository.list_artifacts(str(Path(path).parent)) or []):
        raise TamperError(f"{path} of {version.label} is missing; {AGAIN}.")
    with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        return Path(repository.download_artifacts(path, folder)).read_bytes()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
