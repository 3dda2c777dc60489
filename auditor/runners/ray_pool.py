"""Ray pool: workers of a Ray cluster as a runner. Nothing else here knows Ray.

Every worker is an actor that got its function once. Items go to the worker with the least to do, a few ahead; what they
give is handed on in the order of the items. A worker that ends before its time is replaced and its items are done
again: they are functions of what they were given, so the result is the same. An item that ends three workers is an
error that names it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from auditor.errors import ClusterError
from auditor.runners.runner import Counted, Crew, Item, Result, Runner, Tally
from auditor.runners.worker import Outcome, Welcome, Worker
from auditor.subject import travel

log = logging.getLogger(__name__)

AHEAD = 2  # items that a worker has at once, so that it never waits for the next
DEATHS = 3  # of workers by one item
SMALL = 50_000  # images or bytes of a part that needs no room of its own
START_S = 120.0  # until a new worker answers
CONNECT_S = 10.0
TRAVELS = (  # beginnings of variables that workers get: addresses and credentials of stores and registries
    *("AWS_", "AZURE_", "GOOGLE_", "GCS_", "GCSFS_", "FSSPEC_", "MLFLOW_", "DATABRICKS_", "AUDITOR_"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_", "REQUESTS_CA_"),
)
STAYS = ("AUDITOR_SIGN_KEY", "AUDITOR_API_KEY", "AUDITOR_CLUSTER")


@dataclass(frozen=True)
class PoolOptions:
    """Where the cluster is and what each worker gets; 0 workers: as many as there are processors (or GPUs) for."""

    address: str
    workers: int = 0
    cpus: int = 1  # and threads, of each worker
    gpus: float = 0.0


@dataclass
class Hand:
    """One worker, with the items it has, in the order in which it does them."""

    name: str
    actor: Any
    queue: list[Pending] = field(default_factory=list)


@dataclass
class Pending:
    """An item under way."""

    item: Any
    number: int
    hand: Hand
    ref: Any
    deaths: int = 0
    taken: int = 0  # parts that were handed on before its worker ended

    @property
    def is_over(self) -> bool:
        """Whether it ended as many workers as it may."""
        return self.deaths >= DEATHS


@dataclass
class Lost:
    """Marks an item whose worker has ended."""

    why: str = field(default="")


class RayRunner(Runner):
    """Runs items on the workers of a cluster; see `ray_workers`."""

    def __init__(self, ray: Any, options: PoolOptions) -> None:
        self._ray, self.options = ray, options
        self.tally = Tally()
        self.hands: list[Hand] = []
        self._started = 0
        self._remote = ray.remote(_Actor)
        wanted = options.workers or self._room()
        starting = [self._start() for _ in range(wanted)]
        for hand in starting:
            self._admit(hand)
        if not self.hands:
            raise ClusterError(f"cluster {options.address}: no worker started; it has {self._resources()}.")

    @property
    def n_workers(self) -> int:
        """How many workers there are now."""
        return len(self.hands)

    @property
    def is_remote(self) -> bool:
        """Yes."""
        return True

    def stream(self, work: Callable[[Item], Iterator[Result]], items: Iterable[Item]) -> Iterator[Result]:
        """Yield all that ``work(item)`` yields for every item, in the order of the items."""
        key, source = uuid4().hex, enumerate(items)
        sent = self.sent(work)
        pending: deque[Pending] = deque()
        is_more = True
        try:
            while True:
                while is_more and len(pending) < AHEAD * self.n_workers + 1:
                    number, item = next(source, (-1, None))
                    is_more = number >= 0
                    if is_more:
                        pending.append(self._submit(key, sent, item, number))
                if not pending:
                    return
                yield from self._results(key, sent, pending)
        finally:
            for waiting in pending:
                waiting.hand.queue = []
                with suppress(Exception):  # the cluster may be gone
                    self._ray.cancel(waiting.ref, force=False)

    def close(self) -> None:
        """End all workers."""
        for hand in self.hands:
            with suppress(Exception):
                self._ray.kill(hand.actor)
        self.hands = []

    def crew(self, make: Callable[[Any], Any], items: Sequence[Any]) -> AbstractContextManager[Crew]:
        """Give members with a state of their own, spread over the workers."""
        from auditor.runners.ray_crew import ray_crew

        return ray_crew(self, make, items)

    def sent(self, work: Any) -> Any:
        """Return the reference of something in the object store."""
        try:
            return self._ray.put(work)
        except (TypeError, AttributeError) as error:
            raise ClusterError(
                f"cluster {self.options.address}: the model or an explainer cannot travel to workers "
                f"({_first_line(error)}); register the model, so that workers load it themselves."
            ) from error

    def _submit(self, key: str, sent: Any, item: Any, number: int) -> Pending:
        hand = min(self.hands, key=lambda h: len(h.queue))
        pending = Pending(item, number, hand, hand.actor.run.remote(key, [sent], item))
        hand.queue.append(pending)
        return pending

    def _results(self, key: str, sent: Any, pending: deque[Pending]) -> Iterator[Any]:
        """Yield the parts of the first item; on the loss of its worker do it again elsewhere."""
        head = pending[0]
        outcome = self.outcome(head.ref)
        if isinstance(outcome, Lost):
            self._replace(head.hand, outcome.why, key, sent)
            return
        self.relay(head.hand, outcome)
        for k, stored in enumerate(outcome.parts[head.taken :]):
            part = self._fetched(stored)
            if isinstance(part, Lost):
                head.taken += k
                self._replace(head.hand, part.why, key, sent)
                return
            self.tally.add(head.hand.name, part)
            yield part
        if outcome.error is not None:
            raise outcome.error
        head.hand.queue.remove(head)
        pending.popleft()

    def outcome(self, ref: Any) -> Outcome | Lost:
        """Return what a worker gave, or that it has ended."""
        from ray import exceptions

        try:
            outcome: Outcome = self._ray.get(ref)
            return outcome
        except (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.NodeDiedError) as error:
            return Lost(_first_line(error))
        except exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise cause from error

    def _fetched(self, stored: Any) -> Any:
        from ray import exceptions

        if not isinstance(stored, Elsewhere):
            return stored
        try:
            return self._ray.get(stored.ref)
        except (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.NodeDiedError) as error:
            return Lost(_first_line(error))

    def _replace(self, gone: Hand, why: str, key: str, sent: Any) -> None:
        """Put another worker in the stead of one that ended, and give out its items again."""
        self.bury(gone, why)
        culprit = next((p for p in gone.queue if isinstance(self.outcome(p.ref), Lost)), None)
        if culprit is not None:  # what it was at when it ended; the others waited
            culprit.deaths += 1
            if culprit.is_over:
                raise ClusterError(
                    f"cluster {self.options.address}: part {culprit.number + 1} of the work ended {DEATHS} workers, "
                    f"the last of them: {why}; look for an image there that takes too much memory, or give workers "
                    "more of it."
                )
        self.admit_another(why)
        for waiting in gone.queue:
            again = self._submit(key, sent, waiting.item, waiting.number)
            again.hand.queue[-1] = waiting
            waiting.hand, waiting.ref = again.hand, again.ref

    def renew(self, gone: Hand, why: str) -> None:
        """Put another worker in the stead of one that ended."""
        self.bury(gone, why)
        self.admit_another(why)

    def bury(self, gone: Hand, why: str) -> None:
        """Note that a worker has ended."""
        self.hands.remove(gone)
        self.tally.lost.append(gone.name)
        log.warning("cluster: %s ended before its time (%s); its work is done again", gone.name, why)
        with suppress(Exception):
            self._ray.kill(gone.actor)

    def admit_another(self, why: str) -> None:
        """Start a worker where one ended; the last one without a successor is an error."""
        self._admit(self._start())
        if not self.hands:
            raise ClusterError(
                f"cluster {self.options.address}: the last worker ended ({why}) and no other starts; run the command "
                "again when the cluster has room."
            )

    def relay(self, hand: Hand, outcome: Outcome) -> None:
        """Write what a worker logged, with its name."""
        for level, name, text in outcome.lines:
            logging.getLogger(name).log(level, "%s: %s", hand.name, text)

    def _start(self) -> Hand:
        self._started += 1
        o = self.options
        is_verbose = logging.getLogger("auditor").isEnabledFor(logging.INFO)
        actor = self._remote.options(num_cpus=o.cpus, num_gpus=o.gpus, max_restarts=0).remote(
            travelling(os.environ), o.cpus, is_verbose, str(Path.cwd())
        )
        return Hand(f"worker {self._started}", actor)

    def _admit(self, hand: Hand) -> None:
        """Let a worker take part when it answers and runs the same package."""
        from ray import exceptions

        address = self.options.address
        ref = hand.actor.welcome.remote()
        try:
            ready, _ = self._ray.wait([ref], timeout=START_S)
            theirs = self._ray.get(ref) if ready else None
        except exceptions.RayError as error:
            text = str(error)
            if "No module named" in text or "ModuleNotFoundError" in text:
                raise ClusterError(
                    f"cluster {address}: its workers cannot import mlflow-auditor ({_module_line(text)}); install "
                    "mlflow-auditor[cluster] of the same version on every node, or give the job an image with it."
                ) from error
            log.warning("cluster: %s did not start (%s)", hand.name, _first_line(error))
            return
        if theirs is None:
            log.warning("cluster: %s found no room within %.0f s; going on without", hand.name, START_S)
            with suppress(Exception):
                self._ray.kill(hand.actor)
            return
        refusal = Welcome.here().refusal(theirs)
        if refusal:
            raise ClusterError(f"cluster {address}: {refusal}; install the same version on every node.")
        self.hands.append(hand)

    def _room(self) -> int:
        """Return how many workers the cluster has processors and GPUs for."""
        resources = self._ray.cluster_resources()
        n = int(resources.get("CPU", 0)) // self.options.cpus
        if self.options.gpus:
            n = min(n, int(resources.get("GPU", 0) / self.options.gpus))
        if n < 1:
            raise ClusterError(
                f"cluster {self.options.address}: a worker takes {self.options.cpus} CPU and {self.options.gpus:g} "
                f"GPU, it has {self._resources()}."
            )
        return n

    def _resources(self) -> str:
        resources = self._ray.cluster_resources()
        return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"


@dataclass(frozen=True)
class Elsewhere:
    """A part that lies in the cluster's object store."""

    ref: Any


