"""Logged state: what a model's versions and aliases are, held against what the model's history says they should be.

The newest entry about a thing says what it is: a deed that was never noted, and a tag or an alias set back to what it
was, differ from it. What was begun and not noted as done may be either, as a killed process leaves it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from auditor.plugins.registry import tags
from auditor.plugins.registry.history import BEGIN, Entry
from auditor.plugins.registry.location import ModelVersion, mlflow_errors

DEEDS = {"audit": "audit.json", "gate": "verdict.json", "export": "graph"}
EXPLAINER = "explainer/"
GONE = ""
Thing = tuple[str, str]  # a version and a part of it, or "" and an alias


@dataclass
class _Said:
    """What the history says of one thing: its state, the entry that says so, and states begun since."""

    state: str = GONE
    by: int = 0
    begun: set[str] = field(default_factory=set)


def differences(name: str, history: Sequence[Entry]) -> list[Entry]:
    """Return an entry with a problem for everything of a registered model that is not as its history says."""
    from mlflow import MlflowClient

    client = MlflowClient()
    quote = "'" if "'" not in name else '"'
    with mlflow_errors(f"model {name}"):
        versions = client.search_model_versions(f"name = {quote}{name}{quote}", max_results=1000)
        aliases = dict(client.get_registered_model(name).aliases)
    state = {("", alias): str(version) for alias, version in aliases.items()}
    for version in versions:
        state |= {(str(version.version), part): digest for part, digest in parts(version.tags).items()}
    return compare(state, history, {str(version.version) for version in versions})


def contradiction(version: ModelVersion, history: Sequence[Entry]) -> str:
    """Return what of a version is not as an entry of the history says; what no entry speaks of is not looked at."""
    state = {(version.version, part): digest for part, digest in parts(version.tags).items()}
    spoken_of = {thing for thing, then in _said(history).items() if then.by}
    differing = compare({k: v for k, v in state.items() if k in spoken_of}, history, {version.version})
    return next((entry.problem for entry in differing if entry.version), "")


def parts(version_tags: Mapping[str, str]) -> dict[str, str]:
    """Return what a version has, each part with its digest."""
    single = {
        "audit.json": tags.audit_tag(version_tags),
        "verdict.json": tags.gate_tag(version_tags),
        "graph": tags.onnx_tag(version_tags),
    }
    digests = {part: tag.digest for part, tag in single.items() if tag is not None}
    return digests | {EXPLAINER + tag.name: tag.digest for tag in tags.explainer_tags(version_tags)}


def compare(state: Mapping[Thing, str], history: Sequence[Entry], versions: set[str]) -> list[Entry]:
    """Return an entry with a problem for every thing whose state is not what the history says.

    An alias that no entry speaks of is MLflow's own and nobody's business; so is a version that was deleted.
    """
    said = _said(history)
    last = max((entry.number for entry in history), default=0)
    differing: list[Entry] = []
    for thing in sorted({*state, *said}):
        version, part = thing
        now, then = state.get(thing, GONE), said.get(thing)
        if (then is None and not version) or (version and version not in versions):
            continue
        if then is None or now not in {then.state, *then.begun}:
            entry = Entry(
                last + 1, "", "not in the log", version, {part: now} if version else {}, "" if version else part
            )
            differing.append(replace(entry, problem=_words(thing, now, then)))
    return differing


def _said(history: Sequence[Entry]) -> dict[Thing, _Said]:
    said: dict[Thing, _Said] = defaultdict(_Said)
    for entry in sorted(history, key=lambda entry: entry.number):
        if entry.problem:
            continue
        for thing, state in _states(entry).items():
            if entry.action.startswith(BEGIN):
                said[thing].begun.add(state)
            else:
                said[thing] = _Said(state, entry.number)
    return said


def _states(entry: Entry) -> dict[Thing, str]:
    """Return the state of each thing after what an entry speaks of."""
    action = entry.action.removeprefix(BEGIN)
    if action == "promote":
        return {("", entry.detail): entry.version}
    if action in DEEDS:
        part = DEEDS[action]
        return {(entry.version, part): entry.digests[part]} if part in entry.digests else {}
    explainers = {part: digest for part, digest in entry.digests.items() if part.startswith(EXPLAINER)}
    return {(entry.version, part): GONE if action == "detach" else digest for part, digest in explainers.items()}


def _words(thing: Thing, now: str, then: _Said | None) -> str:
    version, part = thing
    name = f"alias {part}" if not version else f"{part.replace('/', ' ')} of version {version}"
    if then is None:
        came = "by another hand, with a copy of a version, or by a release that kept no log"
        return f"{name} ({now[:12]}) is in no entry: it came {came}"
    what = now[:12] if version else f"version {now}"
    wanted = then.state[:12] if version else f"version {then.state}"
    if not then.by:
        return f"{name} is {what or 'gone'}, and no entry says that this was done"
    if now == GONE:
        return f"{name} is gone, and entry {then.by} says that it is {wanted}: the registry was edited or rolled back"
    if then.state == GONE:
        return f"{name} is there ({what}), and entry {then.by} took it away: the registry was edited or rolled back"
    return f"{name} is {what}, and entry {then.by} says {wanted}: the registry was edited or rolled back"
