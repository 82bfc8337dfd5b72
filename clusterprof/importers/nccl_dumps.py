"""PyTorch's flight recorder, dumps given as files: JSON, one per rank.

## What is read

The JSON form of a dump, whose name ends with its rank (`nccl_trace_rank_3.json`). Pickles are not
read here, whatever is in them: a pickle may run code when it is read. (Dumps that our recorder
copied into a recording, `nccl/` in a node's folder, are read by a reader that can run nothing.)

## How it is understood

A collective operation that was seen to begin and to end is one of the rank: it arrived when the
recorder noticed the begin, and left when it noticed the end. Operations are matched by process
group and number. Time covered is one step, from the first operation to the last. An operation that
was issued and had not ended when the dump was written is one the rank stood in; who had not come to
it is named.

## Where it is blind

The recorder looks every now and then, so begin and end are late by up to a second; and it does not
know what the device did besides, so time in operations is an upper bound of what was lost. Sends
and receives are left out: the two sides number them differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.flight_recorder import BYTES_AT_MOST, Dump, Entry, parse_dump
from clusterprof.importers.tables import NodeTables, group_number
from clusterprof.importers.text_lines import whole_bytes
from clusterprof.probe import layout

_RANK = re.compile(r"(\d{1,9})(?:\.json)?(?:\.gz|\.zst)?$")
_PICKLE = b"\x80"
_REFUSED = (
    "a pickle: reading one may run what it names, so it is not read; dump as JSON"
    " (torch._C._distributed_c10d._dump_nccl_trace_json())"
)
_OPERATIONS = {
    "all_reduce": layout.ALL_REDUCE, "_all_gather_base": layout.ALL_GATHER,
    "all_gather": layout.ALL_GATHER, "reduce_scatter": layout.REDUCE_SCATTER,
    "_reduce_scatter_base": layout.REDUCE_SCATTER, "broadcast": layout.BROADCAST,
    "reduce": layout.REDUCE, "gather": layout.GATHER, "scatter": layout.SCATTER,
    "all_to_all": layout.ALL_TO_ALL, "barrier": layout.BARRIER,
}  # fmt: skip
_LATEST_NS = 1 << 62
_NAMED_AT_MOST = 8
_RANKS_AT_MOST = 1 << 24


class FlightRecorder:
    """Dumps of all ranks of one job."""

    name: ClassVar[str] = "flight-recorder"
    title: ClassVar[str] = "PyTorch flight recorder dump"
    together: ClassVar[bool] = True

    def recognises(self, head: bytes, path: Path) -> bool:
        """Say whether a file is a dump: JSON, or a pickle (to refuse it by name)."""
        begins = head.lstrip()[:1]
        if begins == b"{":
            return b'"entries"' in head and (b'"pg_config"' in head or b"profiling_name" in head)
        return begins == _PICKLE and (b"pg_config" in head or b"profiling_name" in head)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield a node per rank. Raises CannotImportError when no dump could be read."""
        dumps: dict[int, tuple[Dump, Account]] = {}
        for source, account in zip(sources, accounts):
            dump = _read(source, account)
            if dump is None:
                continue
            if dump.rank in dumps:
                account.refuse(f"rank {dump.rank} is in another file, too")
            else:
                dumps[dump.rank] = dump, account
        if not dumps:
            raise CannotImportError(
                "; ".join(dict.fromkeys(account.cut for account in accounts)),
                "give dumps as JSON, each file named after its rank",
            )
        ordered = [dumps[rank] for rank in sorted(dumps)]
        ordered[0][1].notes += stuck_notes([dump for dump, _ in ordered])
        world = 1 + max(max((*dump.members.get("0", ()), dump.rank)) for dump, _ in ordered)
        for dump, account in ordered:
            node = _node(dump, account, world)
            if node is not None:
                yield node


def _read(source: Source, account: Account) -> Dump | None:
    if source.head.lstrip()[:1] == _PICKLE:
        account.refuse(_REFUSED)
        return None
    rank = _RANK.search(source.path.name)
    if rank is None:
        account.refuse("its name does not end with a rank")
        return None
    try:
        data = whole_bytes(source, BYTES_AT_MOST)
    except CannotImportError as error:
        account.refuse(error.message)
        return None
    try:
        dump = parse_dump(data.lstrip(), int(rank[1]), 0)
        if not all(0 <= one < _RANKS_AT_MOST for some in dump.members.values() for one in some):
            raise ValueError("ranks that cannot be")
        return dump
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        account.refuse(f"no dump that can be read ({type(error).__name__}: {str(error)[:120]})")
        return None


