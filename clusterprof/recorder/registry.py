"""The processes of the job: who registered, who lives, how each ended.

`record` and the probe write `register/<pid>.json`; this reads them, keeps a pidfd of each process
and makes the events `process-registered` and `process-exited`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof.recorder.announcements import Announcements
from clusterprof.recorder.identity import (
    LAUNCHER_VARIABLES,
    resolved,
    started_ticks,
)
from clusterprof.recorder.pidfd import Exits, wait_status
from clusterprof.recorder.rundir import read_small_json
from clusterprof.trace.schema import Event, Record

REGISTRATIONS_AT_MOST = 4096
_ATTRIBUTES_AT_MOST = 16
_TEXT_CHARACTERS = 256
_STATUS_WITHIN_NS = 500_000_000  # how long an exited process may stay without its wait status
_FRESH_NS = 100_000_000  # a folder's time has the grain of the timer tick: look again when young


@dataclass(slots=True)
class _Unclear:
    pidfd: int
    pid: int
    ticks: int
    ended_ns: int


class Registry:
    """Registered processes, from a folder of small files to events."""

    def __init__(self, run_dir: Path, proc: str = "/proc") -> None:
        self._folder = str(run_dir / "register")
        self._proc = proc
        self._exits = Exits(proc)
        self._announcements = Announcements(self._folder, REGISTRATIONS_AT_MOST)
        self._first = True
        self._alive: dict[int, int] = {}  # pid -> started ticks
        self._unclear: list[_Unclear] = []
        self._pending: list[Record] = []
        self.somebody_came = False
        """True once any process has registered, however short its life was."""

    @property
    def descriptor(self) -> int:
        """Readable as soon as a registered process has ended."""
        return self._exits.descriptor

    def job_pids(self) -> list[int]:
        """Return the registered processes that live now."""
        return list(self._alive)

    def anybody(self) -> bool:
        """Return whether a registered process lives or still has to be accounted for."""
        return bool(self._alive or self._unclear)

    def attach(self, pid: int, variables: Mapping[str, str], now_ns: int) -> bool:
        """Take a running process as the job's command; return False when there is none."""
        ticks = started_ticks(self._proc, pid)
        if ticks is None:
            return False
        attributes = {"pid": pid, "started_ticks": ticks, "role": "command", "attached": True}
        self._register({**attributes, "variables": dict(variables)}, now_ns)
        return pid in self._alive

    def look(self, now_ns: int) -> bool:
        """Notice new registrations and ended processes; True while one's status is not known."""
        self._scan(now_ns)
        for pidfd, pid, ticks in self._exits.ended():
            if self._alive.get(pid) == ticks:
                del self._alive[pid]
            self._unclear.append(_Unclear(pidfd, pid, ticks, now_ns))
        if self._unclear:
            self._unclear = [one for one in self._unclear if not self._settled(one, now_ns)]
        return bool(self._unclear)

    def look_again(self, now_ns: int) -> None:
        """Look at the folder even if its time has not changed: nobody can join any more."""
        self._announcements.look_again()
        self.look(now_ns)

    def take(self, now_ns: int) -> list[Record]:
        """Return the events since the last call."""
        records, self._pending = self._pending, []
        return records

    def finish(self, now_ns: int) -> list[Record]:
        """Return the last events; who has ended and whose status is not known stays unknown."""
        for one in self._unclear:
            self._settled(one, one.ended_ns + _STATUS_WITHIN_NS)  # the time to wait has passed
        self._unclear = []
        return self.take(now_ns)

    def close(self) -> None:
        """Give up all descriptors."""
        for one in self._unclear:
            os.close(one.pidfd)
        self._exits.close()

    def _scan(self, now_ns: int) -> None:
        fresh = self._announcements.fresh()
        if fresh is None:
            return
        for name in fresh:
            registration = read_small_json(f"{self._folder}/{name}")
            if registration is not None and name == f"{registration.get('pid')}.json":
                self._register(registration, now_ns)
        self._first = False

    def _register(self, registration: Mapping[str, Any], now_ns: int) -> None:
        attributes = checked(registration)
        if attributes is None:
            return
        self.somebody_came = True
        pid, ticks = attributes["pid"], attributes["started_ticks"]
        known = self._alive.get(pid) == ticks
        if not known and not self._exits.watch(pid, ticks):
            if self._first:
                self._forget(pid)  # left over from an earlier recorder of this job
            else:
                self._pending.append(Event(now_ns, "process-registered", attributes))
                self._exited(now_ns, pid, ticks, None)
            return
        self._alive[pid] = ticks
        self._pending.append(Event(now_ns, "process-registered", attributes))

    def _settled(self, one: _Unclear, now_ns: int) -> bool:
        # The status comes when the parent has reaped the process: a moment later, or never.
        status = wait_status(self._proc, one.pidfd, one.pid, one.ticks)
        if status is None and now_ns - one.ended_ns < _STATUS_WITHIN_NS:
            return False
        os.close(one.pidfd)
        self._exited(one.ended_ns, one.pid, one.ticks, status)
        return True

    def _exited(self, t_ns: int, pid: int, ticks: int, status: int | None) -> None:
        attributes: dict[str, Any] = {"pid": pid, "started_ticks": ticks, "wait_status": status}
        if status is not None:
            killed = os.WIFSIGNALED(status)
            attributes["exit_code"] = None if killed else os.WEXITSTATUS(status)
            attributes["signal"] = os.WTERMSIG(status) if killed else None
        self._pending.append(Event(t_ns, "process-exited", attributes))
        self._forget(pid)

    def _forget(self, pid: int) -> None:
        try:
            os.unlink(f"{self._folder}/{pid}.json")
        except OSError:
            pass


def checked(registration: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the attributes of a registration that may enter a recording, None if it is not one.

    Variables are kept only if they are launcher variables; other attributes only if they are
    short scalars; job, rank, world and node are resolved here, so that every reader agrees on them.
    """
    pid, ticks = registration.get("pid"), registration.get("started_ticks")
    if not _is_count(pid) or not _is_count(ticks):
        return None
    found = registration.get("variables")
    variables = {
        name: found[name][:_TEXT_CHARACTERS]
        for name in LAUNCHER_VARIABLES
        if isinstance(found, dict) and isinstance(found.get(name), str)
    }
    place = resolved(variables)
    attributes: dict[str, Any] = {"role": "command", "device": "", **place}
    for name, value in list(registration.items())[:_ATTRIBUTES_AT_MOST]:
        if isinstance(value, str):
            attributes[name[:64]] = value[:_TEXT_CHARACTERS]
        elif isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**62):
            attributes[name[:64]] = value
    attributes["variables"] = variables
    attributes["rank"], attributes["job"] = place["rank"], place["job"]
    return attributes


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**62


def registered_alive(run_dir: Path, proc: str = "/proc") -> bool:
    """Return whether any process that registered in a run directory still lives."""
    for path in (run_dir / "register").glob("*.json"):
        attributes = checked(read_small_json(str(path)) or {})
        if attributes is None:
            continue
        if started_ticks(proc, attributes["pid"]) == attributes["started_ticks"]:
            return True
    return False
