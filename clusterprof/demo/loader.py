"""The demo's dataloader: one forked worker, a bounded number of batches ahead.

Worker and consumer keep their own stopwatch beside the spans they emit, so that the truth does
not come from the tool that is being demonstrated.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import clusterprof
from clusterprof.demo.faults import ColdFile, burn_cpu
from clusterprof.demo.scenarios import READ_BYTES, Work


@dataclass(frozen=True, slots=True)
class Batch:
    """What the worker did for one batch, by its own stopwatch."""

    began_ns: int
    ended_ns: int
    read_ns: int
    burn_ns: int
    """CPU time of the decoding."""
    contended_ns: int
    """Time the worker was ready to run and had no CPU."""


class Loader:
    """Batches from one worker process, in order."""

    def __init__(self, work: Work, dataset: Path, steps: int, seed: int) -> None:
        context = multiprocessing.get_context("fork")
        self._batches, batches = context.Pipe(duplex=False)
        tokens, self._tokens = context.Pipe(duplex=False)
        arguments = (work, dataset, steps, seed, tokens, batches)
        self._worker = context.Process(target=_produce, args=arguments, daemon=True)
        self._worker.start()
        batches.close()  # ours would keep the pipe open after the worker's death
        tokens.close()
        for _ in range(work.prefetch):
            self._tokens.send_bytes(b"t")

    def next(self) -> Batch:
        """Return the next batch, waiting for it; EOFError when the worker died."""
        batch: Batch = self._batches.recv()
        try:
            self._tokens.send_bytes(b"t")
        except BrokenPipeError:
            pass  # the worker has produced its last batch and left
        return batch

    def close(self) -> None:
        """Wait for the worker, which ends by itself after its last batch."""
        self._worker.join(timeout=10)


def _produce(
    work: Work, dataset: Path, steps: int, seed: int, tokens: Connection, batches: Connection
) -> None:
    file = ColdFile(dataset, READ_BYTES, seed)
    for _ in range(steps):
        try:
            tokens.recv_bytes()
        except EOFError:
            return  # the rank is gone
        began_ns = time.monotonic_ns()
        with clusterprof.span("fetch"):
            read_ns, contended_ns = file.read_batch(work.reads, work.read_ns)
            contended_ns += max(0, burn_cpu(work.burn_ns) - work.burn_ns)
        ended_ns = time.monotonic_ns()
        batches.send(Batch(began_ns, ended_ns, read_ns, work.burn_ns, contended_ns))
