"""Messages between recorder and helper, and the page that outlives a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.agent.isolation import process

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
def test_messages_survive_a_msgpack_round_trip(message: list[object]) -> None:
    data = bytearray(process.encode_message(message))
    (payload,) = process.take_payloads(data)
    assert not data
    assert msgspec.msgpack.decode(payload) == message
    assert process.decode_message(payload) == message


def test_a_partial_message_is_not_returned() -> None:
    first, second = (
        process.encode_message(["sample", 0, 1]),
        process.encode_message(["sample", 1, 2]),
    )
    stream, buffer, result = first + second, bytearray(), []
    for at in range(len(stream)):
        buffer += stream[at : at + 1]
        result += [
            (at + 1, process.decode_message(payload)) for payload in process.take_payloads(buffer)
        ]
    assert result == [(len(first), ["sample", 0, 1]), (len(stream), ["sample", 1, 2])]


@given(st.binary(max_size=64))
def test_a_damaged_message_raises_only_value_error(payload: bytes) -> None:
    try:
        process.decode_message(payload)
    except ValueError:
        pass


def test_a_map_with_a_list_as_its_key_is_refused() -> None:
    nil, empty_list = b"\xc0", b"\xdd\0\0\0\0"
    assert process.decode_message(b"\xdf\0\0\0\1" + nil + empty_list) == {None: []}
    with pytest.raises(ValueError, match="not a key"):
        process.decode_message(b"\xdf\0\0\0\1" + empty_list + nil)


def test_an_impossible_length_is_refused() -> None:
    with pytest.raises(ValueError, match="4294967295 bytes"):
        list(process.take_payloads(bytearray(b"\xff\xff\xff\xff")))


@pytest.fixture
def page() -> Iterator[int]:
    fd = process.create_marker()
    yield fd
    os.close(fd)


def test_the_marker_names_the_thread_and_its_driver_call(page: int) -> None:
    theirs, ours = process.attach_marker(page), process.attach_marker(page)
    process.begin_call(theirs, -1, 5, 77, "Init")
    process.begin_call(theirs, 0, 6, 78, "GetPowerUsage")
    process.begin_call(theirs, 3, 7, 79, "GetCurrentClocksThrottleReasons!!")  # 33 characters
    process.finish_call(theirs, 0)
    process.begin_call(theirs, 10_000, 8, 80, "beyond the page")
    init = process.DriverCall(-1, 5, 77, "Init")
    cut = process.DriverCall(3, 7, 79, "GetCurrentClocksThrottleReasons!")
    assert process.list_unfinished_calls(ours) == [init, cut]


def test_the_thread_with_the_fatal_signal_names_the_crashed_call(page: int) -> None:
    mapped = process.attach_marker(page)
    process.begin_call(mapped, 0, 5, 0x7F01, "GetMemoryInfo")
    process.begin_call(mapped, 1, 6, 0x7F02, "GetPowerUsage")
    both = process.find_crashed_calls(mapped, page)
    assert [call.device for call in both] == [0, 1]  # nobody said which
    report = b"Fatal Python error: Segmentation fault\n\nThread 0x00007f01 (most recent call"
    report += b" first):\n  File\n\nCurrent thread 0x0000000000007f02 (most recent call first):\n"
    os.pwrite(page, report, process.PAGE_BYTES)
    assert [call.device for call in process.find_crashed_calls(mapped, page)] == [1]
