"""Output folders of DLIO, and results of MLPerf Storage: waits for data in every step.

## How to make the file

    dlio_benchmark workload=unet3d_h100 ++workload.workflow.profiling=True

## How to analyze it

    clusterprof analyze hydra_log/unet3d/

## What is read

The files of a folder are one job; several folders are several jobs. `<rank>_output.json` has the
seconds of loading, of computation and of the whole step, by epoch and block. `per_epoch_stats.json`
shows when blocks began, and `summary.json` the published utilization. `iostat.json` is the output
of `iostat -o JSON -dxmt 1`, which DLIO stores. Members of gzip and zip files are read, too.

## How the numbers are computed

Every step begins where the previous one ended; the first step of a block begins with the block. A
step begins with the wait for its batch. Then the accelerator is busy for as long as DLIO slept. The
rest of the step is overhead of the loop. Accelerators are marked as *emulated*: DLIO uses none.

MLPerf's accelerator utilization (AU) follows the benchmark (`compute_metrics_train` in
`utils/statscounter.py` of DLIO): computation over the time from begin to end of a block, both
without its first step, which starts the workers and may take as long as it will. The time after the
last listed step counts. Blocks of an epoch are weighted by their steps; then the mean of the ranks
and of the epochs. Other `exclude_start_steps` than 1 are not known. AU is not reported without
compute times or without `per_epoch_stats.json`, or if a block took less time than its steps. A note
shows the published value, and another how much of the waiting was for the first batch of each
epoch.

## What it cannot see

The parts of a wait: reading, decoding or handing over. Disk counters are available only with
iostat, for the host that ran it. Times of day have no zone and are assumed to be UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.text import (
    MAX_TIME_NS,
    convert_number,
    convert_to_ns,
    read_json,
)
from clusterprof.probe import layout
from clusterprof.units import SECOND_NS

MAX_STEP_SECONDS = 1e6
_BLOCK = re.compile(r"block\d{1,6}$")
_RANK = re.compile(r"(\d{1,7})_output")
_MAX_EPOCHS = 100_000
_MAX_STEPS = 20_000_000
_MIN_LISTED_RATIO = 0.99
"""Time of a block over that of its listed steps below which one of both is wrong."""
AU_FACT = "mlperf_storage_au_ratios"
"""Fact of a device: its AU by epoch."""
STEPS, EPOCHS, SUMMARY, DISKS = "steps", "epochs", "summary", "disks"


@dataclass(slots=True)
class EpochBlock:
    """Steps of one rank in one block of one epoch, in ns."""

    epoch: int
    name: str
    load_ns: list[int]
    step_ns: list[int]
    compute_ns: list[int]
    """Empty if the file does not record it."""


@dataclass(slots=True)
class RankOutput:
    """Steps of one rank."""

    rank: int | None
    host: str = ""
    blocks: list[EpochBlock] = field(default_factory=list)


@dataclass(slots=True)
class RunFolder:
    """Files of one run."""

    path: Path
    outputs: list[RankOutput] = field(default_factory=list)
    block_start_ns: dict[tuple[int, str], int] = field(default_factory=dict)
    """When each block began, by the wall clock of the first rank."""
    block_end_ns: dict[tuple[int, str], int] = field(default_factory=dict)
    au_percent: list[float] = field(default_factory=list)
    """Published accelerator utilization, by epoch."""
    accelerators: int | None = None
    host: str = ""
    disks: list[Mapping[str, Any]] = field(default_factory=list)
    """Output of iostat, by host."""


def detect_kind(head: bytes) -> str:
    """Detect which of DLIO's files begins with these bytes; empty if none does."""
    if not head.lstrip().startswith(b"{"):
        return ""
    if re.search(rb'"load"\s*:\s*\{\s*"(block|eval)', head):
        return STEPS
    if re.match(rb'\s*\{\s*"(start|num_accelerators)"', head) and b'"train_au_' in head:
        return SUMMARY
    if re.search(rb'"block\d+"\s*:\s*\{\s*"start"', head):
        return EPOCHS
    return DISKS if re.match(rb'\s*\{\s*"sysstat"\s*:', head) and b'"disk' in head else ""


