"""Nsight Systems profiles, exported to SQLite.

## What is read

`nsys profile -t cuda,nvtx,osrt --nic-metrics=efa|lf …`, then `nsys export -t sqlite`: kernels,
copies, fills and graphs of all devices; CUDA runtime and driver calls; NVTX ranges of all
domains; calls of the system (OSRT); bytes of network adapters; who and what the target was. Every
schema version since 2020: a table or column that a file lacks is not asked for. A packed file
(`.gz`) is read in memory.

## How it is understood

A device is busy when anything runs on it: kernels, copies in any direction, fills, graphs. Each
process with a device is a rank; a device on which it did less than 1 % of its work is no device
of its own. Its rank is that of the profiled command's launcher (`RANK`, `SLURM_PROCID`, …), else
processes are numbered in the order of files and devices. Steps are NVTX ranges named step or
iteration, with a number or without; else they go from the end of one optimizer step to the next;
else they are a range that repeats and covers half of the time; else the whole profile is one
step, from the first to the last activity of the device. Ranges named after a data loader on a
thread that launches kernels are waits for data. A gap of more than 1 µs is the host's (starved)
when the call that launched what comes after it returned only after the gap had begun, and until it
returned: nothing was in the queue until then. One rule decides that in all traces of kernels
(`importers/device_gaps`); a copy between host and device, whose call returns only after it, was
launched too late when that call began only after the gap had. NCCL and RCCL kernels are collective
operations; those of several ranks are one operation when they overlap in time, in one order, in
four of five cases at least.

## Where it is blind

The sizes of collective operations are unknown, and so is which communicator a kernel belongs to
(NCCL's NVTX payloads are only in exports with `--include-blobs`, and not read). Send and receive
in one kernel are read as an exchange of all ranks that were in it. With `--cuda-graph-
trace=graph` a graph is one activity: operations inside it are not seen. Waits of loader processes
that launch nothing are not read. Several processes that each call their only device 0 look like
one shared device where the file has no table of CUDA devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof.errors import UsageError
from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.nsys.database import MAGIC, DamagedError, Database
from clusterprof.importers.nsys.profile import Profile, node_of, profile_of, put_in_order
from clusterprof.importers.tables import NodeTables

_SIGNS = (b"CUPTI_ACTIVITY_KIND_", b"StringIds", b"NVTX_EVENTS", b"TARGET_INFO_")


class Nsys:
    """Nsight Systems profiles of one job, each a node's or a process's."""

    name: ClassVar[str] = "nsys"
    title: ClassVar[str] = "Nsight Systems profile (SQLite)"
    together: ClassVar[bool] = True

    def recognises(self, head: bytes, path: Path) -> bool:
        """Say whether this is a SQLite file with a table that Nsight Systems writes."""
        return head.startswith(MAGIC) and any(sign in head for sign in _SIGNS)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield a node per profile. Raises CannotImportError when none says anything."""
        profiles: list[Profile] = []
        for source, account in zip(sources, accounts):
            try:
                with Database(source) as db:
                    profiles.append(profile_of(db, account))
            except (UsageError, DamagedError) as error:
                account.refuse(getattr(error, "message", str(error)))
            if profiles and profiles[-1].account is account and not profiles[-1].parts:
                account.refuse("no device did anything in it")
                profiles.pop()
        if not profiles:
            raise CannotImportError(
                "; ".join(account.cut for account in accounts),
                "profile with nsys profile -t cuda,nvtx and export with nsys export -t sqlite",
            )
        groups = put_in_order(profiles)
        for profile in profiles:
            yield node_of(profile, groups)
