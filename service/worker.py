"""Worker: the state of one server process: the model it serves, its queues, and the watch over the registry."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from auditor.errors import AuditError, RegistryError, SignatureError, TamperError
from auditor.plugins.registry import history
from auditor.plugins.registry.location import ModelVersion, resolve
from auditor.service.batch_answer import AnswerJson, Job, answer_batch
from auditor.service.batcher import JobQueue
from auditor.service.decoder_pool import DecoderPool
from auditor.service.json_logs import log_event
from auditor.service.problems import Problem
from auditor.service.prometheus import READY, RELOADS, VERIFICATION_FAILURES
from auditor.service.request_cost import Pace, check_cost, is_slow, seconds, within_time
from auditor.service.served_version import ServedVersion, fingerprint, load_version
from auditor.service.settings import Settings
from auditor.service.types import Options
from auditor.signing.keys import read_trusted

log = logging.getLogger(__name__)

RETRY_S, MAX_RETRY_S = 2.0, 60.0
N_THREADS = 2  # for what takes a moment and is not an answer: galleries, metrics


class Worker:
    """One process of the server. ``start`` returns at once; it is ready when a model is loaded and warm."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.served: ServedVersion | None = None
        self.pace = Pace()  # of the version that was loaded last
        self.problem = "the model is being loaded"
        self._queues: list[JobQueue] = []
        self._watch: asyncio.Task[None] | None = None
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="auditor-load")
        self.threads = ThreadPoolExecutor(N_THREADS, thread_name_prefix="auditor-help")
        self.decoders = DecoderPool(settings)
        self._refused_mark = ""
        self._failed_mark, self._retry_at = "", 0.0
        self._failures = 0
        self._trust: list[tuple[str, str]] = []  # whom --require-verdict trusted when what is served was verified
        self._trusted_at = time.monotonic()
        self._looked = asyncio.Event()  # set once the first loading has ended, well or not

    async def start(self) -> None:
        """Open the queues and begin to load."""
        s = self.settings
        self._queues = [
            JobQueue("fast", self._answer_batch, max_batch=s.max_batch, limit=s.queue, max_wait_s=s.max_wait_ms / 1000),
            JobQueue("slow", self._answer_batch, max_batch=1, limit=s.slow_queue, lets_large_in=True),
        ]
        for queue in self._queues:
            queue.start()
        await self.decoders.start()
        self._watch = asyncio.get_running_loop().create_task(self._follow(), name="follow the registry")

    async def stop(self) -> None:
        """Finish the running batches and release everything."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for queue in self._queues:
            await queue.stop()
        self._loader.shutdown(wait=False)
        self.threads.shutdown(wait=False)
        await self.decoders.stop()
        self.served = None
        READY.set(0)

    def current(self) -> ServedVersion:
        """Return the model being served, or the problem that there is none."""
        if self.served is None:
            raise Problem(503, f"not ready: {self.problem}.", code="not_ready", retry_after_s=2)
        return self.served

    async def ready(self) -> ServedVersion:
        """Return the model being served; while the first loading runs, wait for it.

        The processes share one port, so a process that takes a dead one's place is sent requests before it can answer.
        """
        if self.served is None and not self._looked.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._looked.wait(), self.settings.request_timeout_s)
        return self.current()

    async def answer(self, jobs: Sequence[Job]) -> list[AnswerJson | Problem]:
        """Answer the jobs of a request in the queue they belong to by their cost; what costs too much is refused."""
        jobs = within_time(jobs, self.pace, self.settings)
        costs_s = [seconds(job, self.pace, self.settings) for job in jobs]
        cost_s, timeout_s = sum(costs_s), self.settings.request_timeout_s
        check_cost(jobs, cost_s, timeout_s)
        queue = self._queues[1 if is_slow(jobs, cost_s) else 0]
        return await queue.answer(jobs, timeout_s, costs_s)

    def _answer_batch(self, jobs: Sequence[Job]) -> list[AnswerJson | Problem]:
        """Answer a batch and learn from it how fast this machine is."""
        started = time.perf_counter()
        answers = answer_batch(jobs)
        took_s = time.perf_counter() - started
        if not any(job.is_slow for job in jobs) and not any(isinstance(answer, Problem) for answer in answers):
            self.pace = self.pace.after(sum(seconds(job, self.pace, self.settings) for job in jobs), took_s)
        return answers

    # the registry

    async def _follow(self) -> None:
        """Load the model, then look again and again whether another one is to be served."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                fresh = await loop.run_in_executor(self._loader, self._look)
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("the registry could not be followed")
                fresh = None
            if fresh is not None:
                old, self.served = self.served, fresh
                READY.set(1)
                RELOADS.labels("served").inc()
                log_event("info", "model served", model=fresh.label, before=old.label if old else None)
                self._looked.set()
                del old, fresh
                await loop.run_in_executor(self._loader, _tidy)
            self._looked.set()
            await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        """How long until the next look: what failed to load or verify is tried ever more rarely."""
        if self.served is not None:
            return self.settings.poll_s
        return float(min(MAX_RETRY_S, RETRY_S * 2**self._failures))

    def _look(self) -> ServedVersion | None:
        """Return a newly loaded model when there is one to serve that verifies, warm; else None."""
        mark, version = "", None
        try:
            version = resolve(self.settings.model)  # once: what is looked at is what is loaded
            mark = fingerprint(version, self.settings)
            if self.served is not None and mark == self.served.fingerprint and not self.served.is_expired:
                self._refused_mark = ""
                return None
            is_resting = self.served is not None and mark == self._failed_mark and time.monotonic() < self._retry_at
            if mark == self._refused_mark or is_resting:  # it did not verify, and nothing has changed since
                self._drop_unless_vouched_for()
                return None
            trust = self._read_trust()
            fresh = load_version(self.settings, version)
            self.pace = warm_up(fresh, self.settings)
            if self.served is not None:
                history.append(version, "reload", {}, f"served instead of {self.served.label}")
            self._trust = trust
        except RegistryError as error:  # out of reach: serve on, ask again
            self._failures = 0
            self._log_problem("MLflow cannot be reached", error)
        except TamperError as error:
            VERIFICATION_FAILURES.inc()
            RELOADS.labels("refused").inc()
            self._drop_if_unsigned(error, version)
            self._refused_mark = mark if self.served is not None else ""  # with nothing to serve it is tried again
            self._failures += 1
            self._log_problem("the model failed verification and is not served", error)
        except AuditError as error:
            self._failures += 1
            self._rest(mark)
            RELOADS.labels("failed").inc()
            self._log_problem("the model cannot be loaded", error)
        except Exception as error:  # a full disk, an unexpected error of MLflow: a worker goes on
            self._failures += 1
            self._rest(mark)
            RELOADS.labels("failed").inc()
            log.exception("loading failed")
            self._log_problem("the model cannot be loaded", error)
        else:
            self._failures, self._failed_mark = 0, ""
            return fresh
        self._drop_unless_vouched_for()
        return None

    def _drop_if_unsigned(self, error: TamperError, version: ModelVersion | None) -> None:
        """Stop serving a version whose verdict no longer counts: its key was revoked or has expired."""
        same = self.served is not None and version is not None and self.served.label == version.label
        if same and isinstance(error, SignatureError):
            self.served = None
            READY.set(0)

    def _read_trust(self) -> list[tuple[str, str]]:
        """Return whom --require-verdict trusts now, and who of them counts."""
        if self.settings.require_verdict is None:
            return []
        state = read_trusted(self.settings.require_verdict).state()
        self._trusted_at = time.monotonic()
        return state

    def _drop_unless_vouched_for(self) -> None:
        """Stop serving what no trusted key vouches for any more, where it could not be looked at again.

        MLflow may be out of reach, or the alias on a version that is not served. While the folder of keys cannot be
        read, its last content counts for as long as API keys do.
        """
        if self.served is None or self.settings.require_verdict is None:
            return
        try:
            state = dict(self._read_trust())
        except (AuditError, OSError):
            holds = time.monotonic() - self._trusted_at <= self.settings.keys_grace_s
        else:
            keyid = str((self.served.explained.attestation or {}).get("keyid"))
            by_key = keyid in state and not state[keyid]
            holds = by_key or (keyid not in state and state == dict(self._trust))  # else by a certificate
        if not holds or self.served.is_expired:
            log_event("error", "nobody who is trusted vouches for the model now", was_serving=self.served.label)
            self.problem = "nobody who is trusted vouches for the model now"
            self.served = None
            READY.set(0)

    def _rest(self, mark: str) -> None:
        """Do not try again for a while to load what could not be loaded: every attempt slows requests down."""
        self._failures = 1 if mark != self._failed_mark else self._failures
        self._failed_mark = mark
        self._retry_at = time.monotonic() + min(MAX_RETRY_S, RETRY_S * 2**self._failures)

    def _log_problem(self, action: str, error: Exception) -> None:
        self.problem = action
        serving = self.served.label if self.served is not None else None
        retry = max(self._pause_s(), round(self._retry_at - time.monotonic(), 1))
        log_event("error", action, reason=" ".join(str(error).split())[:500], still_serving=serving, next_try_s=retry)


def warm_up(version: ServedVersion, settings: Settings) -> Pace:
    """Answer a grey image with everything there is, so that the first caller does not pay for compiling.

    Returns how long an image takes: the second of two runs, which compiles nothing any more.
    """
    import torch

    x = torch.full(version.subject.input_shape, 0.5)
    took_s: list[float] = []
    for heatmaps, stability in (("png", "fast"), ("none", "off")):
        question = version.question(x, Options.model_validate({"heatmaps": heatmaps, "stability": stability}), settings)
        for n in (1, 2):
            started = time.perf_counter()
            for answer in answer_batch([Job(version, question) for _ in range(n)]):
                if isinstance(answer, Problem) and answer.status >= 500:
                    raise TamperError(f"{version.label} does not answer a grey image: {answer.message}")
        took_s.append((time.perf_counter() - started) / 2)
    return Pace.of(took_s[1], took_s[0])


def _tidy() -> None:
    """Give the memory of the old model back to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not every system has it
        ctypes.CDLL("libc.so.6").malloc_trim(0)
