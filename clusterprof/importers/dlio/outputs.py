"""What DLIO writes into its output folder: steps of each rank, epochs, summary."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from clusterprof.importers.base import Account, Source
from clusterprof.importers.text_lines import TIME_AT_MOST_NS, number, whole_json, whole_ns

SECOND_NS = 1_000_000_000
STEP_SECONDS_AT_MOST = 1e6
_BLOCK = re.compile(r"block\d{1,6}$")
_RANK = re.compile(r"(\d{1,7})_output")
_EPOCHS_AT_MOST = 100_000
_STEPS_AT_MOST = 20_000_000
STEPS, EPOCHS, SUMMARY, DISKS = "steps", "epochs", "summary", "disks"


@dataclass(slots=True)
class Block:
    """The steps of one rank in one block of one epoch, in ns."""

    epoch: int
    name: str
    load_ns: list[int]
    step_ns: list[int]
    compute_ns: list[int]
    """Empty where the file does not say."""


@dataclass(slots=True)
class Output:
    """One rank."""

    rank: int | None
    host: str = ""
    blocks: list[Block] = field(default_factory=list)


@dataclass(slots=True)
class Folder:
    """One run."""

    path: Path
    outputs: list[Output] = field(default_factory=list)
    begins_ns: dict[tuple[int, str], int] = field(default_factory=dict)
    """When a block began, by the wall clock of the first rank."""
    ends_ns: dict[tuple[int, str], int] = field(default_factory=dict)
    au_percent: list[float] = field(default_factory=list)
    """Published accelerator utilisation, by epoch."""
    accelerators: int | None = None
    host: str = ""
    disks: list[Mapping[str, Any]] = field(default_factory=list)
    """Of iostat, host by host."""


def kind_of(head: bytes) -> str:
    """Return which of DLIO's files begins like this; "" for none."""
    if not head.lstrip().startswith(b"{"):
        return ""
    if re.search(rb'"load"\s*:\s*\{\s*"(block|eval)', head):
        return STEPS
    if re.match(rb'\s*\{\s*"(start|num_accelerators)"', head) and b'"train_au_' in head:
        return SUMMARY
    if re.search(rb'"block\d+"\s*:\s*\{\s*"start"', head):
        return EPOCHS
    return DISKS if re.match(rb'\s*\{\s*"sysstat"\s*:', head) and b'"disk' in head else ""


def read_file(source: Source, account: Account, folder: Folder) -> None:
    """Take in one file of a run. Raises CannotImportError for what is no JSON."""
    kind = kind_of(source.head)
    value = whole_json(source)
    if not isinstance(value, dict):
        account.skipped["files that hold no object"] += 1
    elif kind == STEPS:
        _steps(value, source.path.name, account, folder)
    elif kind == SUMMARY:
        _summary(value, account, folder)
    elif kind == EPOCHS:
        _epochs(value, account, folder)
    elif kind == DISKS:
        _disks(value, account, folder)


def _steps(value: Mapping[str, Any], name: str, account: Account, folder: Folder) -> None:
    match = _RANK.search(name)
    host = value.get("hostname")
    output = Output(int(match[1]) if match else None, host if isinstance(host, str) else "")
    room = _STEPS_AT_MOST - sum(len(b.load_ns) for one in folder.outputs for b in one.blocks)
    for epoch, parts in _epochs_of(value):
        loads, steps = parts.get("load"), parts.get("proc")
        if not isinstance(loads, dict) or not isinstance(steps, dict):
            account.skipped["epochs without times of loading"] += 1
            continue
        computing = parts.get("compute")
        for block, load in loads.items():
            if not _BLOCK.match(block):
                account.skipped["evaluations"] += 1
                continue
            compute = computing.get(block) if isinstance(computing, dict) else None
            found = _block(epoch, block, load, steps.get(block), compute, account)
            if found is not None and len(found.load_ns) <= room:
                room -= len(found.load_ns)
                output.blocks.append(found)
                account.read["steps"] += len(found.load_ns)
    output.blocks.sort(key=lambda one: (one.epoch, one.name))
    if output.blocks:
        folder.outputs.append(output)


