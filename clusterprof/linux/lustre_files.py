"""The files of one Lustre mount and its targets: read together, added up by mount and by kind.

See `lustre` for what is in them. A value of which a part could not be read is not known: it carries
the reason of that part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from clusterprof.errors import Unavailable
from clusterprof.linux.held import HeldFile, read_once
from clusterprof.linux.lustre import (
    LONGEST_RECORD,
    ROOT_ONLY,
    Counted,
    Mounted,
    Target,
    asked,
    at_limit,
    parse_import,
    parse_rpc_stats,
    parse_stats,
    time_ns,
)

Value = int | Unavailable
Meaning = TypeVar("Meaning")
KINDS = ("read", "write", "metadata")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ENDED_BETWEEN = 8
_HELD_AT_MOST = 128
_INT64 = 1 << 63
_ALWAYS = ("open", "close", "getattr")
_CALLS = (
    "read", "write", "open", "close", "getattr", "readdir", "create", "mknod", "mkdir", "unlink",
    "rename", "setattr", "getxattr", "truncate", "fsync", "mmap", "page_fault",
)  # fmt: skip
_NO_TIME = Unavailable("absent", "this Lustre counts such calls and not their time", "")
_NO_TARGET = Unavailable("absent", "no target of this file system is known here", "")
_TOO_LARGE = Unavailable("failed", "the counter does not fit 63 bits", "")


class Reading(NamedTuple):
    """What one mount did since it was mounted, or since its files were cleared."""

    mount: list[Value]
    """Bytes read, written, fetched and stored, RPCs at the limit, pending bytes, RPCs in flight,
    timeouts, targets without a connection."""
    calls: dict[str, tuple[Value, Value]]
    """Count and ns of each call."""
    kinds: dict[str, tuple[Value, Value]]
    """Count and ns of the RPCs of each kind."""
    targets: list[tuple[str, tuple[Value, Value]]]
    """The same of each target."""


class Files:
    """Finds parameters in the places where they may lie, and holds the first so many open."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places
        self._held: dict[str, HeldFile] = {}
        self._where: dict[str, str] = {}

    def read(self, name: str) -> bytes:
        """Return the content of "osc/…/stats"; raises `Unavailable`, denied before absent."""
        held = self._held.get(name)
        if held is not None:
            try:
                return held.read()
            except Unavailable:
                held.close()  # it may come back, and elsewhere
                del self._held[name], self._where[name]
                raise
        if name in self._where:
            return read_once(self._where[name])
        why: Unavailable | None = None
        for place in self._places:
            path = f"{place}/{name}"
            try:
                file = HeldFile(path, longest_record=LONGEST_RECORD)
            except Unavailable as reason:
                if why is None or reason.kind == "denied":
                    why = reason
                continue
            self._where[name] = path
            if len(self._held) < _HELD_AT_MOST:
                self._held[name] = file
            return file.read()
        assert why is not None
        if why.kind == "denied":
            raise Unavailable("denied", why.message, ROOT_ONLY)
        raise why

    def meaning(self, name: str, parse: Callable[[bytes], Meaning]) -> Meaning | Unavailable:
        """Return what a file means, or why it cannot be told."""
        try:
            return parse(self.read(name))
        except Unavailable as why:
            return why.with_traceback(None)
        except ValueError:
            return Unavailable("failed", f"{name}: not understood", "")

    def close(self) -> None:
        """Close all files."""
        for file in self._held.values():
            file.close()
        self._held.clear()
        self._where.clear()


