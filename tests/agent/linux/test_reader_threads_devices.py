"""Several devices read side by side: one that is slow, one that hangs and comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from clusterprof.agent.linux.reader_threads import DEADLINE_NS, SILENT, ParallelReaders
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable

PATIENCE = 20.0


class Device:
    """What is read; a test stops it in the middle of a reading."""

    def __init__(self, name: str) -> None:
        self.name, self.times = name, 0
        self.free, self.entered = threading.Event(), threading.Event()
        self.free.set()
        self.fails: Exception | None = None

    def read(self) -> str:
        self.entered.set()
        assert self.free.wait(PATIENCE)
        self.times += 1
        if self.fails is not None:
            raise self.fails
        return f"{self.name}{self.times}"

    def stop(self) -> None:
        self.entered.clear()
        self.free.clear()


class Rig:
    def __init__(self, first_wait_seconds: float = PATIENCE, rest_ns: int = 0) -> None:
        self.now_ns = 1_000
        self.a, self.b = Device("a"), Device("b")
        self.together: ParallelReaders[str] = ParallelReaders(
            lambda: self.now_ns, first_wait_seconds, rest_ns
        )

    def open(self) -> None:
        self.together.open({"a": self.a.read, "b": self.b.read})

    def idle(self, name: str) -> None:
        """Wait until the device's reading is no longer under way."""
        self.together._readers[name].wait(PATIENCE)

    def until(self, wanted: Callable[[Any], bool] = lambda result: True) -> Any:
        """Take until there is a sample as wanted."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                result = self.together.take()[1]
                if wanted(result):
                    return result
            except NothingNew:
                pass
            except Unavailable as reason:
                assert reason is SILENT  # of all, for the moment
            self.now_ns += 1_000
            time.sleep(0.001)
        raise AssertionError("nothing was read")


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.a.free.set()
    made.b.free.set()
    made.together.close()


def test_a_sample_has_a_reading_of_each_device(rig: Rig) -> None:
    rig.open()
    assert rig.together.take() == (1_000, {"a": "a1", "b": "b1"})
    last_tick = rig.until()
    assert last_tick["a"] > "a1" and last_tick["b"] > "b1"


def test_a_slow_reader_is_awaited_until_the_hang_deadline(rig: Rig) -> None:
    rig = Rig(rest_ns=1_000_000)
    rig.open()
    rig.together.take()
    rig.b.stop()
    rig.now_ns += 1_000_000  # both are due
    with pytest.raises(NothingNew):
        rig.together.take()
    assert rig.b.entered.wait(PATIENCE)
    rig.idle("a")
    for _ in range(5):  # `a` has been read
        with pytest.raises(NothingNew):
            rig.together.take()
    rig.now_ns += DEADLINE_NS
    assert rig.together.take()[1] == {"a": "a2", "b": SILENT}
    rig.idle("a")
    last_tick = rig.until()
    assert last_tick["a"] > "a2" and last_tick["b"] is SILENT
    rig.b.free.set()
    assert rig.until(lambda entry: not isinstance(entry["b"], Unavailable))["b"].startswith("b")
    rig.together.close()


def test_a_reader_that_hangs_while_opening_is_not_started_twice(rig: Rig) -> None:
    rig = Rig(first_wait_seconds=0.2)
    rig.b.stop()
    rig.open()
    assert rig.together.take()[1] == {"a": "a1", "b": SILENT}
    threads = threading.active_count()
    rig.idle("a")
    gone: list[str] = []
    rig.together.close({name: partial(gone.append, name) for name in ("a", "b", "never read")})
    assert gone == ["a", "never read"]
    rig.open()
    assert threading.active_count() <= threads + 1  # the old thread of `a` may still be ending
    assert rig.until()["b"] is SILENT
    assert rig.b.times == 0
    rig.b.free.set()
    assert rig.until(lambda entry: not isinstance(entry["b"], Unavailable))["b"] in (
        "b2",
        "b3",
        "b4",
    )
    assert gone == ["a", "never read", "b"]
    rig.together.close()


def test_a_hang_of_all_readers_is_a_reason(rig: Rig) -> None:
    rig = Rig(first_wait_seconds=0.05)
    rig.a.stop()
    rig.b.stop()
    rig.open()
    with pytest.raises(Unavailable) as raised:
        rig.together.take()
    assert raised.value is SILENT
    rig.a.free.set()
    rig.b.free.set()
    rig.until()
    rig.together.close()


def test_an_exception_of_a_reader_is_raised_in_the_caller(rig: Rig) -> None:
    rig.open()
    rig.together.take()
    rig.b.fails = DevicesChanged("gone")
    with pytest.raises(DevicesChanged):
        rig.until(lambda item: False)
