"""A DLIO run as nodes of ours: steps, waits for data, an accelerator that slept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.importers.base import Account, CannotImportError
from clusterprof.importers.dlio.outputs import SECOND_NS, Block, Folder, Output, clock_ns
from clusterprof.importers.tables import NodeTables
from clusterprof.importers.text_lines import TIME_AT_MOST_NS, number
from clusterprof.probe import layout

Int = NDArray[np.int64]
_MIB = 1 << 20
_IOSTAT_CLOCKS = ("%m/%d/%y %H:%M:%S", "%m/%d/%Y %H:%M:%S", "%Y-%m-%dT%H:%M:%S%z")
_DISKS_AT_MOST = 4096


def nodes_of(folder: Folder, account: Account) -> Iterator[NodeTables]:
    """Yield the hosts of a run."""
    begins, wall = _begins(folder)
    hosts: dict[str, list[Output]] = {}
    for one in sorted(folder.outputs, key=lambda one: (one.rank is None, one.rank or 0)):
        hosts.setdefault(one.host or folder.host, []).append(one)
    world = folder.accelerators or len(folder.outputs)
    for host, outputs in hosts.items():
        node = NodeTables(host, "dlio", 0 if wall else None, key=host or "dlio")
        for at, one in enumerate(outputs):
            pid = 1 + (one.rank if one.rank is not None else world + at)
            _add_rank(node, one, pid, world, begins)
        for said in folder.disks if wall else []:
            if not host or said.get("nodename") == host or len(hosts) == 1:
                _add_disks(node, said)
        yield node
    if folder.disks and not wall:
        account.skipped["readings of disks (no time of day to lay them by)"] += 1
    account.notes += _notes(folder, wall)


def _begins(folder: Folder) -> tuple[dict[tuple[int, str], int], bool]:
    """When each block begins: as its file says; else one after the other, from 0."""
    blocks = sorted({(b.epoch, b.name) for one in folder.outputs for b in one.blocks})
    length = {key: 0 for key in blocks}
    for one in folder.outputs:
        for block in one.blocks:
            key = block.epoch, block.name
            length[key] = max(length[key], sum(block.step_ns))
    if all(key in folder.begins_ns for key in blocks):
        known = [folder.begins_ns[key] for key in blocks]
        over = (b < a + length[key] for key, a, b in zip(blocks, known, known[1:]))
        if not any(over):
            return {key: folder.begins_ns[key] for key in blocks}, True
    begins, at = {}, 0
    for key in blocks:
        begins[key] = at
        at += length[key]
    if at >= TIME_AT_MOST_NS:
        raise CannotImportError("its steps take more than a century")
    return begins, False


def _add_rank(
    node: NodeTables, one: Output, pid: int, world: int, begins: Mapping[tuple[int, str], int]
) -> None:
    device = f"emulated-{pid - 1}"
    node.device(device, vendor="emulated", name="DLIO's sleep", emulated=True)
    node.rank(pid, one.rank, world, device)
    busy: list[tuple[Int, Int]] = []
    number_ = 1  # the lists have no numbers
    for block in sorted(one.blocks, key=lambda b: begins[b.epoch, b.name]):
        start, loaded, end = _times(block, begins[block.epoch, block.name])
        count = start.size
        node.spans(pid, layout.STEP, start, end, np.arange(count) + number_, 2, -1, -1)
        first = np.zeros(count, np.int64)
        first[0] = 1
        waits = loaded > start
        node.spans(
            pid, layout.DATA_WAIT, start[waits], loaded[waits],
            (np.arange(count) + number_)[waits], -1, -1, first[waits],
        )  # fmt: skip
        node.named_spans(pid, "epoch", start[:1], end[-1:])
        number_ += count
        computed = loaded + np.array(block.compute_ns, np.int64) if block.compute_ns else end
        busy.append((loaded, computed))
    start, end = (np.concatenate([pair[i] for pair in busy]) for i in (0, 1))
    some = end > start
    low = min(begins[b.epoch, b.name] for b in one.blocks)
    node.busy(device, start[some], end[some], low, int(end.max(initial=low)))


def _times(block: Block, begin_ns: int) -> tuple[Int, Int, Int]:
    end = begin_ns + np.cumsum(np.array(block.step_ns, np.int64))
    start = np.concatenate([[begin_ns], end[:-1]])
    return start, start + np.array(block.load_ns, np.int64), end


def _add_disks(node: NodeTables, said: Mapping[str, Any]) -> None:
    """Turn iostat's rates into counters, each reading being the mean since the one before."""
    rows: dict[str, list[tuple[int, ...]]] = {}
    before: int | None = None
    for one in said["statistics"]:
        if not isinstance(one, dict) or not isinstance(one.get("disk"), list):
            continue
        now = next((t for f in _IOSTAT_CLOCKS if (t := clock_ns(one.get("timestamp"), f))), None)
        if now is None or (before is not None and now <= before):
            continue
        if before is not None:
            for disk in one["disk"]:
                _add_reading(rows, disk, now, now - before)
        before = now
    for name, readings in rows.items():
        table = np.array(readings, np.int64).T
        t_ns = np.concatenate([[table[0, 0] - table[1, 0]], table[0]])
        for row, signal in enumerate(_COUNTERS, 2):
            grown = np.concatenate([[0], np.cumsum(table[row])])
            node.series(signal.name, name, t_ns, grown)


