"""A study made by hand, so that tests know every image's class: two data sets, three conditions, tiny pictures."""

from auditor.study.answers import AnswerStore
from auditor.study.design import DrawnData, DrawnImage, Study, checked_config
from auditor.study.pictures import practice_pictures
from auditor.study.session import steps_of

PNG = practice_pictures(2)["practice-0"]
CONDITIONS = ("none", "one-heatmap", "concepts")


def small_study(conditions=CONDITIONS, names=("birds", "digits"), seed=0, **options):
    """Return a study with four classes, ten images a batch, and its pictures."""
    config = checked_config(name="small", conditions=conditions, seed=seed, **options)
    classes = tuple("abcd"[: config.n_classes])
    images, data, pictures = {}, [], {}
    for n, name in enumerate(names):
        sets = []
        for s in range(config.sets):
            keys = []
            for i in range(config.per_batch):
                key, k = f"{n}{s}{i:02d}", (i + s) % config.n_classes
                slots = {c: 1 if c == "one-heatmap" else 3 for c in conditions if c != "none"}
                values = {c: [0.1 * (k + 1), -0.2, 0.0][: slots[c]] if c != "one-heatmap" else [] for c in slots}
                heats = {c: [True, True, False][:w] for c, w in slots.items()}
                images[key] = DrawnImage(
                    classes[k], classes[(k + (i == 0)) % len(classes)], f"{key}.png", values, heats
                )
                pictures[f"image/{key}"] = PNG
                for c, there in heats.items():
                    pictures |= {f"heat/{key}/{c}/{slot}": PNG for slot, has in enumerate(there) if has}
                keys.append(key)
            sets.append(tuple(keys))
        about = {
            c: {"n": 1 if c == "one-heatmap" else 3, "by_rank": False, "contributions": True, "labels": []}
            for c in conditions
            if c != "none"
        }
        data.append(DrawnData(name, name, "d" * 64, f"models:/{name}/1", "m" * 64, classes, "x", tuple(sets), about))
    practice = practice_pictures(config.n_classes)
    pictures |= {f"image/{key}": png for key, png in practice.items()}
    return Study(config, tuple(data), images, tuple(practice), "2026-11-18"), pictures


def right_answer(study, number, step):
    """Return an answer to a step that groups by the predicted class."""
    if step.kind == "practice":
        return {"groups": dict.fromkeys(study.practice, 1)}
    if step.kind == "group":
        d = study.data[step.batch.data]
        return {"groups": {k: 1 + d.classes.index(study.images[k].predicted) for k in d.sets[step.batch.drawn]}}
    return OTHER[step.kind]


OTHER = {"confidence": {"confidence": 5}, "comment": {"comment": "fine"}, "questions": {"questions": {}}}


def opened(tmp_path, study, digest="0" * 64, **options):
    return AnswerStore(tmp_path / "answers.db", study, digest, **options)


def take_part(store, answer=right_answer, until=None):
    """Let one person answer everything (or ``until`` steps); return their token and participant."""
    from auditor.study.session import _opaque, assistants

    token, who = store.begin(None)
    steps = steps_of(store.study, who.number)
    for index, step in enumerate(steps[:until]):
        if step.kind == "rating":
            given = {"ratings": {_opaque(store.study, key): 4 for key, _ in assistants(store.study, who.number)}}
        else:
            given = answer(store.study, who.number, step)
        who = store.save(token, who.turn, index, given, 2.0)
    return token, who
