"""The pieces of the story; the whole is tested in tests/auditor/commands/test_demo.py."""

from auditor import open_data
from auditor.plugins import demo_story
from auditor.plugins.demo import KINDS
from auditor.release.policy import parse_policy


def test_the_policy_of_the_story_is_one_and_asks_for_what_is_attached():
    policy = parse_policy(demo_story.POLICY, "policy.toml")
    assert policy.explainers == (KINDS["nmf"][0],)
    assert policy.limits["model/reliance/found"].max == 0


def test_the_test_pictures_are_the_same_birds_with_and_without_the_stamp(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_story, "N_TRAIN", 6)
    monkeypatch.setattr(demo_story, "N_TEST", 6)
    steps = []
    folders = demo_story.draw_pictures(tmp_path, 1, lambda *step: steps.append(step))
    assert steps[-1] == ("drawing birds", 4, 4)
    assert [len(open_data(folders[name])) for name in ("train", "new", "test", "plain")] == [6, 6, 6, 6]
    for species in ("finch", "hawk"):
        a, b = ((folders[name] / species).iterdir() for name in ("test", "plain"))
        same = [x.read_bytes() == y.read_bytes() for x, y in zip(sorted(a), sorted(b), strict=True)]
        assert all(same) == (species == "finch")