def _epochs_of(value: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for key, parts in list(value.items())[:_EPOCHS_AT_MOST]:
        if re.fullmatch(r"[0-9]{1,9}", key) and isinstance(parts, dict):
            yield int(key), parts


def _block(
    epoch: int, name: str, load: Any, steps: Any, compute: Any, account: Account
) -> Block | None:
    if not isinstance(load, list) or not isinstance(steps, list):
        account.skipped["blocks without a list of steps"] += 1
        return None
    if not isinstance(compute, list) or len(compute) != len(load):
        compute = []
    block = Block(epoch, name, [], [], [])
    for at, (waited, took) in enumerate(zip(load, steps)):
        times = [_seconds(waited), _seconds(took), _seconds(compute[at]) if compute else 0]
        wait, step, busy = times
        if wait is None or step is None or busy is None:
            account.skipped["steps without a time, or with a senseless one"] += 1
            continue
        step = max(step, wait)
        block.load_ns.append(wait)
        block.step_ns.append(step)
        if compute:
            block.compute_ns.append(min(busy, step - wait))
    if len(load) != len(steps):
        account.skipped["times of steps without their fellow"] += abs(len(load) - len(steps))
    return block if block.load_ns else None


def _seconds(value: Any) -> int | None:
    found = number(value)
    if found is None or not 0 <= found <= STEP_SECONDS_AT_MOST:
        return None
    return whole_ns(value, SECOND_NS)


def _summary(value: Mapping[str, Any], account: Account, folder: Folder) -> None:
    metric = value.get("metric")
    published = metric.get("train_au_percentage") if isinstance(metric, dict) else None
    if isinstance(published, list):
        known = [number(one) for one in published[:_EPOCHS_AT_MOST]]
        folder.au_percent = [one for one in known if one is not None and 0 <= one <= 100]
    count = value.get("num_accelerators")
    folder.accelerators = count if isinstance(count, int) and 0 < count < 1 << 24 else None
    host = value.get("hostname")
    folder.host = host if isinstance(host, str) else ""
    account.read["published figures"] += len(folder.au_percent)


def _epochs(value: Mapping[str, Any], account: Account, folder: Folder) -> None:
    for epoch, parts in _epochs_of(value):
        for name, said in parts.items():
            if not isinstance(said, dict) or not _BLOCK.match(name):
                continue
            begin, end = clock_ns(said.get("start")), clock_ns(said.get("end"))
            if begin is None:
                account.skipped["blocks without a time of day"] += 1
                continue
            folder.begins_ns[epoch, name] = begin
            if end is not None and end > begin:
                folder.ends_ns[epoch, name] = end
            account.read["blocks of epochs"] += 1


def _disks(value: Mapping[str, Any], account: Account, folder: Folder) -> None:
    inner = value.get("sysstat")
    hosts = inner.get("hosts") if isinstance(inner, dict) else None
    for host in hosts if isinstance(hosts, list) else []:
        if isinstance(host, dict) and isinstance(host.get("statistics"), list):
            folder.disks.append(host)
            account.read["readings of disks"] += len(host["statistics"])


def clock_ns(text: Any, form: str = "") -> int | None:
    """Return a time of day in ns; without a zone it is taken as UTC. None of what is none."""
    if not isinstance(text, str) or len(text) > 64:
        return None
    try:
        found = datetime.strptime(text, form) if form else datetime.fromisoformat(text)
        found = found if found.tzinfo else found.replace(tzinfo=timezone.utc)
        past = found - datetime(1970, 1, 1, tzinfo=timezone.utc)
    except (ValueError, OverflowError):
        return None
    ns = (past.days * 86_400 + past.seconds) * SECOND_NS + past.microseconds * 1000
    return ns if 0 < ns < TIME_AT_MOST_NS else None