_COUNTERS = (
    signals.DISK_READ_BYTES, signals.DISK_READS, signals.DISK_READ_TIME, signals.DISK_WRITE_BYTES,
    signals.DISK_WRITES, signals.DISK_BUSY, signals.DISK_QUEUE,
)  # fmt: skip


def _add_reading(
    rows: dict[str, list[tuple[int, ...]]], disk: Any, now: int, length_ns: int
) -> None:
    name = disk.get("disk_device") if isinstance(disk, dict) else None
    if not isinstance(name, str) or (name not in rows and len(rows) >= _DISKS_AT_MOST):
        return
    seconds = length_ns / SECOND_NS

    def of(key: str) -> float:
        value = number(disk.get(key))
        return min(max(value or 0.0, 0.0), 1e9)

    reads = of("r/s") * seconds
    values = (
        of("rMB/s") * _MIB * seconds, reads, reads * of("r_await") * 1e6,
        of("wMB/s") * _MIB * seconds, of("w/s") * seconds, of("util") / 100 * length_ns,
        of("aqu-sz") * length_ns,
    )  # fmt: skip
    rows.setdefault(name, []).append((now, length_ns, *(min(round(v), 1 << 42) for v in values)))


def _notes(folder: Folder, wall: bool) -> list[str]:
    blocks: Sequence[Block] = [block for one in folder.outputs for block in one.blocks]
    loaded, took = (sum(sum(b.load_ns) for b in blocks), sum(sum(b.step_ns) for b in blocks))
    first = sum(b.load_ns[0] for b in blocks)
    said = ["DLIO's computing is a sleep: its accelerators are emulated, busy while it sleeps"]
    if any(not b.compute_ns for b in blocks):
        said.append("without times of computing all of a step that is no load counts as computing")
    if took:
        part = (
            f"; {100 * first / loaded:.1f} % of that for the first batch of an epoch"
            if loaded
            else ""
        )
        said.append(f"waiting for data took {100 * loaded / took:.2f} % of the listed steps{part}")
    if folder.au_percent:
        mean = sum(folder.au_percent) / len(folder.au_percent)
        busy = sum(sum(b.compute_ns) for b in blocks)
        ours = (
            f"; of the listed steps {100 * busy / took:.1f} % are computing"
            if busy and took
            else ""
        )
        said.append(f"published accelerator utilisation (AU): {mean:.2f} % of whole epochs{ours}")
    if wall and folder.ends_ns:
        rest = sum(folder.ends_ns[key] - folder.begins_ns[key] for key in folder.ends_ns)
        ranks = max(len(folder.outputs), 1)
        if rest * ranks > took:
            seconds = (rest - took / ranks) / SECOND_NS
            said.append(
                f"{seconds:.1f} s of the epochs are in none of the listed steps: they follow the"
                " last step of each"
            )
    elif not wall:
        said.append("no times of day: blocks are laid one after the other")
    return said