def read_file(source: Source, account: Account, folder: RunFolder) -> None:
    """Read one file of a run into the folder.

    Raises: CannotImportError when the file is not JSON.
    """
    kind = detect_kind(source.head)
    value = read_json(source)
    if not isinstance(value, dict):
        account.skipped["files without a JSON object"] += 1
    elif kind == STEPS:
        _read_steps(value, source.path.name, account, folder)
    elif kind == SUMMARY:
        _read_summary(value, account, folder)
    elif kind == EPOCHS:
        _read_epochs(value, account, folder)
    elif kind == DISKS:
        _read_disks(value, account, folder)


def _read_steps(value: Mapping[str, Any], name: str, account: Account, folder: RunFolder) -> None:
    match = _RANK.search(name)
    host = value.get("hostname")
    output = RankOutput(int(match[1]) if match else None, host if isinstance(host, str) else "")
    remaining_steps = _MAX_STEPS - sum(
        len(b.load_ns) for rank_output in folder.outputs for b in rank_output.blocks
    )
    for epoch, parts in _list_epochs(value):
        loads, steps = parts.get("load"), parts.get("proc")
        if not isinstance(loads, dict) or not isinstance(steps, dict):
            account.skipped["epochs without load times"] += 1
            continue
        computing = parts.get("compute")
        for block, load in loads.items():
            if not _BLOCK.match(block):
                account.skipped["evaluations"] += 1
                continue
            compute = computing.get(block) if isinstance(computing, dict) else None
            new_block = _build_block(epoch, block, load, steps.get(block), compute, account)
            if new_block is not None and len(new_block.load_ns) <= remaining_steps:
                remaining_steps -= len(new_block.load_ns)
                output.blocks.append(new_block)
                account.read["steps"] += len(new_block.load_ns)
    output.blocks.sort(key=lambda block_: (block_.epoch, block_.name))
    if output.blocks:
        folder.outputs.append(output)