class _Actor:
    """A worker as Ray starts it."""

    def __init__(self, environment: dict[str, str], threads: int, verbose: bool, folder: str) -> None:
        self.worker = Worker(environment, threads, verbose, folder)

    def welcome(self) -> Welcome:
        """Return what this process is."""
        return self.worker.welcome()

    def run(self, key: str, sent: list[Any], item: Any) -> Outcome:
        """Return what a function gives for an item; the function is fetched the first time."""
        import ray

        if not self.worker.knows(key):
            arrived = self._arrived(sent)
            if isinstance(arrived, Outcome):
                return arrived
            self.worker.learn(key, arrived[0])
        return self.worker.run(key, item, lambda part: part if isinstance(part, Counted) else Elsewhere(ray.put(part)))

    def enlist(self, key: str, number: int, sent: list[Any], threads: int) -> Outcome:
        """Make a member of a crew of what was sent: how it is made, and its item."""
        arrived = self._arrived(sent)
        return arrived if isinstance(arrived, Outcome) else self.worker.enlist(key, number, arrived, threads)

    def ask(self, key: str, number: int, method: str, sent: list[Any], threads: int) -> Outcome:
        """Return what a member answers."""
        arrived = self._arrived(sent)
        return arrived if isinstance(arrived, Outcome) else self.worker.ask(key, number, method, arrived, threads)

    def dismiss(self, key: str) -> None:
        """Forget the members of a crew."""
        self.worker.dismiss(key)

    def _arrived(self, sent: list[Any]) -> list[Any] | Outcome:
        """Fetch what was sent; what does not arrive as it was is refused."""
        import ray

        try:
            return [ray.get(ref) for ref in sent]
        except ray.exceptions.RaySystemError:
            refusal = travel.refusal()
            if refusal is None:
                raise
            return Outcome(error=refusal)


