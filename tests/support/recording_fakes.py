"""A clock that tests drive, and collectors with scripted behavior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.agent.sampling.scheduler import Budget, Schedule, record_batches
from clusterprof.signals import CPU_RUNNABLE, CPU_USER, MEMORY_CACHED, Signal
from clusterprof.trace.schema import Clock as ClockRecord
from clusterprof.trace.schema import Record

SECOND_NS = 1_000_000_000
BOOT_AHEAD_NS = 5
EPOCH_NS = 1_700_000_000 * SECOND_NS


class FakeClock:
    """Time passes only in `wait_until` and where a test says so."""

    def __init__(self, start_ns: int = SECOND_NS, late_ns: int = 0) -> None:
        self.t_ns = start_ns
        self.wakes_on_files = False
        self.told_at: set[int] = set()
        """Waits for these times end with a notification that files changed."""
        self.late_ns = late_ns
        """By how much every wait overshoots."""
        self.waits = 0
        self.used_ns = 0
        self.script: dict[int, Callable[[], None]] = {}
        """What happens when a wait first reaches a time."""

    def now_ns(self) -> int:
        return self.t_ns

    def cpu_ns(self) -> int:
        return self.used_ns

    def read(self) -> ClockRecord:
        return ClockRecord(self.t_ns, self.t_ns + BOOT_AHEAD_NS, self.t_ns + EPOCH_NS)

    def wait_until(self, t_ns: int) -> bool:
        self.waits += 1
        due = sorted(at for at in self.script if at <= t_ns)
        for at in due:
            self.t_ns = max(self.t_ns, at)
            self.script.pop(at)()
        self.t_ns = max(self.t_ns, t_ns + self.late_ns)
        return t_ns in self.told_at


class ScriptedCollector:
    """A collector with two columns whose samples come from a list; an exception in it is raised."""

    name: ClassVar[str] = "scripted"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self, samples: Sequence[Any], opens: Sequence[Any] = ()) -> None:
        self._samples = list(samples)
        self._opens = list(opens)
        self.calls: list[str] = []

    def open(self) -> Sequence[tuple[Signal, str]]:
        self.calls.append("open")
        answer = self._opens.pop(0) if self._opens else [(CPU_USER, "all"), (CPU_RUNNABLE, "")]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def sample(self) -> Any:
        self.calls.append("sample")
        answer = self._samples.pop(0) if self._samples else [0, 0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        self.calls.append("close")


class CountingCollector:
    """A collector that never fails: one column that counts its samples."""

    name: ClassVar[str] = "counting"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self) -> None:
        self.count = 0

    def open(self) -> Sequence[tuple[Signal, str]]:
        return [(MEMORY_CACHED, "")]

    def sample(self) -> Sequence[int]:
        self.count += 1
        return [self.count]

    def close(self) -> None:
        pass


class TableCollector:
    """A table collector: each sample is a list of rows."""

    name: ClassVar[str] = "table"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = list(samples)

    def open(self) -> Sequence[str]:
        return ("t_ns", "pid", "wchan")

    def sample(self) -> Any:
        return self._samples.pop(0) if self._samples else []

    def strings(self) -> dict[str, Sequence[str]]:
        return {"wchan": ("futex_wait",)}

    def close(self) -> None:
        pass


TICK_NS = 100_000_000
T0 = SECOND_NS  # the fake clock starts at 1 s


class SilentSource:
    """A source without any records, which counts how often it is polled."""

    def __init__(self) -> None:
        self.looks: list[int] = []

    def look(self, now_ns: int) -> None:
        self.looks.append(now_ns)

    def take(self, now_ns: int) -> list[Record]:
        return []

    def finish(self, now_ns: int) -> list[Record]:
        return []


def run_service(
    *collectors: Any,
    clock: FakeClock | None = None,
    seconds: float = 0.25,
    interval_ns: int = TICK_NS,
    pace: Schedule | None = None,
    note: Callable[[str, BaseException], None] = lambda name, error: None,
) -> list[Record]:
    clock = clock or FakeClock()
    end_ns = T0 + round(seconds * SECOND_NS)
    slots = [CollectorRunner(collector, interval_ns, note) for collector in collectors]
    for slot in slots:
        slot.open(clock.now_ns())
    batches = record_batches(
        slots,
        [SilentSource()],
        clock,
        pace or Schedule(),
        Budget(10, T0, 0),
        TICK_NS,
        lambda now_ns: "the test is over" if now_ns >= end_ns else "",
    )
    return [record for batch in batches for record in batch]
