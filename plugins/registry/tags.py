"""Tags: every tag this package sets on a model version, and the JSON inside it.

A tag is the commit point of what it names: artifacts are uploaded first, then one tag makes them visible. Tags can be
written by anybody who may write to the registry, so nothing in them is trusted: reading never fails, a value of the
wrong shape is a tag with a ``problem``, and ``usable()`` turns the problem into an error.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from auditor.errors import ModelError, TamperError

OURS = "auditor."
EXPLAINER = "auditor.explainer."  # followed by the explainer's name
AUDIT = "auditor.audit"
GATE = "auditor.gate"
ONNX = "auditor.onnx"
SUBJECT = "auditor.subject"
MODEL = "auditor.model"
LOG = "auditor.log"  # the newest entry of the model's history about the version
LINEAGE = "auditor.lineage"
STUDY = "auditor.study."  # followed by the study's name
STUDY_RESULTS = "auditor.study_results."  # followed by the study's name
VERDICT = "auditor.verdict"  # a few words for people; nothing reads it
CARD = "card."  # followed by a field of the model card; set by people
SEALED = (EXPLAINER, AUDIT, GATE, ONNX, MODEL, LINEAGE, STUDY, STUDY_RESULTS)  # tags that carry a checksum
PICTURE = "findings.png"  # of an audit's files: what the classes hang on
RUN_AUDIT = "auditor.audit_digest"  # of a run that evaluated a model

SUBJECT_SCHEMA = 1
DIGEST = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T", bound="_Tag")


@dataclass(frozen=True, kw_only=True)
class _Tag:
    """What all tags share: the problem, and how they are written."""

    problem: str = ""

    def usable(self: T) -> T:
        """Return the tag itself, or raise its problem."""
        if self.problem:
            raise TamperError(self.problem)
        return self

    def encode(self) -> str:
        """Return the tag's value: canonical JSON that carries its own checksum."""
        value = json.loads(json.dumps({k: v for k, v in asdict(self).items() if k not in ("problem", "name")}))
        return json.dumps({**value, "checksum": _checksum(value)}, sort_keys=True)


@dataclass(frozen=True)
class ExplainerTag(_Tag):
    """An attached explainer: where its artifact lies, and the digest of its manifest."""

    name: str
    kind: str = ""
    digest: str = ""
    location: str = ""  # relative to the model's artifact folder
    time: str = ""


@dataclass(frozen=True)
class AuditTag(_Tag):
    """The latest audit: where its files lie, the digest of ``audit.json``, and what it was made of."""

    digest: str = ""
    location: str = ""
    time: str = ""
    data: str = ""
    data_digest: str = ""
    seed: int | str = ""
    n_metrics: int = 0
    explainers: dict[str, str | None] = field(default_factory=dict)  # name: digest; None for one that did not verify
    files: dict[str, str] = field(default_factory=dict)  # name: sha256, of what lies beside audit.json


@dataclass(frozen=True)
class GateTag(_Tag):
    """The latest verdict of a gate: ``pass``, ``fail``, or ``unknown`` with a problem."""

    verdict: str = "unknown"
    time: str = ""
    policy: str = ""
    policy_digest: str = ""
    baseline: str = ""
    checks: int = 0
    failed: tuple[str, ...] = ()
    audit_digest: str = ""
    digest: str = ""  # of verdict.json; empty where a release before wrote no file
    location: str = ""
    signature: str = ""  # where its signature lies, a hint: the signature itself is checked


@dataclass(frozen=True)
class OnnxTag(_Tag):
    """The exported graph: where it lies, the digest of its manifest, and what it was made of."""

    digest: str = ""
    location: str = ""
    time: str = ""
    layers: tuple[str, ...] = ()
    features: tuple[str, ...] = ()  # digests of the heads inside


@dataclass(frozen=True)
class ModelTag(_Tag):
    """The pin of a model: the sha256 of each of its files by path, and the digest over that list."""

    digest: str = ""
    files: dict[str, str] = field(default_factory=dict)  # empty where there are too many for a tag
    time: str = ""


@dataclass(frozen=True)
class LineageTag(_Tag):
    """Where a version came from that was made out of another, with an explainer's network or without its concepts."""

    source: str = ""
    source_digest: str = ""
    explainer: str = ""
    explainer_digest: str = ""
    kind: str = ""
    layer: str | None = None
    time: str = ""
    change: str = ""  # what was changed, in words; empty where the network is the explainer's own


@dataclass(frozen=True)
class StudyTag(_Tag):
    """A study, or the results of one: where its files lie, and the digest of its manifest or of ``results.json``."""

    name: str
    digest: str = ""
    location: str = ""  # relative to the model's artifact folder
    time: str = ""


