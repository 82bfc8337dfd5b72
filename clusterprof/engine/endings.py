"""How the recording of each rank ended: what it was in, when it last spoke, what its thread did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clusterprof.probe import layout
from clusterprof.timeline.identity import Place, place_of
from clusterprof.timeline.model import Chunk, Process

TAIL_NS = 10_000_000_000
_FEWEST = 5  # samples by which a thread's last state is told
_UNDER_WAY = "operation-under-way"


@dataclass(frozen=True, slots=True)
class UnderWay:
    """An operation that a rank began and had not left a few seconds later."""

    start_ns: int
    group: int
    number: int
    """-1 = the next one of its group."""
    operation: int
    """Kind, form and peer (docs/design.md, section 12)."""


@dataclass(frozen=True, slots=True)
class Left:
    """An operation that the host of a rank left; where a device waits, it may go on there."""

    number: int
    start_ns: int
    end_ns: int
    operation: int


@dataclass(slots=True)
class Ending:
    """The end of one rank's process, on its node's clock."""

    pid: int
    started_ticks: int
    place: Place
    seen_ns: int = 0
    """Last sample or span."""
    spoke_ns: int = 0
    """End of its last span; 0 = it had none."""
    longest_ns: int = 0
    """Of its operations that ended."""
    reached: dict[int, Left] = field(default_factory=dict)
    """By group: the last operation that its host left."""
    last_began_ns: int = 0
    """When the last operation that it left had begun."""
    began: UnderWay | None = None
    exited: Mapping[str, Any] | None = None
    """Attributes of its `process-exited` event."""
    exited_ns: int = 0
    state: str = ""
    """Of its main thread in the end: the commonest letter of /proc; "" unknown."""
    on_cpu_ratio: float | None = None
    wchan: str = ""

    @property
    def under_way(self) -> UnderWay | None:
        """The operation that it never left."""
        if self.began is None or self.began.start_ns <= self.last_began_ns:
            return None
        return self.began


class Endings:
    """Follows every process with a rank, chunk by chunk."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], Ending] = {}

    def watch(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Pass chunks through."""
        for chunk in chunks:
            for process in chunk.processes.values():
                if process.registration.get("role") == "python":
                    self._saw(chunk, process)
            for event in chunk.events:
                self._heard(event.kind, event.attributes, event.t_ns)
            yield chunk

    def all(self) -> tuple[Ending, ...]:
        """Return how each of them ended, by rank and pid."""
        return tuple(sorted(self._of.values(), key=lambda one: (one.place.rank or 0, one.pid)))

    def _saw(self, chunk: Chunk, process: Process) -> None:
        place = place_of(process.registration)
        if place.rank is None:
            return
        key = process.pid, process.started_ticks
        one = self._of.setdefault(key, Ending(*key, place))
        one.place = place
        for kind, table in process.spans.items():
            if table.end_ns.size:
                one.spoke_ns = max(one.spoke_ns, int(table.end_ns.max()))
            if kind == layout.COLLECTIVE and table.end_ns.size:
                one.longest_ns = max(one.longest_ns, int((table.end_ns - table.start_ns).max()))
                one.last_began_ns = max(one.last_began_ns, int(table.start_ns.max()))
                for group in np.unique(table.a).tolist():
                    rows = np.flatnonzero(table.a == group)
                    row = rows[np.argmax(table.end_ns[rows])]
                    columns = table.b, table.start_ns, table.end_ns, table.d
                    one.reached[group] = Left(*(int(column[row]) for column in columns))
        one.seen_ns = max(one.seen_ns, one.spoke_ns)
        thread = process.threads.get(process.pid)
        if thread is None or not thread.t_ns.size:
            return
        one.seen_ns = max(one.seen_ns, int(thread.t_ns[-1]))
        rows = thread.t_ns > thread.t_ns[-1] - TAIL_NS
        if int(rows.sum()) < _FEWEST:
            return
        one.state = chr(_commonest(thread.state[rows]))
        t_ns, on_cpu = thread.t_ns[rows], thread.on_cpu_ns[rows]
        if on_cpu[0] >= 0 and t_ns[-1] > t_ns[0]:
            one.on_cpu_ratio = float(on_cpu[-1] - on_cpu[0]) / float(t_ns[-1] - t_ns[0])
        wchan = _commonest(thread.wchan[rows])
        names = chunk.wchan_names
        one.wchan = names[wchan] if 0 <= wchan < len(names) and names[wchan] != "0" else ""

    def _heard(self, kind: str, said: Mapping[str, Any], t_ns: int) -> None:
        one = self._of.get((said.get("pid", -1), said.get("started_ticks", -1)))
        if one is None:
            return
        if kind == "process-exited":
            one.exited, one.exited_ns = said, t_ns
        elif kind == _UNDER_WAY:
            one.began = UnderWay(
                *(int(said.get(name, 0)) for name in ("start_ns", "group", "number", "operation"))
            )


def _commonest(values: np.ndarray) -> int:
    found, count = np.unique(values, return_counts=True)
    return int(found[np.argmax(count)])
