from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from clusterprof.agent.linux.reader_threads import SILENT, BackgroundReader
from clusterprof.errors import DevicesChanged, Unavailable

PATIENCE = 20.0


class Driver:
    """Something that is read, takes its time, and counts how often it was."""

    def __init__(self, first_wait_seconds: float = PATIENCE) -> None:
        self.now_ns = 1_000
        self.takes_ns = 0
        self.fails: Exception | None = None
        self.free = threading.Event()
        self.free.set()
        self.times = 0
        self.aside = BackgroundReader(self.read, lambda: self.now_ns, first_wait_seconds)

    def read(self) -> int:
        assert self.free.wait(PATIENCE)
        self.times += 1
        self.now_ns += self.takes_ns
        if self.fails is not None:
            raise self.fails
        return self.times

    def until(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not ready():
            assert time.monotonic() < end
            time.sleep(0.001)

    def idle(self) -> None:
        self.until(lambda: not self.aside.hangs)


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.free.set()
    made.aside.close()


def test_each_call_returns_the_last_reading_and_requests_another(driver: Driver) -> None:
    assert driver.aside.first() == (1_000, 1)
    seen = []
    for _ in range(3):
        driver.idle()
        driver.now_ns += 500
        seen.append(driver.aside.take())
    # The reading that first() asked for at 1000, then one per call.
    assert seen == [(1_000, 2), (1_500, 3), (2_000, 4)]


def test_callers_do_not_wait_for_an_unfinished_reading(driver: Driver) -> None:
    driver.aside.first()
    driver.idle()
    driver.free.clear()
    assert driver.aside.take() == (1_000, 2)  # and asks for the third, which does not come
    assert [driver.aside.take() for _ in range(3)] == [None, None, None]
    driver.now_ns += 2_000_000_000
    with pytest.raises(Unavailable) as raised:
        driver.aside.take()
    assert raised.value == SILENT
    driver.free.set()
    driver.idle()
    taken = driver.aside.take()
    assert taken is not None and taken[1] == 3


def test_a_slow_reading_is_followed_by_a_pause(driver: Driver) -> None:
    driver.takes_ns = 1_000
    assert driver.aside.first() == (1_500, 1)  # in the middle of it
    driver.idle()
    driver.now_ns += 199_999  # a 200th of the time is its share
    assert (driver.aside.take(), driver.times) == (None, 1)
    driver.now_ns += 1
    assert driver.aside.take() is None  # asked now
    driver.until(lambda: driver.times == 2)


def test_an_exception_of_the_reader_is_raised_in_the_caller(driver: Driver) -> None:
    driver.fails = DevicesChanged()
    with pytest.raises(DevicesChanged):
        driver.aside.first()
    driver.fails = None
    driver.idle()
    driver.aside.close()
    assert driver.aside.first()[1] >= 2


def test_a_hanging_reader_thread_is_abandoned_and_not_replaced() -> None:
    before = set(threading.enumerate())
    driver = Driver(first_wait_seconds=0.01)
    driver.free.clear()
    for _ in range(3):
        with pytest.raises(Unavailable):
            driver.aside.first()
        driver.aside.close()
    assert len(set(threading.enumerate()) - before) == 1
    driver.free.set()
    driver.until(lambda: not set(threading.enumerate()) - before)
    assert driver.times == 1


def test_files_are_closed_after_the_unfinished_reading() -> None:
    go_on, under_way, gone = threading.Event(), threading.Event(), threading.Event()

    def read() -> int:
        under_way.set()
        assert go_on.wait(20)
        return 1

    aside = BackgroundReader(read, first_wait_seconds=0)
    aside.start()
    assert under_way.wait(20)
    aside.close(gone.set)
    aside.close(lambda: None)  # a second close changes nothing
    assert not gone.is_set()
    go_on.set()
    assert gone.wait(20)


def test_unused_files_are_closed_at_once() -> None:
    aside, gone = BackgroundReader(lambda: 1), threading.Event()
    aside.first()
    aside.close(gone.set)
    assert gone.wait(10)  # the thread may still end its reading
