"""All rings of the job: found, opened at once, drained, closed when their process has ended.

The recorder keeps its own descriptor of each ring, so that a killed process loses nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from clusterprof.errors import Unavailable
from clusterprof.recorder.announcements import Announcements
from clusterprof.recorder.pidfd import Exits
from clusterprof.recorder.ring import Ring, open_ring
from clusterprof.recorder.rundir import read_small_json
from clusterprof.trace.schema import Event, Record

RINGS_AT_MOST = 1024
BYTES_AT_MOST = 8 << 20  # of rings open at one time: 8 ranks with 16 workers each, and room


class Rings:
    """The rings of a run directory, from files to `spans` records."""

    def __init__(self, run_dir: Path, proc: str = "/proc", skip_old: bool = False) -> None:
        self._folder = run_dir / "rings"
        self._proc = proc
        self._exits = Exits(proc)
        self._rings: dict[str, Ring] = {}  # file name -> open ring
        self._bytes = 0
        self._announcements = Announcements(str(self._folder), 4 * RINGS_AT_MOST)
        self._skip_old = skip_old
        self._switched_off: set[str] = set()
        self._pending: list[Record] = []

    def look(self, now_ns: int) -> None:
        """Find new rings and note how far each writer is; cheap when there is nothing new."""
        self._scan(now_ns)
        self._skip_old = False
        for ring in self._rings.values():
            ring.look()

    def take(self, now_ns: int, final: bool = False) -> list[Record]:
        """Return the spans that are complete, and what else is to be said of the rings."""
        ended = set()
        for pidfd, pid, ticks in self._exits.ended():
            os.close(pidfd)
            ended.add((pid, ticks))
        records, self._pending = self._pending, []
        for name, ring in list(self._rings.items()):
            ring.ended = (ring.pid, ring.ticks) in ended
            records.extend(ring.take(now_ns))
            under_way = ring.under_way(now_ns, final or ring.ended)
            if under_way is not None:
                records.append(Event(now_ns, "operation-under-way", under_way))
            if ring.switched_off() and name not in self._switched_off:
                self._switched_off.add(name)
                records.append(Event(now_ns, "probe-switched-off", {"pid": ring.pid}))
            if ring.refused:
                records.append(self._refusal(now_ns, name, ring.refused))
            if ring.ended or ring.refused:
                self._forget(name, ring)
        return records

    def finish(self, now_ns: int) -> list[Record]:
        """Return everything that is left, from living processes too: the recorder ends."""
        self._scan(now_ns)
        for ring in self._rings.values():
            ring.look()
            ring.look()
        return self.take(now_ns, final=True)

    def close(self) -> None:
        """Give up all rings; their processes may write on and never notice."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
        self._exits.close()

    def _scan(self, now_ns: int) -> None:
        for name in self._announcements.fresh() or ():
            if name in self._rings:  # the process has executed another program
                self._pending.extend(self._end(name, self._rings[name], now_ns))
            self._open(name, now_ns)

    def _open(self, name: str, now_ns: int) -> None:
        announced = read_small_json(str(self._folder / name))
        try:
            ring = self._announced(announced)
        except Unavailable as reason:
            self._pending.append(self._refusal(now_ns, name, reason.message))
            return
        size = ring.capacity * 64
        if len(self._rings) >= RINGS_AT_MOST or self._bytes + size > BYTES_AT_MOST:
            ring.close()
            self._pending.append(self._refusal(now_ns, name, "too many rings are open"))
            return
        if not self._exits.watch(ring.pid, ring.ticks):
            ring.ended = True  # it died between: what it wrote is still in our hands
            self._pending.extend(ring.take(now_ns))
            ring.close()
            self._unlink(name)
            return
        if self._skip_old:
            ring.start_at_the_end()
        self._rings[name] = ring
        self._bytes += size

    def _announced(self, announced: dict[str, Any] | None) -> Ring:
        if announced is None:
            raise Unavailable("failed", "its announcement is no small JSON object of ours")
        pid, ticks = announced.get("pid"), announced.get("started_ticks")
        descriptor, path = announced.get("fd"), announced.get("path")
        if type(pid) is not int or type(ticks) is not int or pid <= 0:
            raise Unavailable("failed", "its announcement names no process")
        if type(descriptor) is int and descriptor >= 0:
            return open_ring(f"{self._proc}/{pid}/fd/{descriptor}", pid, ticks, memory_file=True)
        if isinstance(path, str):
            # Only ever a file in this folder, whatever the announcement says.
            there = str(self._folder / os.path.basename(path))
            return open_ring(there, pid, ticks, memory_file=False)
        raise Unavailable("failed", "its announcement names neither descriptor nor file")

    def _end(self, name: str, ring: Ring, now_ns: int) -> list[Record]:
        ring.ended = True
        spans = ring.take(now_ns)
        ring.close()
        self._bytes -= ring.capacity * 64
        del self._rings[name]
        return list(spans)

    def _forget(self, name: str, ring: Ring) -> None:
        ring.close()
        self._bytes -= ring.capacity * 64
        del self._rings[name]
        if ring.ended:
            self._unlink(name)

    def _unlink(self, name: str) -> None:
        for path in (self._folder / name, self._folder / (name.removesuffix("json") + "ring")):
            try:
                os.unlink(path)
            except OSError:
                pass

    def _refusal(self, now_ns: int, name: str, reason: str) -> Event:
        return Event(now_ns, "ring-refused", {"ring": name[:64], "reason": reason[:200]})
