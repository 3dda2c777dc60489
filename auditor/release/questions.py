"""The two questions a reader has, answered apart: are the explanations to be believed, do the model's reasons hold up.

The headline is the worse of the two answers and says which it is. What was not measured is never a good answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from auditor.auditing.record import Audit
from auditor.release.findings import Finding, Level, findings, worst

BELIEVED = "Can the explanations be believed?"
REASONS = "Does the model decide for reasons that hold up?"
ANSWER = {
    "good": "Yes: every explainer holds in every check",
    "warn": "With reservations",
    "bad": "No",
}
NOT_SEEN = (
    "Hidden and transplanted were small spots, regions, the frame, the surroundings, what is always at one place, "
    "colours and fine texture. A shortcut that is in every image of every class cannot be seen this way."
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One question with its answer in a few words, and the sentences behind it."""

    question: str
    level: Level
    text: str
    sentences: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        sentences = [{"level": f.level, "text": f.text, "about": f.about} for f in self.sentences]
        return {"question": self.question, "level": self.level, "answer": self.text, "sentences": sentences}


def believed(audit: Audit) -> Answer:
    """Return whether the explanations can be believed: the checks of every explainer."""
    sentences = [f for f in findings(audit) if f.about]
    if not audit.explainers:
        text = "No explainer is attached, so nothing says what the model looks at."
        return Answer(BELIEVED, "warn", "There are none", (Finding("warn", text),))
    sentences += list(_other_opinions(audit))
    level = worst(sentences)
    doubtful = [n for n in audit.explainers if any(f.about == n and f.level != "good" for f in sentences)]
    text = ANSWER[level] + (f": look closer at {', '.join(doubtful)}" if doubtful else "")
    return Answer(BELIEVED, level, text, tuple(sentences))


def reasons(audit: Audit) -> Answer:
    """Return whether the model's reasons hold up: how often it is right, and what each class hangs on."""
    about_model = [f for f in findings(audit) if not f.about]
    relied, text = _reliance(audit.reliance)
    sentences = (*relied, *about_model)
    level = worst(sentences)
    if level != worst(relied):
        text = next(f.text.rstrip(".") for f in about_model if f.level == level)
    return Answer(REASONS, level, text, sentences)


def headline(audit: Audit) -> tuple[Level, str]:
    """Return the worse of the two answers, and a line that says which of them it is; of a partial audit, that too."""
    level, text = _worse(audit)
    if not audit.not_measured:
        return level, text
    if level == "good":
        level, text = "warn", "What was measured holds"
    return level, f"{text}. This is a partial audit, not measured: {not_measured(audit)}"


def not_measured(audit: Audit) -> str:
    """Return what was left out of a partial audit; a check that was left out for every explainer is named alone.

    >>> from types import SimpleNamespace
    >>> not_measured(SimpleNamespace(not_measured={"noise of a": "", "noise of b": "", "basis of b": "", "layers": ""},
    ...                              explainers={"a": {}, "b": {}}))
    'noise, basis of b, layers'
    """
    owners: dict[str, list[str]] = {}
    for entry in audit.not_measured:
        check, _, owner = entry.partition(" of ")
        owners.setdefault(check, []).append(owner)
    good = [name for name, info in audit.explainers.items() if not info.get("problem")]
    return ", ".join(
        check if names == [""] or set(names) >= set(good) else f"{check} of {_list(names)}"
        for check, names in owners.items()
    )


def _worse(audit: Audit) -> tuple[Level, str]:
    why, trust = reasons(audit), believed(audit)
    if why.level == "good" and trust.level == "good":
        return "good", "The explanations hold, and no class was found to hang on one thing alone"
    order = ("good", "warn", "bad")
    if order.index(why.level) >= order.index(trust.level):
        lead = "Do not rely on this model yet" if why.level == "bad" else "Look at the model's reasons first"
        return why.level, f"{lead}: {_lower(why.text)}"
    lead = "Do not rely on the explanations yet" if trust.level == "bad" else "The explanations have reservations"
    return trust.level, f"{lead}: {_lower(trust.text.rpartition(': ')[2])}"


def to_look_at(audit: Audit) -> list[Mapping[str, Any]]:
    """Return the findings of reliance that a person should see, the worst first."""
    return [f for f in (audit.reliance or {}).get("findings", ()) if f["verdict"] in ("found", "look")]


