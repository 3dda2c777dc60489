"""A batch of callers: each gets an answer or a problem, and the time its stages took."""

from auditor.explainers.answer import Question
from auditor.service.batch_answer import Job, answer_batch
from auditor.service.problems import Problem
from auditor.service.served_version import load_version
from auditor.service.settings import Settings
from auditor.service.types import Options

QUICK = Options(heatmaps="none", stability="off")


def job(version, x, options, names, target, strict):
    return Job(version, Question(x, options, names, target, strict))


def test_a_class_without_a_head_is_reported_and_refused_only_when_requested(registry, served, images):
    loaded = load_version(Settings(model=served, engine="torch"))
    loaded.explainers["heads"].classes_ = [0]
    answer, refused = answer_batch(
        [
            job(loaded, images[1], QUICK, ["heads", "concepts"], 3, False),
            job(loaded, images[1], QUICK, ["heads"], 3, True),
        ]
    )
    assert isinstance(answer, dict)
    assert "cannot explain class" in answer["explanations"][0]["problem"]
    assert answer["explanations"][1]["concepts"]
    assert isinstance(refused, Problem)
    assert refused.status == 422


def test_an_explainer_that_breaks_on_one_image_hurts_no_other(registry, served, images, monkeypatch):
    loaded = load_version(Settings(model=served, engine="torch"))
    concepts = loaded.explainers["concepts"]
    plain = concepts.explain_from

    def moody(subject, x, *args, **options):
        if bool((x == images[2]).flatten(1).all(1).any()):
            raise RuntimeError("this image")
        return plain(subject, x, *args, **options)

    monkeypatch.setattr(concepts, "explain_from", moody)
    answers = answer_batch([job(loaded, x, QUICK, ["concepts"], None, False) for x in images])
    assert [isinstance(a, Problem) for a in answers] == [i == 2 for i in range(7)]


def test_stages_are_timed_for_the_rows_they_were_for(registry, served, images):
    version = load_version(Settings(model=served, engine="torch"))
    steady = Options(heatmaps="none", stability="fast", noise_samples=2)
    jobs = [job(version, images[0], QUICK, ["heads"], None, False), job(version, images[1], steady, [], None, False)]
    plain, measured = answer_batch(jobs)
    assert set(plain["timings"]) == {"forward", "heads", "draw"}
    assert set(measured["timings"]) == {"forward", "stability", "draw"}
    assert all(ms >= 0 for answer in (plain, measured) for ms in answer["timings"].values())
    assert plain["timings"]["forward"] == measured["timings"]["forward"]


def test_what_takes_seconds_is_slow(registry, served, images, monkeypatch):
    version = load_version(Settings(model=served, engine="torch"))
    full = Options(stability="full")
    assert job(version, images[0], full, [], None, False).is_slow
    assert not job(version, images[0], QUICK, ["heads", "concepts"], None, False).is_slow
    monkeypatch.setattr(type(version.explainers["heads"]), "searches", True)
    assert job(version, images[0], QUICK, ["heads"], None, False).is_slow
    assert not job(version, images[0], QUICK, ["concepts"], None, False).is_slow
