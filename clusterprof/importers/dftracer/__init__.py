"""Traces of DFTracer: what a training process read, loaded and computed, call by call.

## What is read

`.pfw` and `.pfw.gz`: one event of the Chrome format per line, in microseconds, after a first line
`[`; a file that was never closed is read to its last whole line. All files of a job belong
together, one per process: give the folder.

    DFTRACER_ENABLE=1 DFTRACER_LOG_FILE=trace DFTRACER_DATA_DIR=all \\
        DFTRACER_INC_METADATA=1 python train.py

The host comes from `HH`, the file systems from the paths of `FH`, rank and size of the job from a
name as DLIO gives it (`trace-3-of-8.pfw`); otherwise the rank stays unknown. Reads, opens and
looks at files (categories POSIX and STDIO), items (`__getitem__`, `data.item`), waits for batches
(`loop.iter`, `fetch.iter`), computing (`TorchFramework.compute`; `forward`, `backward`, `step` of
the AI annotations), epochs, evaluations, checkpoints and copies to the device are understood; the
rest is counted and left out. A process that only loads is a dataloader worker of its parent.

## How it is understood

A step ends with the last computing before the next wait for data, and begins where the one before
ended, the first of an epoch where the epoch began. Steps are numbered from 1 in the order of
time: the numbers in the file are those of the loader, which runs ahead.

Waiting for data is the time of the training process in `__getitem__` and in the loop over the
loader, less any computing. What stands behind it: time in which at least one call to the file
system was under way is *reading*, the rest of the items is *computing* (decoding, copying, Python:
no such call was under way). Of waits for worker processes the parts are those of all workers
together during the wait.

DLIO's computing is a sleep, so its accelerator is said to be emulated: busy while it sleeps, idle
otherwise. Of other programs the device is not seen: what they lost is at most the time of their
host in waits.

## Where it is blind

The device; reads by memory mapping; the network. Collective operations of the AI annotations are
left out. A path says little of the file system behind it: names as `lustre`, `gpfs` and `nfs`
count as network file systems, `/tmp` and the like as local, all others as unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.dftracer.events import Job
from clusterprof.importers.dftracer.job import nodes_of
from clusterprof.importers.tables import NodeTables

_FIRST = re.compile(rb"\[?\s*\{([^\n]*)")
_PHASE = re.compile(rb'"ph"\s*:')
_ARGUMENTS, _HOST = re.compile(rb'"args"\s*:\s*\{'), re.compile(rb'"hhash"\s*:')
_CATEGORY = re.compile(rb'"cat"\s*:\s*"(?:dftracer|POSIX|STDIO)"')


class Dftracer:
    """Files of a DFTracer run."""

    name: ClassVar[str] = "dftracer"
    title: ClassVar[str] = "DFTracer trace"
    together: ClassVar[bool] = True

    def recognises(self, head: bytes, path: Path) -> bool:
        """One event per line, each with the hash of its host, or of a category of the tracer's."""
        first = _FIRST.match(head)
        if first is None or not _PHASE.search(first[1]):
            return False
        said = _ARGUMENTS.search(first[1])
        with_host = said is not None and _HOST.search(first[1], said.end()) is not None
        return with_host or _CATEGORY.search(first[1]) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the hosts of the job. Raises CannotImportError when no process of it trains."""
        job = Job()
        for source, account in zip(sources, accounts):
            job.read(source, account)
        found = 0
        for node in nodes_of(job, accounts[0]):
            found += 1
            yield node
        if not found:
            raise CannotImportError(
                "no process waited for batches or computed: only its reads are there",
                "annotate the training loop, or trace DLIO: docs/importers.md",
            )
        if any(one.emulated for one in job.processes.values()):
            accounts[0].notes.append(
                "DLIO's computing is a sleep: its accelerators are emulated, busy while it sleeps"
            )