def _reliance(about: Mapping[str, Any] | None) -> tuple[tuple[Finding, ...], str]:
    """Return the sentences of what each class hangs on, and the answer in a few words."""
    if about is None:
        text = "What the model hangs on was not measured: the audit is of a release that could not. Run it again."
        return (Finding("warn", text),), "Not measured"
    if about["status"] != "measured":
        return (Finding("warn", f"What the model hangs on was not measured: {about['reason']}."),), "Not measured"
    entries: Sequence[Mapping[str, Any]] = about["findings"]
    by_verdict = {v: [f for f in entries if f["verdict"] == v] for v in ("found", "look", "nothing", "skipped")}
    sentences = [Finding("bad", f["sentence"]) for f in by_verdict["found"]]
    sentences += [Finding("warn", f["sentence"]) for f in by_verdict["look"]]
    quiet = len(by_verdict["nothing"])
    if quiet:
        which = "any" if quiet == len(entries) else "the other"
        text = f"For none of {which} {quiet} classes was one thing found that decides by itself."
        if quiet == 1:
            text = f"For class {by_verdict['nothing'][0]['name']} nothing was found that decides by itself."
        sentences.append(Finding("good", f"{text} {NOT_SEEN}"))
    sentences += _not_measured_findings(about, by_verdict["skipped"])
    if by_verdict["found"]:
        return tuple(sentences), _classes(by_verdict["found"], "hangs on one thing", "hang on one thing each")
    if by_verdict["look"]:
        return tuple(sentences), _classes(by_verdict["look"], "may hang on one thing", "may hang on one thing each")
    return tuple(sentences), "Nothing was found against it"


def _not_measured_findings(about: Mapping[str, Any], skipped: Sequence[Mapping[str, Any]]) -> list[Finding]:
    sentences = []
    if skipped:
        names = ", ".join(f["name"] for f in skipped[:5]) + (", …" if len(skipped) > 5 else "")
        text = f"{len(skipped)} classes were not measured ({names}). {skipped[0]['sentence']}"
        sentences.append(Finding("warn", text if len(skipped) > 1 else skipped[0]["sentence"]))
    if about.get("by_prediction"):
        text = "The data has no labels, so this is what the model's own predictions hang on, right or wrong."
        sentences.append(Finding("warn", text))
    return sentences


def _other_opinions(audit: Audit) -> list[Finding]:
    """Say where an explainer's heat leads to another verdict on what a class hangs on than plain heat does."""
    about = audit.reliance or {}
    verdicts = {f["name"]: f["verdict"] for f in about.get("findings", ())}
    sentences = []
    for name, others in about.get("sources", {}).items():
        accused = [k for k, v in verdicts.items() if v == "found"]
        missed = [k for k in accused if others.get(k) == "nothing"]
        doubted = [k for k in accused if others.get(k) == "look"]
        alone = [k for k, v in verdicts.items() if v != "found" and others.get(k) == "found"]
        if missed:
            text = f"Its heat misses what {_list(missed)} hang{'s' if len(missed) == 1 else ''} on: read it with care."
            sentences.append(Finding("warn", text, name))
        if doubted:
            text = f"By its heat it is less sure what {_list(doubted)} hang{'s' if len(doubted) == 1 else ''} on."
            sentences.append(Finding("warn", text, name))
        if alone:
            text = f"By its heat {_list(alone)} would hang on one thing; plain heat does not find that."
            sentences.append(Finding("warn", text, name))
    return sentences


def _classes(entries: Sequence[Mapping[str, Any]], one: str, many: str) -> str:
    names = [str(f["name"]) for f in entries]
    return f"Class {names[0]} {one}" if len(names) == 1 else f"Classes {_list(names)} {many}"


def _list(names: Sequence[str]) -> str:
    """Return names with commas and a last "and".

    >>> _list(["a"]), _list(["a", "b", "c"]), _list(list("abcdef"))
    ('a', 'a, b and c', 'a, b, c and 3 more')
    """
    shown = list(names) if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _lower(text: str) -> str:
    return text[0].lower() + text[1:] if text[:1].isupper() and text[1:2].islower() else text