def altered(tags: Mapping[str, str]) -> list[str]:
    """Return the names of our tags that are not as they were written, by their checksums; older ones have none.

    >>> value = GateTag("pass", "2026-11-18").encode()
    >>> altered({GATE: value}), altered({GATE: value.replace("11-18", "11-19")}), altered({GATE: '{"verdict": "pass"}'})
    ([], ['auditor.gate'], [])
    """
    return sorted(key for key, value in tags.items() if key.startswith(SEALED) and not _is_whole(value))


def written_by(key: str) -> str:
    """Return what writes a tag of ours.

    >>> written_by("auditor.explainer.c")
    'auditor fit'
    """
    writers = {AUDIT: "auditor audit", GATE: "auditor gate", ONNX: "auditor export", EXPLAINER: "auditor fit"}
    writers |= {STUDY: "auditor study new", STUDY_RESULTS: "auditor study results"}
    return next((writer for prefix, writer in writers.items() if key.startswith(prefix)), "registering the model again")


def _is_whole(value: str) -> bool:
    document = _object(value)
    if not document:
        return False
    rest = {k: v for k, v in document.items() if k != "checksum"}
    if "checksum" not in document:  # of a release before
        return set(document) <= FIELDS
    return document["checksum"] == _checksum(rest) and json.dumps(document, sort_keys=True) == value


