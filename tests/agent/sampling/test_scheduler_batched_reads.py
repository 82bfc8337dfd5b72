"""Files of several collectors read in one loop: what each receives, also when a file fails."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from clusterprof.agent.collectors.base import FileCollector
from clusterprof.agent.linux.files import OpenFile, open_file
from clusterprof.agent.sampling import scheduler as module
from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.agent.sampling.scheduler import Schedule, split_rate_groups
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.signals import CPU_RUNNABLE, Signal
from clusterprof.trace.schema import Columns, Gap
from tests.support.recording_fakes import SECOND_NS, CountingCollector, FakeClock

TICK_NS = 100_000_000
T0 = SECOND_NS


class Numbers(FileCollector):
    """One column per file; a file that says "changed" is found to be one when it is parsed."""

    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = TICK_NS

    def __init__(self, name: str, *paths: Path) -> None:
        self.name, self.paths, self.reads = name, paths, 0  # type: ignore[misc]

    def open(self) -> Sequence[tuple[Signal, str]]:
        self.open_files = [open_file(path) for path in self.paths]
        return [(CPU_RUNNABLE, path.name) for path in self.paths]

    def read(self) -> Sequence[bytes | Unavailable]:
        self.reads += 1
        return super().read()

    def parse(self, contents: Sequence[bytes | Unavailable]) -> list[Any]:
        if b"changed" in contents:
            raise DevicesChanged
        return [
            content if isinstance(content, Unavailable) else int(content[:8])
            for content in contents
        ]

    def close(self) -> None:
        for file in self.open_files:
            file.close()


class Rig:
    """The fast tier of some collectors on a clock of its own."""

    def __init__(self, *collectors: Any) -> None:
        self.clock, self.pace = FakeClock(T0), Schedule()
        self.slots = [
            CollectorRunner(collector, TICK_NS, lambda name, error: None)
            for collector in collectors
        ]
        for slot in self.slots:
            slot.open(T0)
            slot.due_ns = T0
        self.fast, _ = split_rate_groups(self.slots)

    def tick(self) -> tuple[int, int]:
        answer = self.fast.sample(self.clock.now_ns(), self.clock, self.pace)
        self.clock.t_ns += TICK_NS
        return answer

    def taken(self) -> dict[str, list[Any]]:
        """Return by collector the rows (number of the tick, values) and the kinds of gaps."""
        collected: dict[str, list[Any]] = {}
        for record in (record for slot in self.slots for record in slot.take(self.clock.now_ns())):
            rows = collected.setdefault(record.collector, [])  # type: ignore[union-attr]
            if isinstance(record, Gap):
                rows.append((record.t_ns, record.device, record.kind))
            elif isinstance(record, Columns):
                number = [(t_ns - T0) // TICK_NS for t_ns in record.t_ns]
                rows += zip(number, *(list(column) for column in record.values))
        return collected


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in "abc"]
    for number, path in enumerate(paths, 1):
        path.write_text(f"{number}")
    return paths


def test_each_collector_receives_the_content_of_its_files(files: list[Path]) -> None:
    first, second = Numbers("first", files[0], files[1]), Numbers("second", files[2])
    rig = Rig(first, CountingCollector(), second)
    assert rig.tick() == (T0 + TICK_NS, T0 + TICK_NS)
    files[1].write_text("20")
    rig.tick()
    assert rig.taken() == {
        "first": [(0, 1, 2), (1, 1, 20)],
        "second": [(0, 3), (1, 3)],
        "counting": [(0, 1), (1, 2)],
    }
    assert (first.reads, second.reads) == (0, 0)  # nobody was asked


def test_lateness_and_missed_ticks_are_counted_per_collector(files: list[Path]) -> None:
    rig = Rig(Numbers("first", files[0]), Numbers("second", files[1]))
    rig.tick()
    rig.clock.t_ns += 250_000_000  # due at 1.1 s, taken at 1.35 s: 1.2 and 1.3 s were missed
    assert rig.tick() == (T0 + 4 * TICK_NS, T0 + 4 * TICK_NS)
    assert rig.pace == Schedule(late_ns=2 * 250_000_000, missed=4)


class Refusing:
    """Stands for `pread`: refuses the chosen descriptors."""

    def __init__(self) -> None:
        self.refused: dict[int, OSError] = {}

    def __call__(self, descriptor: int, size: int, offset: int) -> bytes:
        if descriptor in self.refused:
            raise self.refused[descriptor]
        return os.pread(descriptor, size, offset)


@pytest.mark.parametrize("error", [13, 1, 3, 5, 19, 116])  # EACCES EPERM ESRCH EIO ENODEV ESTALE
def test_a_failed_batched_read_costs_no_ticks(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    refusing = Refusing()
    monkeypatch.setattr(module, "pread", refusing)
    first, second = Numbers("first", files[0]), Numbers("second", files[1])
    rig = Rig(first, second)
    rig.tick()
    held = second.open_files[0]
    assert isinstance(held, OpenFile) and held.single_read is not None
    refusing.refused[held.single_read[0]] = OSError(error, os.strerror(error))
    rig.tick()
    assert (first.reads, second.reads) == (1, 1)  # each for itself
    refusing.refused.clear()
    rig.tick()
    assert (first.reads, second.reads) == (1, 1)  # and together again
    assert rig.taken() == {
        "first": [(n, 1) for n in range(3)],
        "second": [(n, 2) for n in range(3)],
    }


def test_a_removed_file_is_a_gap_only_in_its_collector(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Numbers("first", files[0]), Numbers("second", files[1])
    rig = Rig(first, second)
    rig.tick()
    held = second.open_files[0]
    assert isinstance(held, OpenFile)
    held.close()  # as after a reopening that failed: the cgroup was removed
    files[1].unlink()
    rig.tick()
    rig.tick()
    assert rig.taken() == {
        "first": [(0, 1), (1, 1), (2, 1)],
        "second": [(T0 + TICK_NS, "b", "absent"), (0, 2), (1, 0), (2, 0)],  # masked
    }
    assert (first.reads, second.reads) == (1, 2)  # the first one is read in the loop again
    files[1].write_text("7")  # another one in its place
    rig.tick()
    assert rig.taken() == {"first": [(3, 1)], "second": [(3, 7)]}


def test_a_file_that_outgrows_the_buffer_is_read_completely(files: list[Path]) -> None:
    first, second = Numbers("first", files[0]), Numbers("second", files[1])
    rig = Rig(first, second)
    rig.tick()
    files[1].write_text("5" + " " * 20_000)
    for _ in range(3):
        rig.tick()
    assert rig.taken() == {
        "first": [(n, 1) for n in range(4)],
        "second": [(0, 2), (1, 5), (2, 5), (3, 5)],
    }
    assert (first.reads, second.reads) == (1, 3)  # from now on by itself


def test_a_reopened_collector_reads_its_new_files(files: list[Path]) -> None:
    first, second = Numbers("first", files[0]), Numbers("second", files[1])
    rig = Rig(first, second)
    rig.tick()
    files[1].write_text("changed")
    rig.tick()
    second.paths = (files[2],)
    assert rig.taken() == {"first": [(0, 1), (1, 1)], "second": [(0, 2)]}  # "changed" fits nobody
    rig.tick()
    assert rig.taken() == {"first": [(2, 1)], "second": [(2, 3)]}
    assert second.reads == 0


def test_a_suspended_collector_resumes_when_its_pause_ends(files: list[Path]) -> None:
    class Faulty(Numbers):
        def parse(self, contents: Sequence[bytes | Unavailable]) -> list[Any]:
            if contents[0] == b"2":
                raise ValueError("odd")
            return super().parse(contents)

    first, second = Numbers("first", files[0]), Faulty("second", files[1])
    rig = Rig(first, second)
    for _ in range(3):
        rig.tick()
    assert rig.taken()["second"] == [(T0, "", "failed")]  # three in a row: it rests for a second
    files[1].write_text("9")
    for _ in range(12):
        rig.tick()
    # the third reading was of 1.2 s, so it rests until 2.2 s
    assert rig.taken() == {
        "first": [(n, 1) for n in range(3, 15)],
        "second": [(12, 9), (13, 9), (14, 9)],
    }


def test_an_exception_in_files_falls_back_to_single_reads(files: list[Path]) -> None:
    class Raising(Numbers):
        def files(self) -> Sequence[OpenFile]:
            raise RuntimeError("not today")

    rig = Rig(Raising("first", files[0]), Numbers("second", files[1]))
    rig.tick()
    assert rig.taken() == {"first": [(0, 1)], "second": [(0, 2)]}
