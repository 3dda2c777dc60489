"""Answers: the file that participants' answers are kept in, a SQLite database that is only ever added to.

Every answer and every draft is a row of its own, on disk before the page hears that it is saved (write-ahead log,
``synchronous=FULL``), so killing the server loses nothing that was saved. The latest row of a step counts. There is no
name, no address and no time of day in it: a participant is a random code, times are seconds since the participant
began, and a link is kept as a hash that is not connected to anybody's answers.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from auditor.errors import AnswerError, StudyError
from auditor.study.design import Study
from auditor.study.orders import cells
from auditor.study.session import Step, checked_answer, checked_seconds, steps_of

APPLICATION = 0x41756453  # marks our files, in SQLite's header
SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE links (hash TEXT PRIMARY KEY, used INTEGER NOT NULL DEFAULT 0);
CREATE TABLE participants (
  code TEXT PRIMARY KEY, number INTEGER NOT NULL, token TEXT NOT NULL UNIQUE, turn INTEGER NOT NULL DEFAULT 0,
  day TEXT NOT NULL);
CREATE TABLE answers (
  id INTEGER PRIMARY KEY AUTOINCREMENT, code TEXT NOT NULL, step INTEGER NOT NULL, is_draft INTEGER NOT NULL,
  body TEXT NOT NULL, seconds REAL NOT NULL, at REAL NOT NULL);
CREATE INDEX answers_of ON answers (code, step, is_draft, id);
CREATE TRIGGER no_change BEFORE UPDATE ON answers BEGIN SELECT RAISE(ABORT, 'answers are only added'); END;
"""
LETTERS = "23456789ABCDEFGHJKMNPQRSTUVWXYZ"  # none that look alike
CODE_LENGTH = 10
MOST_ROWS = 5000  # of one participant: far more than anybody moves images


@dataclass(frozen=True, slots=True)
class Participant:
    """One participant: a random code, the number that decides the order, the open page, how many steps are answered."""

    code: str
    number: int
    turn: int
    answered: int
    began: float = 0.0


@dataclass(frozen=True, slots=True)
class Given:
    """One answer that counts: of which step, what, the seconds the page was looked at, and when since the begin."""

    step: int
    body: dict[str, Any]
    seconds: float
    at: float


@dataclass(frozen=True)
class Answered:
    """All answers of one participant."""

    code: str
    number: int
    day: str
    given: tuple[Given, ...]
    is_finished: bool = False
    steps: tuple[Step, ...] = field(default=(), repr=False)