def _checksum(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def explainer_names(tags: Mapping[str, str]) -> list[str]:
    """Return the names of the attached explainers.

    >>> explainer_names({"auditor.explainer.b": "", "auditor.explainer.a": "", "owner": "me"})
    ['a', 'b']
    """
    return sorted(key.removeprefix(EXPLAINER) for key in tags if key.startswith(EXPLAINER))


def explainer_tags(tags: Mapping[str, str]) -> list[ExplainerTag]:
    """Return the tags of all attached explainers, in the order of their names."""
    return [_explainer(name, tags[EXPLAINER + name]) for name in explainer_names(tags)]


def explainer_tag(tags: Mapping[str, str], name: str) -> ExplainerTag | None:
    """Return the tag of one explainer; None when there is none of this name."""
    return _explainer(name, tags[EXPLAINER + name]) if EXPLAINER + name in tags else None


FIELDS = frozenset(
    field.name
    for tag in (ExplainerTag, AuditTag, GateTag, OnnxTag, ModelTag, LineageTag, StudyTag)
    for field in fields(tag)
)


def study_tags(tags: Mapping[str, str], prefix: str = STUDY) -> list[StudyTag]:
    """Return the tags of all studies of a version, or (``STUDY_RESULTS``) of their results, by their names.

    >>> study_tags({STUDY + "gulls": "{}"})[0].problem
    'the tag auditor.study.gulls is not what was attached; attach the study again.'
    """
    keys = sorted(key for key in tags if key.startswith(prefix))
    return [_study(key, prefix, tags[key]) for key in keys]


def _study(key: str, prefix: str, value: str) -> StudyTag:
    texts = {k: _text(_object(value).get(k)) for k in ("digest", "location", "time")}
    remedy = "what was attached; attach the study again"
    problem = _pointer_problem(key, texts["digest"], texts["location"], remedy)
    name = key.removeprefix(prefix)
    return StudyTag(name, problem=problem) if problem else StudyTag(name, **texts)


def audit_tag(tags: Mapping[str, str]) -> AuditTag | None:
    """Return the tag of the latest audit; None when there is none."""
    if AUDIT not in tags:
        return None
    value = _object(tags[AUDIT])
    digest, location = _text(value.get("digest")), _text(value.get("location"))
    problem = _pointer_problem(AUDIT, digest, location, "what an audit writes; run the audit again")
    if problem:
        return AuditTag(problem=problem)
    return AuditTag(
        digest=digest,
        location=location,
        time=_text(value.get("time")),
        data=_text(value.get("data")),
        data_digest=_text(value.get("data_digest")),
        seed=_text(value.get("seed")),
        n_metrics=_count(value.get("n_metrics")),
        explainers={name: text or None for name, text in _texts(value.get("explainers")).items()},
        files=_texts(value.get("files")),
    )


def gate_tag(tags: Mapping[str, str]) -> GateTag | None:
    """Return the tag of the latest verdict; None when there is none.

    >>> gate_tag({"auditor.gate": "[]"}).problem
    'the tag auditor.gate is not what a gate writes; run the gate again.'
    """
    if GATE not in tags:
        return None
    value = _object(tags[GATE])
    if value.get("verdict") not in ("pass", "fail"):
        return GateTag(problem=f"the tag {GATE} is not what a gate writes; run the gate again.")
    names = (
        "verdict",
        "time",
        "policy",
        "policy_digest",
        "baseline",
        "audit_digest",
        "digest",
        "location",
        "signature",
    )
    texts = {k: _text(value.get(k)) for k in names}
    if texts["digest"]:
        problem = _pointer_problem(GATE, texts["digest"], texts["location"], "what a gate writes; run the gate again")
        if problem:
            return GateTag(problem=problem)
    return GateTag(**texts, checks=_count(value.get("checks")), failed=_sequence(value.get("failed")))


def onnx_tag(tags: Mapping[str, str]) -> OnnxTag | None:
    """Return the tag of the exported graph; None when there is none."""
    if ONNX not in tags:
        return None
    value = _object(tags[ONNX])
    digest, location = _text(value.get("digest")), _text(value.get("location"))
    problem = _pointer_problem(ONNX, digest, location, "what an export writes; run auditor export again")
    if problem:
        return OnnxTag(problem=problem)
    return OnnxTag(
        digest=digest,
        location=location,
        time=_text(value.get("time")),
        layers=_sequence(value.get("layers")),
        features=_sequence(value.get("features")),
    )


def model_tag(tags: Mapping[str, str]) -> ModelTag | None:
    """Return the pin of the model's files; None when there is none."""
    if MODEL not in tags:
        return None
    value = _object(tags[MODEL])
    files, digest = _texts(value.get("files")), _text(value.get("digest"))
    if DIGEST.fullmatch(digest) is None or (files and digest_of_files(files) != digest):
        return ModelTag(problem=f"the tag {MODEL} is not what was pinned; register the model as a new version.")
    return ModelTag(digest, files, _text(value.get("time")))


def digest_of_files(files: Mapping[str, str]) -> str:
    """Return the sha256 over a list of files, each a path with its own sha256."""
    return hashlib.sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()


def encode_subject(description: Mapping[str, Any]) -> str:
    """Return the value of the tag that says how to use the model: class names, size, mean and std."""
    return json.dumps(description, sort_keys=True)


def decode_subject(value: str | bytes, where: str) -> dict[str, Any]:
    """Return how to use the model, from the tag or from ``subject.json``, which hold the same."""
    description = _object(value)
    if not description:
        raise TamperError(f"{where} is not readable JSON; run auditor describe again.")
    schema = description.get("schema_version", 1)
    if not isinstance(schema, int):
        raise TamperError(f"{where} is not what was attached; run auditor describe again.")
    if schema > SUBJECT_SCHEMA:
        raise ModelError(f"{where} is of a newer version; upgrade mlflow-auditor.")
    return description


def card_fields(tags: Mapping[str, str], fields: Iterable[str]) -> dict[str, str]:
    """Return the fields of the model card that people have set as tags ``card.<field>``."""
    return {name: tags[CARD + name] for name in fields if tags.get(CARD + name)}


def what_is_served(tags: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the tags that a server depends on: all of ours but those that change nothing served."""
    unserved = (GATE, LOG, STUDY, STUDY_RESULTS)
    return sorted((k, v) for k, v in tags.items() if k.startswith(OURS) and not k.startswith(unserved))


def safe_path(path: str) -> str:
    """Return a path that stays below the model's folder, or an error.

    >>> safe_path("explainers/concepts/0123/manifest.json")
    'explainers/concepts/0123/manifest.json'
    """
    if not _is_safe(path):
        raise TamperError("the location in a tag is not below the model's own folder.")
    return path


def _is_safe(path: str) -> bool:
    plain = posixpath.normpath(path) == path and path.isprintable() and "\\" not in path
    return plain and path not in (".", "") and not path.startswith("/") and path.split("/", 1)[0] != ".."


def _explainer(name: str, value: str) -> ExplainerTag:
    texts = {k: _text(_object(value).get(k)) for k in ("kind", "digest", "location", "time")}
    remedy = "what was attached; attach the explainer again"
    problem = _pointer_problem(EXPLAINER + name, texts["digest"] if texts["kind"] else "", texts["location"], remedy)
    return ExplainerTag(name, problem=problem) if problem else ExplainerTag(name, **texts)


def _pointer_problem(key: str, digest: str, location: str, remedy: str) -> str:
    """Return why a tag cannot point to anything: it takes a whole digest and a location below the model's folder."""
    if DIGEST.fullmatch(digest) is None or not location:
        return f"the tag {key} is not {remedy}."
    return "" if _is_safe(location) else f"the location in the tag {key} is not below the model's own folder."


def _object(value: str | bytes) -> dict[str, Any]:
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _text(value: Any) -> str:
    """Return a string or number as text that can be written anywhere; half a surrogate pair cannot."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    return str(value).encode("utf-8", "replace").decode()


def _texts(value: Any) -> dict[str, str]:
    return {_text(k): _text(v) for k, v in value.items()} if isinstance(value, dict) else {}


def _sequence(value: Any) -> tuple[str, ...]:
    return tuple(_text(item) for item in value) if isinstance(value, list) else ()


def _count(value: Any) -> int:
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
