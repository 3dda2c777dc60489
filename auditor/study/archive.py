"""Archive: all answers of a study as one JSON document that needs nothing else to be read years later."""

from __future__ import annotations

import json
from typing import Any

from auditor.study.answers import Answered, AnswerStore
from auditor.study.design import CONFIDENCE, RATING, Study


def archive(store: AnswerStore) -> bytes:
    """Return the answers with the batches they were given to, in plain words, as JSON."""
    study = store.study
    document = {
        "study": study.name,
        "digest": store.digest,
        "models": study.models,
        "conditions": list(study.config.conditions),
        "data": [{"name": d.name, "spec": d.spec, "digest": d.digest, "classes": list(d.classes)} for d in study.data],
        "images": {key: {"predicted": i.predicted, "label": i.label} for key, i in study.images.items()},
        "participants": [_person(study, person) for person in store.everybody()],
    }
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


def _person(study: Study, person: Answered) -> dict[str, Any]:
    answers = []
    for given in person.given:
        step = person.steps[given.step]
        entry: dict[str, Any] = {"step": given.step, "kind": step.kind, "seconds": given.seconds, "at": given.at}
        if step.batch is not None:
            entry |= {
                "condition": study.config.conditions[step.batch.condition],
                "data": study.data[step.batch.data].name,
                "set": step.batch.drawn,
                "stage": step.stage,
                "batch": step.number,
            }
        entry |= given.body
        if given.body.get("confidence") is not None:
            entry["confidence_words"] = CONFIDENCE[given.body["confidence"]]
        if "ratings" in given.body:
            entry["ratings_words"] = {k: RATING[v] for k, v in given.body["ratings"].items()}
        answers.append(entry)
    return {
        "code": person.code, "number": person.number, "day": person.day, "finished": person.is_finished,
        "answers": answers,
    }  # fmt: skip
