"""The store: nothing saved is lost, links work once, tabs do not mix, and what is erased is gone from the bytes."""

import json
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections import Counter

import pytest

from auditor.errors import AnswerError, StudyError
from auditor.study.session import steps_of
from tests.auditor.study.drawn import opened, right_answer, small_study, take_part

STUDY, _ = small_study()


def test_a_link_works_once_and_is_not_connected_to_anybody(tmp_path):
    store = opened(tmp_path, STUDY)
    link, other = store.add_links(2)
    token, who = store.begin(link)
    with pytest.raises(AnswerError, match="used already") as error:
        store.begin(link)
    assert error.value.code == "used"
    with pytest.raises(AnswerError, match="not known here"):
        store.begin("guess")
    assert store.has_link(other)
    assert not store.has_link("guess")
    assert store.progress()["links_used"] == 1
    content = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    for secret in (link, other, token):
        assert secret.encode() not in content
    assert who.code.encode() in content


def test_everything_comes_back_after_closing(tmp_path):
    store = opened(tmp_path, STUDY)
    token, who = take_part(store)
    store.close()
    again = opened(tmp_path, STUDY)
    (person,) = again.everybody()
    assert person.is_finished
    assert person.code == who.code
    assert [g.step for g in person.given] == list(range(len(person.steps)))
    assert person.given[1].body == right_answer(STUDY, person.number, person.steps[1])
    assert again.participant(token).answered == len(person.steps)


def test_answers_come_in_order_and_the_same_twice_is_once(tmp_path):
    store = opened(tmp_path, STUDY)
    token, who = store.begin(None)
    steps = steps_of(STUDY, who.number)
    with pytest.raises(AnswerError, match="Step 1 is next, and an answer to step 3 came") as error:
        store.save(token, 1, 2, {"confidence": 1}, 1)
    assert error.value.code == "out_of_order"
    first = right_answer(STUDY, who.number, steps[0])
    assert store.save(token, 1, 0, first, 1).answered == 1
    assert store.save(token, 1, 0, first, 1).answered == 1  # its reply was lost
    with pytest.raises(AnswerError, match="answered already"):
        store.save(token, 1, 0, {"groups": dict.fromkeys(STUDY.practice, 2)}, 1)
    for odd in (-1, 99, "0", True):
        with pytest.raises(AnswerError, match="want a step"):
            store.save(token, 1, odd, first, 1)
    assert len(store.everybody()[0].given) == 1


def test_a_second_tab_takes_over_and_the_first_is_told_so(tmp_path):
    store = opened(tmp_path, STUDY)
    token, who = store.begin(None)
    assert store.open(token).turn == 2
    answer = right_answer(STUDY, who.number, steps_of(STUDY, who.number)[0])
    with pytest.raises(AnswerError, match="opened in another tab") as error:
        store.save(token, 1, 0, answer, 1)
    assert error.value.code == "other_tab"
    assert store.save(token, 2, 0, answer, 1).answered == 1
    assert store.open("nobody") is None
    with pytest.raises(AnswerError, match="no session"):
        store.save("nobody", 1, 0, answer, 1)


def test_a_draft_is_kept_and_the_latest_counts(tmp_path):
    store = opened(tmp_path, STUDY)
    token, who = store.begin(None)
    for group in (1, 2):
        store.save(token, 1, 0, {"groups": {"practice-0": group}}, 3, draft=True)
    assert store.draft(who.code, 0).body["groups"]["practice-0"] == 2
    assert store.participant(token).answered == 0
    assert store.draft(who.code, 1) is None


def test_answers_can_only_be_added(tmp_path):
    store = opened(tmp_path, STUDY)
    take_part(store, until=1)
    with pytest.raises(sqlite3.DatabaseError, match="only added"):
        store._db.execute("UPDATE answers SET body = '{}'")


def test_erasing_leaves_nothing_in_the_files(tmp_path):
    store = opened(tmp_path, STUDY)

    def telling(study, number, step):
        return {"comment": "I am Jane Doe"} if step.kind == "comment" else right_answer(study, number, step)

    _, who = take_part(store, telling)
    _, other = take_part(store)
    assert b"Jane Doe" in b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert store.erase(who.code.lower()) > 10
    content = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert b"Jane Doe" not in content
    assert who.code.encode() not in content
    assert [p.code for p in store.everybody()] == [other.code]
    with pytest.raises(StudyError, match="nobody has the code"):
        store.erase(who.code)


def test_orders_stay_balanced_when_people_are_erased(tmp_path):
    store = opened(tmp_path, STUDY)
    people = [store.begin(None)[1] for _ in range(8)]
    assert sorted(p.number for p in people) == list(range(8))
    store.erase(people[2].code)
    assert store.begin(None)[1].number == 2


def test_a_file_of_another_study_or_of_something_else_is_refused(tmp_path):
    opened(tmp_path, STUDY).close()
    with pytest.raises(StudyError, match=r"it holds answers to the study 'small' of models:/birds/1.*--answers"):
        opened(tmp_path, STUDY, digest="1" * 64)
    (tmp_path / "answers.db").unlink()
    sqlite3.connect(tmp_path / "answers.db").execute("CREATE TABLE mine (x)").connection.close()
    with pytest.raises(StudyError, match="something else"):
        opened(tmp_path, STUDY)
    (tmp_path / "answers.db").write_text("no database at all, but long enough to be looked at" * 40)
    with pytest.raises(StudyError, match="cannot be used for answers"):
        opened(tmp_path, STUDY)
    with pytest.raises(StudyError, match="no answers to small yet"):
        opened(tmp_path / "nowhere", STUDY, create=False)


def test_many_at_once_get_different_orders_and_lose_nothing(tmp_path):
    store = opened(tmp_path, STUDY)
    codes = []

    def one():
        codes.append(take_part(store)[1].code)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    everybody = store.everybody()
    assert sorted(p.number for p in everybody) == list(range(8))
    assert {p.code for p in everybody} == set(codes)
    assert all(p.is_finished for p in everybody)
    assert set(Counter(p.number % 4 for p in everybody).values()) == {2}


def test_a_process_that_is_killed_has_saved_what_it_said_it_saved(tmp_path):
    script = textwrap.dedent(
        f"""
        import json, sys
        from tests.auditor.study.drawn import small_study, opened, right_answer
        from auditor.study.session import steps_of
        from pathlib import Path
        study, _ = small_study()
        store = opened(Path({str(tmp_path)!r}), study)
        token, who = store.begin(None)
        steps = steps_of(study, who.number)
        for i, step in enumerate(steps[:5]):
            store.save(token, 1, i, right_answer(study, who.number, step), 1)
            print(json.dumps([token, i]), flush=True)
        sys.stdin.read()
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    said = [json.loads(process.stdout.readline()) for _ in range(5)]
    process.kill()
    process.wait(30)
    store = opened(tmp_path, STUDY)
    (person,) = store.everybody()
    assert [g.step for g in person.given] == [i for _, i in said] == list(range(5))
    assert store.participant(said[0][0]).answered == 5
