"""Causes at the level of a family: said when the leaf cannot be told.

Without spans a rank is judged by co-occurrence alone: the device stood still while a loading
process was at work all the time and the training process itself was not computing. That says
"storage" or "cpu", never more, and "unattributed" whenever the training process may have been the
one that kept the device waiting.
"""

from __future__ import annotations

import numpy as np

from clusterprof.attribution.partial import SHARE
from clusterprof.detectors.peers import PEER_CAUSES
from clusterprof.detectors.registry import DETECTORS
from clusterprof.findings import Cause
from clusterprof.timeline.model import (
    PHASE_SPINNING,
    PHASE_THROTTLED,
    Feeding,
    Float,
    Int,
    Lost,
    Rank,
)
from clusterprof.timeline.series import rise_of

FAMILIES: dict[str, Cause] = {
    "storage": Cause(
        "storage",
        "storage",
        "The data path waits for storage",
        "Record with the probe (--inject auto) to learn whether a local disk or a mount is behind",
    ),
    "cpu": Cause(
        "cpu",
        "cpu",
        "The data path waits for the CPU",
        "Record with the probe (--inject auto) to learn what the loading threads lack",
    ),
    "h2d": Cause("h2d", "h2d", "Copies to the GPU hold the step up", "Record with the probe"),
    "launch": Cause("launch", "launch", "The host launches too slowly", "Record with the probe"),
    "checkpoint": Cause("checkpoint", "checkpoint", "Training stands still for a checkpoint", ""),
    "fail": Cause(
        "fail", "fail", "Training failed or stood still", "Look at the rank that is named"
    ),
    "startup": Cause("startup", "startup", "The job is starting up", ""),
    "device": Cause("device", "device", "The GPU is slowed", "Check clocks and power of the node"),
    "network": Cause("network", "network", "Ranks wait for the network", "Look at its links"),
    "synchronization": Cause(
        "synchronization", "synchronization", "Ranks wait for each other", "Record on every node"
    ),
}
CAUSES: dict[str, Cause] = {
    **FAMILIES,
    **{cause.id: cause for cause in PEER_CAUSES},
    **{one.cause.id: one.cause for one in DETECTORS},
}

BY_FAMILY = ("storage", "cpu")
"""What `cooccurring` claims."""
# A loader that is ahead rests between batches; one that the device waits for never does.
AT_WORK_RATIO = 0.9
# Above this the training process itself may be what kept the device waiting.
MAIN_ON_CPU_RATIO = 0.3


def cooccurring(lost: Lost, feeding: Feeding, rank: Rank) -> dict[str, Int]:
    """Return which part of each piece goes to "storage" and to "cpu" by co-occurrence.

    int64[n] in 1/SHARE, together no more than the whole.
    """
    storage = feeding.block_io + feeding.remote_io + feeding.reading_cpu
    cpu = feeding.user_cpu + feeding.runnable + feeding.memory
    workers = {process.pid for process in rank.workers} - {rank.pid}
    by_worker = np.isin(feeding.worker_pid, np.array(sorted(workers), np.int64))
    main = _main_on_cpu(rank, lost)
    # A main thread that is blocked on reads itself is loading, whoever else works.
    sure = np.where(by_worker, main <= MAIN_ON_CPU_RATIO, storage >= AT_WORK_RATIO)
    sure &= ~np.isnan(main) & (storage + cpu >= AT_WORK_RATIO) & _reads(rank)
    sure &= (lost.phase != PHASE_SPINNING) & (lost.phase != PHASE_THROTTLED)
    whole = np.maximum(storage + cpu, 1e-9)
    of_storage = np.rint(np.where(sure, storage / whole, 0.0) * SHARE).astype(np.int64)
    return {"storage": of_storage, "cpu": np.where(sure, SHARE - of_storage, 0)}


def _main_on_cpu(rank: Rank, lost: Lost) -> Float:
    thread = rank.main.threads.get(rank.pid)
    if thread is None:
        return np.full(lost.start_ns.size, np.nan)
    length = np.maximum(lost.end_ns - lost.start_ns, 1)
    return rise_of(thread.t_ns, thread.on_cpu_ns, lost.start_ns, lost.end_ns) / length


def _reads(rank: Rank) -> bool:
    """False when the job wrote more than it read: blocked threads then save rather than load."""
    read, written = 0, 0
    for process in (rank.main, *rank.workers):
        if process.io is not None and process.io.t_ns.size:
            read += int(process.io.read_chars[-1] - process.io.read_chars[0])
            written += int(process.io.write_bytes[-1] - process.io.write_bytes[0])
    return written <= read
