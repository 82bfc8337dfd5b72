"""Output folders of DLIO, and results of MLPerf Storage: waits for data of every step.

## What is read

All files of a run's folder are one job, several folders several jobs: `<rank>_output.json`
(seconds of loading, computing and the whole step, by epoch and block), `per_epoch_stats.json`
(when blocks began), `summary.json` (the published utilisation) and a capture of `iostat -o JSON
-dxmt 1`, which DLIO keeps as `iostat.json`. Members of gzip and zip files are read, too.

    dlio_benchmark workload=unet3d_h100 ++workload.workflow.profiling=True

## How it is understood

Every step begins where the one before ended, the first of a block when the block began; it begins
with the wait for its batch, then the accelerator is busy for as long as DLIO slept. What else is in
a step is overhead of the loop. Accelerators are *emulated*: DLIO has none.

MLPerf's accelerator utilisation (AU) is the computing of an epoch over its whole time; ours
leaves out the first step and what is between the listed steps. A note has the published one
beside the share of the listed steps. A note says how much of the waiting was for the first batch
of each epoch: caches are cold and workers begin there.

## Where it is blind

What a wait was made of: reading, decoding or handing over. Counters of disks are there with iostat,
of the host that ran it. Times of day have no zone and are taken as UTC.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.dlio.node import nodes_of
from clusterprof.importers.dlio.outputs import Folder, kind_of, read_file
from clusterprof.importers.tables import NodeTables


class Dlio:
    """The files of DLIO's output folders."""

    name: ClassVar[str] = "dlio"
    title: ClassVar[str] = "DLIO or MLPerf Storage output"
    together: ClassVar[bool] = True

    def recognises(self, head: bytes, path: Path) -> bool:
        """Steps with times of loading, blocks of epochs, the summary, or iostat's capture."""
        return bool(kind_of(head))

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the hosts of every run. Raises CannotImportError when no rank's steps are there."""
        folders: dict[Path, Folder] = {}
        first: dict[Path, Account] = {}
        for source, account in zip(sources, accounts):
            where = source.path.parent
            folder = folders.setdefault(where, Folder(where))
            first.setdefault(where, account)
            try:
                read_file(source, account, folder)
            except CannotImportError as error:
                account.refuse(error.message)
        some = [one for one in folders.values() if one.outputs]
        if not some:
            raise CannotImportError(
                "no steps of any rank: <rank>_output.json is needed",
                "give the whole output folder of the run",
            )
        for one in some:
            for node in nodes_of(one, first[one.path]):
                if len(some) > 1:
                    node.job = f"dlio-{one.path.name}"
                yield node
