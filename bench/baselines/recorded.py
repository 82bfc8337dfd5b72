"""A recording in the form that `rules.py` expects, and two rules that need counters.

Only for recordings of nodes that share a monotonic clock, as those of `clusterprof_lab.real` do:
the rules compare arrivals on a common clock. Time before a rank's first data wait is left out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.analysis.timeline.collectives.operations import Operations
from clusterprof.probe import layout
from clusterprof.signals import CPU_IDLE, CPU_IOWAIT, CPU_SYSTEM, CPU_USER
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Columns, Event, Spans
from tests.support.synthetic.jobs import CATEGORIES, WORK, Job, Truth

LOADING = CATEGORIES.index("storage-local")
"""Where the wait for data is kept, whatever it was for."""
IOWAIT_ABOVE_RATIO = 0.05
AU_PASSES_RATIO = 0.90
"""MLPerf Storage: storage keeps up when the accelerators are used that much (unet3d, resnet50)."""
_PAIRS = (layout.SEND, layout.RECV)
_CPU = (CPU_USER.name, CPU_SYSTEM.name, CPU_IDLE.name, CPU_IOWAIT.name)


@dataclass(frozen=True)
class Recorded:
    """What the rules may see of one recording."""

    job: Job
    iowait_ratio: dict[int, float]
    """By rank, of its node's CPUs."""
    au_ratio: dict[int, float]
    """By rank: time it neither waited for data nor was in operations, of its time in steps."""

    def iowait_above(self) -> int:
        """The first rank of the node with most I/O wait, -1 when none is above the limit."""
        most = max(self.iowait_ratio, key=lambda rank: (self.iowait_ratio[rank], -rank))
        return most if self.iowait_ratio[most] > IOWAIT_ABOVE_RATIO else -1

    def au_below(self) -> int:
        """The rank whose accelerator is used least, -1 when all are used enough."""
        least = min(self.au_ratio, key=lambda rank: (self.au_ratio[rank], rank))
        return least if self.au_ratio[least] < AU_PASSES_RATIO else -1


def read_recording(recording: Path) -> Recorded:
    """Read all nodes of a recording."""
    waits: dict[int, np.ndarray] = {}
    stays: dict[int, np.ndarray] = {}
    iowait: dict[int, float] = {}
    for folder in list_node_folders(recording):
        records = list(NodeReader(folder))
        rank_of = {
            record.attributes["pid"]: record.attributes["rank"]
            for record in records
            if isinstance(record, Event)
            and record.kind == "process-registered"
            and record.attributes.get("rank") is not None
        }
        spans = _list_spans(records)
        ratio = _compute_iowait_ratio(records)
        for pid, table in spans.items():
            rank = rank_of.get(pid)
            if rank is None or not (table[:, 2] == layout.COLLECTIVE).any():
                continue  # a loader's worker, or the launcher
            waits[rank] = table[table[:, 2] == layout.DATA_WAIT]
            begun = waits[rank][:, 0].min()
            stays[rank] = table[(table[:, 2] == layout.COLLECTIVE) & (table[:, 0] >= begun)]
            iowait[rank] = ratio
    return Recorded(_make_job(waits, stays), iowait, _compute_au(waits, stays))


def _list_spans(records: list[Any]) -> dict[int, np.ndarray]:
    parts = defaultdict(list)
    for record in records:
        if isinstance(record, Spans):
            names = ("start_ns", "end_ns", "kind", "a", "b", "d")
            parts[record.pid].append(
                np.stack([np.asarray(record.columns[n]) for n in names], axis=1)
            )
    return {pid: np.concatenate(blocks) for pid, blocks in parts.items()}


def _compute_iowait_ratio(records: list[Any]) -> float:
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for record in records:
        if isinstance(record, Columns):
            for name, device, values in zip(record.signals, record.devices, record.values):
                if name in _CPU and device == "all" and len(values):
                    first.setdefault(name, float(values[0]))
                    last[name] = float(values[-1])
    grown = {name: last[name] - first[name] for name in last}
    return grown.get(CPU_IOWAIT.name, 0.0) / max(sum(grown.values()), 1.0)


def _compute_au(waits: dict[int, np.ndarray], stays: dict[int, np.ndarray]) -> dict[int, float]:
    out = {}
    for rank, wait in waits.items():
        lost = sum(int((spans[:, 1] - spans[:, 0]).sum()) for spans in (wait, stays[rank]))
        whole = int(max(wait[:, 1].max(), stays[rank][:, 1].max()) - wait[:, 0].min())
        out[rank] = 1 - lost / whole
    return out


def _make_job(waits: dict[int, np.ndarray], stays: dict[int, np.ndarray]) -> Job:
    """Match operations by group and number; those that not all members were seen in are left."""
    met: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = defaultdict(dict)
    for rank, table in stays.items():
        order = np.argsort(table[:, 1], kind="stable")
        spent = _sum_spent(waits[rank], table[order])
        for (start, end, _, group, number, what), sums in zip(table[order].tolist(), spent):
            kind = what & layout.OPERATION_MASK
            peer = (what >> layout.PEER_SHIFT & layout.PEER_MASK) - 1
            way = (rank, peer) if kind == layout.SEND else (peer, rank)
            key = (group, number, *(way if kind in _PAIRS else ()))
            met[key][rank] = (start, end, kind, *sums)
    pairs = {key: rows for key, rows in met.items() if len(key) > 2 and len(rows) == 2}
    whole = {key: rows for key, rows in met.items() if len(key) == 2 and len(rows) == len(stays)}
    ends = {key: max(row[1] for row in rows.values()) for key, rows in {**pairs, **whole}.items()}
    order = sorted(ends, key=lambda key: ends[key])
    rows = [(rank, *row) for key in order for rank, row in sorted(met[key].items())]
    table = np.array(rows, np.int64)
    size = [len(met[key]) for key in order]
    teams: dict[tuple[int, ...], int] = {}
    label = [teams.setdefault((key[0], *sorted(key[2:])), len(teams)) for key in order]
    kinds = np.array([next(iter(met[key].values()))[2] for key in order], np.int64)
    ops = Operations(
        np.concatenate([[0], np.cumsum(size)]),
        np.array(label),
        kinds,
        np.full(len(order), -1),
        np.ones(len(order), np.bool_),
        table[:, 0],
        table[:, 1],
        table[:, 2],
        table[:, 2] - table[:, 1],
        np.arange(len(rows)),
    )
    ranks = max(stays) + 1
    truth = Truth(np.zeros((ranks, 1), np.int64))
    return Job(ops, table[:, 4:], truth, (), ranks, table[:, 2])


def _sum_spent(wait: np.ndarray, stay: np.ndarray) -> np.ndarray:
    """What the rank had spent when it came to each operation: loading, and work."""
    begun = wait[:, 0].min()
    out = np.zeros((len(stay), len(CATEGORIES)), np.int64)
    blocked = np.cumsum(stay[:, 1] - stay[:, 0]) - (stay[:, 1] - stay[:, 0])
    for row, start in enumerate(stay[:, 0].tolist()):
        out[row, LOADING] = (wait[:, 1] - wait[:, 0])[wait[:, 1] <= start].sum()
    out[:, WORK] = stay[:, 0] - begun - blocked - out[:, LOADING]
    return out
