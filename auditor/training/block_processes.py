"""Block updates in processes of their own: parameters and mini-batches in shared memory, orders through pipes.

Each process holds every ``workers``-th block with its optimizer; a mini-batch is written once into buffers both sides
see. The processes live as long as the iteration: they end with it, on an error, on Ctrl-C, and when the parent is gone.
They start afresh (spawn), so a script must keep its own start under ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, multiprocessing, nn

from auditor.errors import AuditError
from auditor.training.block_calculus import calculus_of

if TYPE_CHECKING:
    from auditor.training.block_admm import BlockAdmm, BlockAdmmConfig

PATIENCE_S = 10.0  # for a process to end by itself


class BlockWorkers:
    """Context of one iteration over a `BlockAdmm`: ``each`` learns all blocks and returns their outputs."""

    def __init__(self, run: BlockAdmm) -> None:
        self.run = run
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._blocks_of: list[list[int]] = []
        n = len(run.x)
        most = -(-n // max(1, round(n / run.config.batch)))
        shapes = run.shapes
        inputs = [run.x.shape[1:], *shapes[:-1]]
        self._buffers = [
            tuple(_shared(most, shape, run.x.dtype) for shape in (inner, outer, outer))
            for inner, outer in zip(inputs, shapes, strict=True)
        ]

    def __enter__(self) -> BlockWorkers:
        """Start the processes; each gets its blocks, their optimizers' state and the buffers."""
        run = self.run
        n_workers = min(run.config.workers, len(run.blocks))
        n_threads = max(1, torch.get_num_threads() // n_workers)
        context = multiprocessing.get_context("spawn")
        for block in run.blocks:
            block.share_memory()
        try:
            for i in range(n_workers):
                block_numbers = list(range(i, len(run.blocks), n_workers))
                parent_end, child_end = context.Pipe()
                states = [None if (o := run.optimizers[t]) is None else o.state_dict() for t in block_numbers]
                blocks, buffers = [run.blocks[t] for t in block_numbers], [self._buffers[t] for t in block_numbers]
                arguments = (
                    child_end,
                    dict(zip(block_numbers, zip(blocks, buffers, states, strict=True), strict=True)),
                )
                process = context.Process(
                    target=_work, args=(*arguments, run.config, n_threads), name=f"block-admm-{i}", daemon=True
                )
                process.start()
                child_end.close()  # so that a process that dies is an end of file here
                self._processes.append(process)
                self._pipes.append(parent_end)
                self._blocks_of.append(block_numbers)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Take the optimizers back and end the processes."""
        try:
            if error[0] is None or error[0] is GeneratorExit:
                with suppress(AuditError):  # at the end of the interpreter they may be gone before us
                    self.fetch()
        finally:
            self._end()

    def each(
        self, _learn: object, ts: Iterable[int], zs: list[Tensor], outs: list[Tensor], errors: list[Tensor]
    ) -> list[Tensor]:
        """Learn all blocks at the same time; like ``map(run._learn, …)``."""
        run, rows = self.run, len(zs[0])
        ts = list(ts)
        for t, *arguments in zip(ts, zs, outs, errors, strict=True):
            for buffer, value in zip(self._buffers[t], arguments, strict=True):
                buffer[:rows].copy_(value)
        for i, block_numbers in enumerate(self._blocks_of):
            orders = []
            for t in block_numbers:
                optimizer = run.optimizers[t]
                orders.append((t, run.beta[t] / rows, 0.0 if optimizer is None else optimizer.param_groups[0]["lr"]))
            self._send(i, (rows, orders))
        for i in range(len(self._pipes)):
            self._answer(i)
        return [self._buffers[t][1][:rows].clone() for t in ts]

    def fetch(self) -> None:
        """Copy the optimizers' state back, so that the run can be saved or go on without processes."""
        for i, block_numbers in enumerate(self._blocks_of):
            self._send(i, "state")
            for t, state in zip(block_numbers, self._answer(i), strict=True):
                optimizer = self.run.optimizers[t]
                if optimizer is not None:
                    optimizer.load_state_dict(state)

    def _send(self, i: int, message: object) -> None:
        try:
            self._pipes[i].send(message)
        except OSError:
            raise self._dead(i) from None

    def _answer(self, i: int) -> Any:
        try:
            kind, value = self._pipes[i].recv()
        except (EOFError, OSError):
            raise self._dead(i) from None
        if kind == "error":
            raise AuditError(f"block-admm: a worker process failed on blocks {self._names(i)}: {value}")
        return value

    def _names(self, i: int) -> str:
        return ", ".join(str(t + 1) for t in self._blocks_of[i])

    def _dead(self, i: int) -> AuditError:
        self._processes[i].join(PATIENCE_S)
        return AuditError(
            f"block-admm: the worker process of blocks {self._names(i)} ended with exit code "
            f"{self._processes[i].exitcode}; use threads or fewer workers, and in a script start under "
            'if __name__ == "__main__".'
        )

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # an end of file is the order to end
        for process in self._processes:
            process.join(PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes, self._pipes, self._blocks_of = [], [], []


def _shared(n: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    buffer = torch.zeros(n, *shape, dtype=dtype)
    buffer.share_memory_()  # type: ignore[no-untyped-call]
    return buffer


def _work(
    pipe: Connection,
    held: dict[int, tuple[nn.Module, tuple[Tensor, Tensor, Tensor], dict[str, Any] | None]],
    config: BlockAdmmConfig,
    n_threads: int,
) -> None:
    """Serve one process's blocks until the pipe ends."""
    from auditor.training.block_admm import learn_block, optimizer_of

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends us
    torch.set_num_threads(n_threads)
    torch.manual_seed(config.seed)
    maps = {t: calculus_of(block) for t, (block, _, _) in held.items()}
    optimizers = {t: optimizer_of(block, config) for t, (block, _, _) in held.items()}
    for t, (_, _, state) in held.items():
        optimizer = optimizers[t]
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return
        answer: Any = None
        kind = "done"
        try:
            if message == "state":
                answer = [None if o is None else o.state_dict() for o in optimizers.values()]
            else:
                rows, orders = message
                for t, scale, lr in orders:
                    z, out, error = (buffer[:rows] for buffer in held[t][1])
                    optimizer = optimizers[t]
                    for group in optimizer.param_groups if optimizer is not None else ():
                        group["lr"] = lr
                    out.copy_(learn_block(maps[t], optimizer, z, out, error, scale, config.theta_steps))
        except Exception as failure:
            kind, answer = "error", f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        try:
            pipe.send((kind, answer))
        except OSError:  # nobody listens any more
            return