def travelling(variables: Any) -> dict[str, str]:
    """Return the variables that workers get."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(TRAVELS) and not name.startswith(STAYS) and "SIGN_KEY" not in name
    }


@contextmanager
def ray_workers(options: PoolOptions) -> Iterator[RayRunner]:
    """Connect to a cluster, or start one on this machine, and give its workers; they end with the block.

    ``auto`` is the cluster of RAY_ADDRESS or of this machine, ``local`` a new one on this machine.
    """
    ray = _ray(options.address)
    runner = None
    _connect(ray, options)
    try:
        runner = RayRunner(ray, options)
        yield runner
    finally:
        if runner is not None:
            runner.close()
        with suppress(Exception):
            ray.shutdown()


def _ray(address: str) -> Any:
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster that starts here: 15 else, behind all others
        import ray
    except ImportError as error:
        raise ClusterError(
            f"cluster {address}: the package ray is not installed; pip install 'mlflow-auditor[cluster]'."
        ) from error
    return ray


def _connect(ray: Any, options: PoolOptions) -> None:
    address = options.address
    common = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    if ray.is_initialized():  # a program that uses Ray already: its cluster is used, and left as it is
        raise ClusterError(f"cluster {address}: this process is connected to Ray already; call ray.shutdown() first.")
    if address == "local":
        needed = options.workers * options.cpus
        ray.init(
            address="local",
            num_cpus=max(needed, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=_room_for_objects(),
            **common,
        )
        return
    if "://" in address:
        _check_answers(address)
    elif address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        began = time.monotonic()
        ray.init(address=address, **common)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        waited = time.monotonic() - began
        raise ClusterError(
            f"cluster {address}: no cluster answers ({_first_line(error)}, after {waited:.0f} s); start one with ray "
            "start --head, give ray://HOST:10001, or --cluster local for the processors of this machine."
        ) from error


def _check_answers(address: str) -> None:
    """Raise soon where nothing listens; Ray itself would try for half a minute."""
    host, _, port = address.partition("://")[2].partition("/")[0].rpartition(":")
    if not address.startswith("ray://") or not host or not port.isdecimal():
        raise ClusterError(f"cluster {address}: want auto, local or ray://HOST:PORT, such as ray://head:10001.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise ClusterError(
            f"cluster {address}: nothing answers there within {CONNECT_S:.0f} s ({error.strerror or error}); check the "
            "address (port 10001 of the head node), or take --cluster local."
        ) from error


def _room_for_objects() -> int:
    """Return the bytes of a local cluster's object store: a quarter of the shared memory, 2 GB at most."""
    try:
        state = os.statvfs("/dev/shm")
        free = state.f_bavail * state.f_frsize
    except (OSError, AttributeError):
        free = 2**31
    return max(100 * 2**20, min(2 * 2**30, free // 4))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:160].rstrip(".")


def _module_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "No module named" in line]
    return lines[-1][:120] if lines else "ModuleNotFoundError"