def _node(dump: Dump, account: Account, world: int) -> NodeTables | None:
    """A rank as a node: its clock is the wall clock of its host."""
    good: list[Entry] = []
    for entry in dump.entries:
        if entry.message:
            account.skipped["sends and receives"] += 1
        elif entry.started_ns is None or entry.completed_ns is None:
            account.skipped["without a begin and an end"] += 1
        elif not 0 < entry.started_ns <= entry.completed_ns < _LATEST_NS:
            account.skipped["that end before they begin"] += 1
        elif not 0 < entry.number < _LATEST_NS:
            account.skipped["with numbers that cannot be"] += 1
        else:
            good.append(entry)
    account.read["operations"] += len(good)
    if not good:
        account.notes.append(f"rank {dump.rank}: no operation has a begin and an end")
        return None
    node = NodeTables(f"rank {dump.rank}", FlightRecorder.name, wall_minus_own_ns=0)
    node.versions["flight-recorder"] = dump.version
    pid = dump.rank + 1
    node.rank(pid, dump.rank, world)
    groups = {name: group_number(ranks) for name, ranks in dump.members.items()}
    for name, ranks in dump.members.items():
        node.group(pid, groups[name], ranks)
    start, end, number = (
        np.array([value for value in some], np.int64)
        for some in zip(*((e.started_ns, e.completed_ns, e.number - 1) for e in good))
    )
    node.collectives(
        pid, start, end, [groups.get(e.group) or group_number(e.group) for e in good], number,
        operation=[operation_of(e.name) for e in good],
    )  # fmt: skip
    node.spans(pid, layout.STEP, [int(start.min())], [int(end.max())], 1, 2, -1, -1)
    return node


def operation_of(name: str) -> int:
    """Return the operation that a backend calls so: `nccl:all_reduce`, `nccl:_all_gather_base`."""
    word = name.rpartition(":")[2].split(" ")[0].lower().removesuffix("_coalesced")
    found = _OPERATIONS.get(word.removeprefix("_") if word not in _OPERATIONS else word)
    return layout.ALL_TO_ALL if word.startswith(("all_to_all", "alltoall")) else found or 15


def stuck_notes(dumps: Sequence[Dump]) -> list[str]:
    """Say in which operations ranks stood, and who had not come there."""
    waiting: dict[tuple[str, int], dict[int, Entry]] = {}
    reached: dict[tuple[int, str], int] = {}
    for dump in dumps:
        oldest: dict[str, Entry] = {}
        for one in (entry for entry in dump.entries if not entry.message):
            key = (dump.rank, one.group)
            reached[key] = max(reached.get(key, 0), one.number)
            known = oldest.get(one.group)
            if not one.done and (known is None or one.number < known.number):
                oldest[one.group] = one
        for group, entry in oldest.items():
            waiting.setdefault((group, entry.number), {})[dump.rank] = entry
    seen = {dump.rank for dump in dumps}
    notes = []
    for (group, number), ranks in sorted(waiting.items(), key=lambda one: one[0][1]):
        members = next((d.members[group] for d in dumps if group in d.members), ())
        away = [r for r in members if r in seen and reached.get((r, group), 0) < number]
        unseen = [r for r in members if r not in seen]
        name = next(iter(ranks.values())).name
        line = f"{_ranks(sorted(ranks))} stood in {name} {number} of group {group}"
        if away:
            last = "; ".join(f"rank {r} had come to {reached.get((r, group), 0)}" for r in away[:4])
            line += f"; {_ranks(away)} had not come to it ({last}): look there first"
        if unseen:
            line += f"; no dump of {_ranks(unseen)}"
        notes.append(line)
    return notes[:_NAMED_AT_MOST] or ["no rank stood in an operation when these were written"]


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:_NAMED_AT_MOST]))
    more = f" and {len(ranks) - _NAMED_AT_MOST} more" if len(ranks) > _NAMED_AT_MOST else ""
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}{more}"