def _list_epochs(value: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for key, parts in list(value.items())[:_MAX_EPOCHS]:
        if re.fullmatch(r"[0-9]{1,9}", key) and isinstance(parts, dict):
            yield int(key), parts


def _build_block(
    epoch: int, name: str, load: Any, steps: Any, compute: Any, account: Account
) -> EpochBlock | None:
    if not isinstance(load, list) or not isinstance(steps, list):
        account.skipped["blocks without a list of steps"] += 1
        return None
    if not isinstance(compute, list) or len(compute) != len(load):
        compute = []
    block = EpochBlock(epoch, name, [], [], [])
    for index, (wait_value, step_value) in enumerate(zip(load, steps)):
        times = [
            _convert_seconds(wait_value),
            _convert_seconds(step_value),
            _convert_seconds(compute[index]) if compute else 0,
        ]
        wait, step, busy = times
        if wait is None or step is None or busy is None:
            account.skipped["steps without a valid time"] += 1
            continue
        step = max(step, wait)
        block.load_ns.append(wait)
        block.step_ns.append(step)
        if compute:
            block.compute_ns.append(min(busy, step - wait))
    if len(load) != len(steps):
        account.skipped["load or step times without a counterpart"] += abs(len(load) - len(steps))
    return block if block.load_ns else None


def _convert_seconds(value: Any) -> int | None:
    seconds = convert_number(value)
    if seconds is None or not 0 <= seconds <= MAX_STEP_SECONDS:
        return None
    return convert_to_ns(value, SECOND_NS)


def _read_summary(value: Mapping[str, Any], account: Account, folder: RunFolder) -> None:
    metric = value.get("metric")
    published = metric.get("train_au_percentage") if isinstance(metric, dict) else None
    if isinstance(published, list):
        values = [convert_number(value_) for value_ in published[:_MAX_EPOCHS]]
        folder.au_percent = [
            percent for percent in values if percent is not None and 0 <= percent <= 100
        ]
    count = value.get("num_accelerators")
    folder.accelerators = count if isinstance(count, int) and 0 < count < 1 << 24 else None
    host = value.get("hostname")
    folder.host = host if isinstance(host, str) else ""
    account.read["published figures"] += len(folder.au_percent)


def _read_epochs(value: Mapping[str, Any], account: Account, folder: RunFolder) -> None:
    for epoch, parts in _list_epochs(value):
        for name, times in parts.items():
            if not isinstance(times, dict) or not _BLOCK.match(name):
                continue
            begin, end = parse_clock(times.get("start")), parse_clock(times.get("end"))
            if begin is None:
                account.skipped["blocks without a time of day"] += 1
                continue
            folder.block_start_ns[epoch, name] = begin
            if end is not None and end > begin:
                folder.block_end_ns[epoch, name] = end
            account.read["blocks of epochs"] += 1


def _read_disks(value: Mapping[str, Any], account: Account, folder: RunFolder) -> None:
    inner = value.get("sysstat")
    hosts = inner.get("hosts") if isinstance(inner, dict) else None
    for host in hosts if isinstance(hosts, list) else []:
        if isinstance(host, dict) and isinstance(host.get("statistics"), list):
            folder.disks.append(host)
            account.read["disk readings"] += len(host["statistics"])


def parse_clock(text: Any, form: str = "") -> int | None:
    """Parse a date and time to ns; without a zone UTC is assumed; None if it is not a time."""
    if not isinstance(text, str) or len(text) > 64:
        return None
    try:
        time = datetime.strptime(text, form) if form else datetime.fromisoformat(text)
        time = time if time.tzinfo else time.replace(tzinfo=timezone.utc)
        since_epoch = time - datetime(1970, 1, 1, tzinfo=timezone.utc)
    except (ValueError, OverflowError):
        return None
    ns = (
        since_epoch.days * 86_400 + since_epoch.seconds
    ) * SECOND_NS + since_epoch.microseconds * 1000
    return ns if 0 < ns < MAX_TIME_NS else None


Int = NDArray[np.int64]
_MIB = 1 << 20
_IOSTAT_CLOCKS = ("%m/%d/%y %H:%M:%S", "%m/%d/%Y %H:%M:%S", "%Y-%m-%dT%H:%M:%S%z")
_MAX_DISKS = 4096


def build_nodes(folder: RunFolder, account: Account) -> Iterator[NodeTables]:
    """Yield the hosts of a run."""
    block_starts, has_wall_clock = _find_block_starts(folder)
    hosts: dict[str, list[RankOutput]] = {}
    for output in sorted(
        folder.outputs, key=lambda output: (output.rank is None, output.rank or 0)
    ):
        hosts.setdefault(output.host or folder.host, []).append(output)
    world = folder.accelerators or len(folder.outputs)
    au_ratios = [_compute_au_ratios(output, folder) for output in folder.outputs]
    has_au = all(au_ratios)
    for host, outputs in hosts.items():
        node = NodeTables(host, "dlio", 0 if has_wall_clock else None, key=host or "dlio")
        for index, output in enumerate(outputs):
            pid = 1 + (output.rank if output.rank is not None else world + index)
            _add_rank(node, output, pid, world, block_starts)
            if has_au:
                ratios = au_ratios[folder.outputs.index(output)]
                node.add_device(_name_device(pid), **{AU_FACT: ratios})
        for disk_host in folder.disks if has_wall_clock else []:
            if not host or disk_host.get("nodename") == host or len(hosts) == 1:
                _add_disks(node, disk_host)
        yield node
    if folder.disks and not has_wall_clock:
        account.skipped["disk readings (the steps have no time of day)"] += 1
    notes = _build_notes(folder, has_wall_clock)
    account.notes += [text for text, _ in notes]
    account.answers += [text for text, is_answer in notes if is_answer]


def _find_block_starts(folder: RunFolder) -> tuple[dict[tuple[int, str], int], bool]:
    """Find when each block begins, from the file or from 0, and whether these are wall times."""
    blocks = sorted({(b.epoch, b.name) for output in folder.outputs for b in output.blocks})
    length = {key: 0 for key in blocks}
    for output in folder.outputs:
        for block in output.blocks:
            key = block.epoch, block.name
            length[key] = max(length[key], sum(block.step_ns))
    if all(key in folder.block_start_ns for key in blocks):
        starts = [folder.block_start_ns[key] for key in blocks]
        overlaps = (b < a + length[key] for key, a, b in zip(blocks, starts, starts[1:]))
        if not any(overlaps):
            return {key: folder.block_start_ns[key] for key in blocks}, True
    block_starts, start_ns = {}, 0
    for key in blocks:
        block_starts[key] = start_ns
        start_ns += length[key]
    if start_ns >= MAX_TIME_NS:
        raise CannotImportError("the steps take more than a century")
    return block_starts, False


def _add_rank(
    node: NodeTables,
    output: RankOutput,
    pid: int,
    world: int,
    block_starts: Mapping[tuple[int, str], int],
) -> None:
    device = _name_device(pid)
    node.add_device(device, vendor="emulated", name="DLIO's sleep", emulated=True)
    node.add_rank(pid, output.rank, world, device)
    busy: list[tuple[Int, Int]] = []
    number_ = 1  # the lists have no step numbers
    for block in sorted(output.blocks, key=lambda b: block_starts[b.epoch, b.name]):
        start, loaded, end = _compute_step_times(block, block_starts[block.epoch, block.name])
        count = start.size
        node.add_spans(pid, layout.STEP, start, end, np.arange(count) + number_, 2, -1, -1)
        first = np.zeros(count, np.int64)
        first[0] = 1
        waits = loaded > start
        node.add_spans(
            pid,
            layout.DATA_WAIT,
            start[waits],
            loaded[waits],
            (np.arange(count) + number_)[waits],
            -1,
            -1,
            first[waits],
        )
        node.add_named_spans(pid, "epoch", start[:1], end[-1:])
        number_ += count
        computed = loaded + np.array(block.compute_ns, np.int64) if block.compute_ns else end
        busy.append((loaded, computed))
    start, end = (np.concatenate([pair[i] for pair in busy]) for i in (0, 1))
    nonempty = end > start
    low = min(block_starts[b.epoch, b.name] for b in output.blocks)
    node.add_busy_time(device, start[nonempty], end[nonempty], low, int(end.max(initial=low)))


def _name_device(pid: int) -> str:
    return f"emulated-{pid - 1}"


def _compute_au_ratios(output: RankOutput, folder: RunFolder) -> list[float]:
    """Compute MLPerf Storage's AU of a rank by epoch, 0 to 1; empty if it is not known."""
    sums: dict[int, tuple[float, int]] = {}
    for block in output.blocks:
        key, steps = (block.epoch, block.name), len(block.step_ns)
        running_ns = folder.block_end_ns.get(key, 0) - folder.block_start_ns.get(key, 0)
        running_ns -= block.step_ns[0]
        listed_ns = sum(block.step_ns[1:])
        if not block.compute_ns or running_ns <= 0 or running_ns < _MIN_LISTED_RATIO * listed_ns:
            return []
        weighted, count = sums.get(block.epoch, (0.0, 0))
        ratio = min(sum(block.compute_ns[1:]) / running_ns, 1.0)
        sums[block.epoch] = weighted + ratio * steps, count + steps
    return [weighted / count for weighted, count in sums.values()]


def _compute_step_times(block: EpochBlock, begin_ns: int) -> tuple[Int, Int, Int]:
    end = begin_ns + np.cumsum(np.array(block.step_ns, np.int64))
    start = np.concatenate([[begin_ns], end[:-1]])
    return start, start + np.array(block.load_ns, np.int64), end


def _add_disks(node: NodeTables, host_disks: Mapping[str, Any]) -> None:
    """Turn iostat's rates into counters; each reading is the mean since the previous one."""
    rows: dict[str, list[tuple[int, ...]]] = {}
    before: int | None = None
    for sample in host_disks["statistics"]:
        if not isinstance(sample, dict) or not isinstance(sample.get("disk"), list):
            continue
        now = next(
            (t for f in _IOSTAT_CLOCKS if (t := parse_clock(sample.get("timestamp"), f))), None
        )
        if now is None or (before is not None and now <= before):
            continue
        if before is not None:
            for disk in sample["disk"]:
                _add_reading(rows, disk, now, now - before)
        before = now
    for name, readings in rows.items():
        table = np.array(readings, np.int64).T
        t_ns = np.concatenate([[table[0, 0] - table[1, 0]], table[0]])
        for row, signal in enumerate(_COUNTERS, 2):
            total = np.concatenate([[0], np.cumsum(table[row])])
            node.add_series(signal.name, name, t_ns, total)


_COUNTERS = (
    signals.DISK_READ_BYTES,
    signals.DISK_READS,
    signals.DISK_READ_TIME,
    signals.DISK_WRITE_BYTES,
    signals.DISK_WRITES,
    signals.DISK_BUSY,
    signals.DISK_QUEUE,
)


def _add_reading(
    rows: dict[str, list[tuple[int, ...]]], disk: Any, now: int, length_ns: int
) -> None:
    name = disk.get("disk_device") if isinstance(disk, dict) else None
    if not isinstance(name, str) or (name not in rows and len(rows) >= _MAX_DISKS):
        return
    seconds = length_ns / SECOND_NS

    def get_rate(key: str) -> float:
        value = convert_number(disk.get(key))
        return min(max(value or 0.0, 0.0), 1e9)

    reads = get_rate("r/s") * seconds
    values = (
        get_rate("rMB/s") * _MIB * seconds,
        reads,
        reads * get_rate("r_await") * 1e6,
        get_rate("wMB/s") * _MIB * seconds,
        get_rate("w/s") * seconds,
        get_rate("util") / 100 * length_ns,
        get_rate("aqu-sz") * length_ns,
    )
    rows.setdefault(name, []).append((now, length_ns, *(min(round(v), 1 << 42) for v in values)))


def _describe_published_au(folder: RunFolder) -> str:
    mean = sum(folder.au_percent) / len(folder.au_percent)
    return f"published accelerator utilization (AU): {mean:.2f} % of whole epochs"


def _build_notes(folder: RunFolder, has_wall_clock: bool) -> list[tuple[str, bool]]:
    """Build the notes, each with whether it answers what the benchmark is run for."""
    blocks: Sequence[EpochBlock] = [block for output in folder.outputs for block in output.blocks]
    loaded, step_ns = (sum(sum(b.load_ns) for b in blocks), sum(sum(b.step_ns) for b in blocks))
    first = sum(b.load_ns[0] for b in blocks)
    emulated = "DLIO sleeps instead of computing: its emulated accelerators count as busy then"
    notes = [(emulated, False)]
    if any(not b.compute_ns for b in blocks):
        text = "without compute times, all of a step except loading counts as computation"
        notes.append((text, False))
    if step_ns:
        first_share = (
            f"; {100 * first / loaded:.1f} % of that for the first batch of an epoch"
            if loaded
            else ""
        )
        part = 100 * loaded / step_ns
        text = f"waiting for data took {part:.2f} % of the listed steps{first_share}"
        notes.append((text, True))
    if folder.au_percent:
        busy = sum(sum(b.compute_ns) for b in blocks)
        compute_share = (
            f"; of the listed steps {100 * busy / step_ns:.1f} % are computation"
            if busy and step_ns
            else ""
        )
        notes.append((_describe_published_au(folder) + compute_share, True))
    if has_wall_clock and folder.block_end_ns:
        remaining = sum(
            folder.block_end_ns[key] - folder.block_start_ns[key] for key in folder.block_end_ns
        )
        ranks = max(len(folder.outputs), 1)
        if remaining * ranks > step_ns:
            seconds = (remaining - step_ns / ranks) / SECOND_NS
            text = (
                f"{seconds:.1f} s of the epochs lie outside the listed steps: they follow the"
                " last step of each"
            )
            notes.append((text, False))
    elif not has_wall_clock:
        notes.append(("no times of day: blocks are placed one after the other", False))
    return notes


class Dlio:
    """Importer of DLIO's output folders."""

    name: ClassVar[str] = "dlio"
    title: ClassVar[str] = "DLIO or MLPerf Storage output"
    combines_files: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a file holds steps, blocks of epochs, the summary, or iostat output."""
        return bool(detect_kind(head))

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the hosts of every run.

        Raises: CannotImportError when no file holds the steps of a rank.
        """
        folders: dict[Path, RunFolder] = {}
        first: dict[Path, Account] = {}
        for source, account in zip(sources, accounts):
            folder_path = source.path.parent
            folder = folders.setdefault(folder_path, RunFolder(folder_path))
            first.setdefault(folder_path, account)
            try:
                read_file(source, account, folder)
            except CannotImportError as error:
                account.refuse(error.message)
        runs = [folder for folder in folders.values() if folder.outputs]
        for path, folder in folders.items():
            if folder.au_percent and not folder.outputs:
                first[path].answers.append(_describe_published_au(folder))
        if not runs and any(account.answers for account in accounts):
            return
        if not runs:
            raise CannotImportError(
                "the files hold no steps of any rank: <rank>_output.json is needed",
                "give the whole output folder of the run",
            )
        for run in runs:
            for node in build_nodes(run, first[run.path]):
                if len(runs) > 1:
                    node.job = f"dlio-{run.path.name}"
                yield node