class AnswerStore:
    """The answers to one study."""

    def __init__(self, path: str | Path, study: Study, digest: str, *, create: bool = True) -> None:
        self.path, self.study, self.digest = Path(path), study, digest
        if not self.path.exists() and not create:
            raise StudyError(f"{self.path}: there are no answers to {study.name} yet; auditor study serve takes them.")
        self._lock = threading.Lock()
        self._clock: dict[str, float] = {}  # token: when it began, of this run of the server
        try:
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=30)
            self._open()
        except sqlite3.DatabaseError as error:
            raise StudyError(
                f"{self.path}: it cannot be used for answers ({error}); name another file with --answers."
            ) from None

    def close(self) -> None:
        """Close the file; what was saved is in it."""
        with self._lock:
            self._db.close()

    # links and participants

    def add_links(self, n: int) -> list[str]:
        """Make links that work once each, and return their secret parts; only hashes of them are kept."""
        links = [secrets.token_urlsafe(16) for _ in range(n)]
        with self._writing() as db:
            db.executemany("INSERT INTO links (hash) VALUES (?)", [(_hash(link),) for link in links])
        return links

    def has_link(self, link: str) -> bool:
        """Whether there is a link, used or not."""
        return self._one("SELECT 1 FROM links WHERE hash = ?", _hash(link)) is not None

    def begin(self, link: str | None, token: str | None = None) -> tuple[str, Participant]:
        """Begin with a link, which is used up by it, or without one; return the session's token and the participant.

        A page that makes the token itself may ask again when the reply was lost: the session of that token goes on.
        The next order is one of those that fewest people have begun with.
        """
        code = "".join(secrets.choice(LETTERS) for _ in range(CODE_LENGTH))
        with self._writing() as db:
            begun = token is not None and _taken_over(db, token)
            token = token or secrets.token_urlsafe(32)
            if not begun:
                if link is not None:
                    _use_up(db, link)
                number = self._free_number(db)
                day = datetime.now(timezone.utc).date().isoformat()
                db.execute(
                    "INSERT INTO participants (code, number, token, turn, day) VALUES (?, ?, ?, 1, ?)",
                    (code, number, _hash(token), day),
                )
        who = self.participant(token)
        assert who is not None
        return token, who

    def open(self, token: str) -> Participant | None:
        """Let a page that has just been loaded take over the session; None when there is no such session."""
        with self._writing() as db:
            begun = _taken_over(db, token)
        return self.participant(token) if begun else None

    def participant(self, token: str) -> Participant | None:
        """Return whose session a token is, with how far they are."""
        row = self._one("SELECT code, number, turn FROM participants WHERE token = ?", _hash(token))
        if row is None:
            return None
        (answered,) = self._one("SELECT COUNT(DISTINCT step) FROM answers WHERE code = ? AND is_draft = 0", row[0])
        return Participant(row[0], row[1], row[2], answered)

    # answers

    def save(self, token: str, turn: int, step: Any, answer: Any, seconds: Any, *, draft: bool = False) -> Participant:
        """Save an answer, or a draft of one, and return the participant as they are then.

        The same answer sent again is taken as saved: the first may have arrived and its reply been lost.
        """
        who = self.participant(token)
        if who is None:
            raise AnswerError("There is no session here; open your link again.", "no_session")
        steps = steps_of(self.study, who.number)
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < len(steps):
            raise AnswerError(f"want a step from 0 to {len(steps) - 1}, got {str(step)[:20]!r}.")
        with self._writing() as db:
            (current,) = db.execute("SELECT turn FROM participants WHERE code = ?", (who.code,)).fetchone() or (None,)
            if current is None:
                raise AnswerError("There is no session here; open your link again.", "no_session")
            if turn != current:
                raise AnswerError(
                    "The study was opened in another tab, and goes on there; reload this one to go on here. What was "
                    "saved is not lost.",
                    "other_tab",
                )
            done, n_rows = db.execute(
                "SELECT COUNT(DISTINCT CASE WHEN is_draft = 0 THEN step END), COUNT(*) FROM answers WHERE code = ?",
                (who.code,),
            ).fetchone()
            if step > done:
                raise AnswerError(f"Step {done + 1} is next, and an answer to step {step + 1} came.", "out_of_order")
            if step < done and draft:
                return Participant(who.code, who.number, current, done)
            body = json.dumps(checked_answer(self.study, who.number, steps[step], answer, draft=draft), sort_keys=True)
            if step < done:
                if _latest(db, who.code, step) == body:
                    return Participant(who.code, who.number, current, done)
                raise AnswerError(f"Step {step + 1} is answered already; step {done + 1} is next.", "out_of_order")
            if n_rows >= MOST_ROWS:
                raise AnswerError(f"There are {MOST_ROWS} saved steps already; no more are taken.", "too_many")
            began = self._clock.setdefault(who.code, time.monotonic() - self._last_at(db, who.code))
            at = round(time.monotonic() - began, 1)
            db.execute(
                "INSERT INTO answers (code, step, is_draft, body, seconds, at) VALUES (?, ?, ?, ?, ?, ?)",
                (who.code, step, int(draft), body, checked_seconds(seconds), at),
            )
        return Participant(who.code, who.number, current, done + (not draft))

    def draft(self, code: str, step: int) -> Given | None:
        """Return the latest draft of a step."""
        row = self._one(
            "SELECT step, body, seconds, at FROM answers WHERE code = ? AND step = ? AND is_draft = 1 ORDER BY id DESC "
            "LIMIT 1",
            code,
            step,
        )
        return None if row is None else Given(row[0], json.loads(row[1]), row[2], row[3])

    def everybody(self) -> list[Answered]:
        """Return the answers of all participants, in the order in which they began."""
        with self._lock:
            people = self._db.execute("SELECT code, number, day FROM participants ORDER BY rowid").fetchall()
            rows = self._db.execute(
                "SELECT code, step, body, seconds, at FROM answers WHERE is_draft = 0 ORDER BY code, step, id"
            ).fetchall()
        by_code: dict[str, dict[int, Given]] = {code: {} for code, _, _ in people}
        for code, step, body, seconds, at in rows:
            by_code[code][step] = Given(step, json.loads(body), seconds, at)
        answered = []
        for code, number, day in people:
            steps, given = tuple(steps_of(self.study, number)), tuple(by_code[code].values())
            answered.append(Answered(code, number, day, given, len(given) == len(steps), steps))
        return answered

    def progress(self) -> dict[str, int]:
        """Return how many links there are and are used, and how many people began and finished."""
        links, used = self._one("SELECT COUNT(*), COALESCE(SUM(used), 0) FROM links")
        everybody = self.everybody()
        finished = sum(person.is_finished for person in everybody)
        n_answers = sum(len(person.given) for person in everybody)
        return {
            "links": links, "links_used": used, "began": len(everybody), "finished": finished, "answers": n_answers,
        }  # fmt: skip

    def erase(self, code: str) -> int:
        """Erase everything of a participant from the file and return how many rows that were."""
        code = code.strip().upper()
        with self._writing() as db:
            if db.execute("SELECT 1 FROM participants WHERE code = ?", (code,)).fetchone() is None:
                raise StudyError(
                    f"erase: nobody has the code {code[:20]!r}; it has {CODE_LENGTH} letters and digits and is shown "
                    "at the end of the study."
                )
            n = db.execute("DELETE FROM answers WHERE code = ?", (code,)).rowcount
            db.execute("DELETE FROM participants WHERE code = ?", (code,))
        with self._lock:  # out of the log too, and out of pages that are free now
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._clock.pop(code, None)
        return int(n) + 1

    # the file

    def _open(self) -> None:
        db = self._db
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("PRAGMA secure_delete=ON")
        with self._writing():
            (application,) = db.execute("PRAGMA application_id").fetchone()
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables:
                for statement in _statements(SCHEMA):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION}")
                about = {"study": self.study.name, "digest": self.digest, "models": json.dumps(self.study.models)}
                db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            elif application != APPLICATION:
                raise StudyError(f"{self.path}: this database is of something else; name another file with --answers.")
            about = dict(db.execute("SELECT key, value FROM about"))
        if about.get("digest") != self.digest:
            models = ", ".join(json.loads(about.get("models", "[]"))) or "another model"
            raise StudyError(
                f"{self.path}: it holds answers to the study {about.get('study', '')!r} of {models} (digest "
                f"{about.get('digest', '')[:12]}), not to {self.study.name!r} of {', '.join(self.study.models)} "
                f"({self.digest[:12]}); name another file with --answers."
            )

    def _free_number(self, db: sqlite3.Connection) -> int:
        """Return the lowest number that nobody has, among those of the order that fewest have begun with."""
        taken = {n for (n,) in db.execute("SELECT number FROM participants")}
        n_cells = len(cells(self.study.config.conditions, len(self.study.data)))
        begun = Counter(n % n_cells for n in taken)
        cell = min(range(n_cells), key=lambda c: (begun[c], c))
        number = cell
        while number in taken:
            number += n_cells
        return number

    def _last_at(self, db: sqlite3.Connection, code: str) -> float:
        (last,) = db.execute("SELECT COALESCE(MAX(at), 0) FROM answers WHERE code = ?", (code,)).fetchone()
        return float(last)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction that no other writer can be within, and that is on disk when the block is left."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _one(self, sql: str, *values: Any) -> Any:
        with self._lock:
            return self._db.execute(sql, values).fetchone()


def _taken_over(db: sqlite3.Connection, token: str) -> bool:
    """Give the session of a token to the page that asks now; whether there is one."""
    taken = "UPDATE participants SET turn = turn + 1 WHERE token = ? RETURNING code"
    return db.execute(taken, (_hash(token),)).fetchone() is not None


def _use_up(db: sqlite3.Connection, link: str) -> None:
    row = db.execute("SELECT used FROM links WHERE hash = ?", (_hash(link),)).fetchone()
    if row is None:
        raise AnswerError("This link is not known here; check that it was copied whole.", "wrong_code")
    if row[0]:
        raise AnswerError(
            "This link was used already, and each link works once; go on in the browser where it was opened first, or "
            "ask for another link.",
            "used",
        )
    db.execute("UPDATE links SET used = 1 WHERE hash = ?", (_hash(link),))


def _latest(db: sqlite3.Connection, code: str, step: int) -> str | None:
    row = db.execute(
        "SELECT body FROM answers WHERE code = ? AND step = ? AND is_draft = 0 ORDER BY id DESC LIMIT 1", (code, step)
    ).fetchone()
    return None if row is None else str(row[0])


def _statements(script: str) -> Iterator[str]:
    """Yield the statements of a script; a trigger holds semicolons of its own."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