class MountFiles:
    """One mount, read again and again."""

    def __init__(self, files: Files, mounted: Mounted) -> None:
        self._files = files
        self._mounted = mounted
        self._most: dict[Target, int | Unavailable] = {}
        self._states: list[tuple[bool, int] | Unavailable] = []
        self._last: dict[str, tuple[int, int]] = {}

    def read(self, states: bool, calls: Iterable[str]) -> Reading:
        """Return the numbers of now; `states`: those of the connections too, else those of before.

        `calls` are named even where the mount cannot be read.
        """
        targets = self._mounted.targets
        if states or not self._states:
            self._states = [self._of(one, "import", parse_import) for one in targets]
        llite = self._files.meaning(f"llite/{self._mounted.folder}/stats", parse_stats)
        of = [(one, self._of(one, "stats", parse_stats)) for one in targets]
        read_bytes, write_bytes = (_sum_of(llite, name) for name in ("read_bytes", "write_bytes"))
        mount = [
            read_bytes,
            write_bytes,
            total([_sum_of(stats, "read_bytes") for one, stats in of if one.kind == "osc"]),
            total([_sum_of(stats, "write_bytes") for one, stats in of if one.kind == "osc"]),
            *self._queues(),
            total([why if isinstance(why, Unavailable) else why[1] for why in self._states]),
            total([why if isinstance(why, Unavailable) else not why[0] for why in self._states]),
        ]
        kinds = {
            "read": _kind(of, "ost_read"),
            "write": _kind(of, "ost_write"),
            "metadata": _together([self._rpcs(one, s) for one, s in of if one.kind == "mdc"]),
        }
        named = [(one.name, self._rpcs(one, stats, whole=True)) for one, stats in of]
        return Reading(mount, _calls(llite, calls), kinds, named)

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def _of(
        self, target: Target, name: str, parse: Callable[[bytes], Meaning]
    ) -> Meaning | Unavailable:
        return self._files.meaning(f"{target.kind}/{target.folder}/{name}", parse)

    def _queues(self) -> list[Value]:
        """RPCs that took the last place, bytes not yet asked for, RPCs in flight."""
        limit: list[Value] = []
        pending: list[Value] = []
        in_flight: list[Value] = []
        for one in self._mounted.targets:
            if one.kind != "osc":
                continue
            now = self._of(one, "rpc_stats", parse_rpc_stats)
            most = self._most.get(one)
            if most is None:  # asked once: a limit that is moved would count others as at it
                most = self._most[one] = self._of(one, "max_rpcs_in_flight", int)
            if isinstance(now, Unavailable):
                limit, pending, in_flight = [*limit, now], [*pending, now], [*in_flight, now]
                continue
            limit.append(most if isinstance(most, Unavailable) else at_limit(now.sent, most))
            pending.append(now.pending_pages * _PAGE_BYTES)
            in_flight.append(now.in_flight)
        return [total(limit), total(pending), total(in_flight)]

    def _rpcs(
        self, target: Target, stats: dict[str, Counted] | Unavailable, whole: bool = False
    ) -> tuple[Value, Value]:
        """Count and time of the RPCs to a target; of a metadata server without reads and writes."""
        if isinstance(stats, Unavailable):
            return stats, stats
        found = asked(stats) if whole else asked(stats, "ost_read", "ost_write")
        if found is None:
            return _NO_TIME, _NO_TIME
        # Lines are not written at one instant: a difference may step back by what ended in between.
        key = f"{target.folder} {whole}"
        last = self._last.get(key, (0, 0))
        if found[0] >= last[0] - _ENDED_BETWEEN:  # else the file was cleared
            found = max(found[0], last[0]), max(found[1], last[1])
        self._last[key] = found
        return _checked(found[0]), _checked(found[1])


def total(values: Sequence[Value]) -> Value:
    """Return the sum; one that is unknown makes it unknown, and so does having none to add up."""
    if not values:
        return _NO_TARGET
    for value in values:
        if isinstance(value, Unavailable):
            return value
    return _checked(sum(value for value in values if not isinstance(value, Unavailable)))


def _checked(value: int) -> Value:
    return value if value < _INT64 else _TOO_LARGE


def _together(pairs: Sequence[tuple[Value, Value]]) -> tuple[Value, Value]:
    return total([count for count, _ in pairs]), total([ns for _, ns in pairs])


def _sum_of(stats: Mapping[str, Counted] | Unavailable, name: str) -> Value:
    if isinstance(stats, Unavailable):
        return stats
    one = stats.get(name)
    if one is None:
        return 0
    return _NO_TIME if one.total is None else _checked(one.total)


def _kind(
    of: Sequence[tuple[Target, dict[str, Counted] | Unavailable]], name: str
) -> tuple[Value, Value]:
    """Count and time of reads or writes; those of small files lie with the metadata servers."""
    pairs: list[tuple[Value, Value]] = []
    for _, stats in of:
        pairs.append((stats, stats) if isinstance(stats, Unavailable) else _timed(stats, name))
    return _together(pairs)


def _timed(stats: Mapping[str, Counted], name: str) -> tuple[Value, Value]:
    one = stats.get(name)
    ns = time_ns(one)
    return 0 if one is None else one.samples, _NO_TIME if ns is None else _checked(ns)


def _calls(
    llite: Mapping[str, Counted] | Unavailable, known: Iterable[str]
) -> dict[str, tuple[Value, Value]]:
    if isinstance(llite, Unavailable):
        return {call: (llite, llite) for call in known}
    return {call: _timed(llite, call) for call in _CALLS if call in _ALWAYS or call in llite}
