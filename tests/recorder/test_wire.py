"""Messages between recorder and helper, and the page that outlives a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.recorder import marker, wire

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@given(st.lists(VALUES))
def test_what_is_sent_is_msgpack_and_comes_back(message: list[object]) -> None:
    data = bytearray(wire.frame(message))
    (payload,) = wire.frames(data)
    assert not data
    assert msgspec.msgpack.decode(payload) == message
    assert wire.decode(payload) == message


def test_a_message_is_whole_or_not_there() -> None:
    first, second = wire.frame(["sample", 0, 1]), wire.frame(["sample", 1, 2])
    stream, buffer, found = first + second, bytearray(), []
    for at in range(len(stream)):
        buffer += stream[at : at + 1]
        found += [(at + 1, wire.decode(payload)) for payload in wire.frames(buffer)]
    assert found == [(len(first), ["sample", 0, 1]), (len(stream), ["sample", 1, 2])]


@given(st.binary(max_size=64))
def test_damage_is_a_value_error_and_nothing_else(payload: bytes) -> None:
    try:
        wire.decode(payload)
    except ValueError:
        pass


def test_a_length_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="4294967295 bytes"):
        list(wire.frames(bytearray(b"\xff\xff\xff\xff")))


@pytest.fixture
def page() -> Iterator[int]:
    fd = marker.create()
    yield fd
    os.close(fd)


def test_the_marker_says_who_is_inside_which_call(page: int) -> None:
    theirs, ours = marker.attach(page), marker.attach(page)
    marker.enter(theirs, -1, 5, 77, "Init")
    marker.enter(theirs, 0, 6, 78, "GetPowerUsage")
    marker.enter(theirs, 3, 7, 79, "GetCurrentClocksThrottleReasons!!")  # 33 characters
    marker.leave(theirs, 0)
    marker.enter(theirs, 10_000, 8, 80, "beyond the page")
    init = marker.InCall(-1, 5, 77, "Init")
    cut = marker.InCall(3, 7, 79, "GetCurrentClocksThrottleReasons!")
    assert marker.in_calls(ours) == [init, cut]


def test_the_thread_that_a_fatal_signal_hit_is_the_culprit(page: int) -> None:
    mapped = marker.attach(page)
    marker.enter(mapped, 0, 5, 0x7F01, "GetMemoryInfo")
    marker.enter(mapped, 1, 6, 0x7F02, "GetPowerUsage")
    both = marker.culprits(mapped, page)
    assert [call.device for call in both] == [0, 1]  # nobody said which
    report = b"Fatal Python error: Segmentation fault\n\nThread 0x00007f01 (most recent call"
    report += b" first):\n  File\n\nCurrent thread 0x0000000000007f02 (most recent call first):\n"
    os.pwrite(page, report, marker.PAGE_BYTES)
    assert [call.device for call in marker.culprits(mapped, page)] == [1]
