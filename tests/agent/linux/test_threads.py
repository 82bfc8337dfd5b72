"""Lines of /proc/<pid> as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterprof.agent.linux.threads import (
    NS_PER_TICK,
    PAGE_BYTES,
    DescriptorBudget,
    Stat,
    TaskFile,
    TaskIo,
    is_block_io_accounted,
    open_task_file,
    parse_io,
    parse_process_stat,
    parse_stat,
    parse_thread_prefix,
    parse_thread_stat,
    parse_wchan,
)

# A name may hold blanks and brackets; fields 3… follow the last ")".
STAT = (
    b"4711 (pt (data) w:0) D 4700 4700 4700 0 -1 4194368 9021 0 17 0 512 88 0 0 20 0 3 0 112535 "
    b"5124096 944 18446744073709551615 94198962868224 94198963657629 140733366519728 0 0 0 65536 "
    b"4 1132560123 1 0 0 17 5 0 0 250 0 0 94198963890928 94198963939172 94199335432192 1 2 3 4 0\n"
)


def test_stat_fields_are_counted_after_the_last_parenthesis() -> None:
    assert parse_stat(STAT) == Stat(
        name="pt (data) w:0",
        state=ord("D"),
        parent_pid=4700,
        major_faults=17,
        user_ns=512 * NS_PER_TICK,
        system_ns=88 * NS_PER_TICK,
        threads=3,
        started_ticks=112535,
        rss_bytes=944 * PAGE_BYTES,
        block_io_ns=250 * NS_PER_TICK,
    )
    assert parse_thread_stat(STAT) == (
        ord("D"),
        512 * NS_PER_TICK,
        88 * NS_PER_TICK,
        250 * NS_PER_TICK,
        17,
    )
    # Without delay accounting the line is not read that far: short of it, it may end anywhere.
    prefix, facts = parse_thread_prefix(STAT[: STAT.index(b"250 ")])
    assert facts == (ord("D"), 512 * NS_PER_TICK, 88 * NS_PER_TICK, -1, 17)
    assert prefix.endswith(b" 512 88 ") and STAT.startswith(prefix)
    assert parse_process_stat(STAT) == (b"pt (data) w:0", 4700, 3, 112535, 944 * PAGE_BYTES)


def test_the_stat_of_this_process_agrees_with_the_interpreter() -> None:
    stat = parse_stat(Path("/proc/self/stat").read_bytes())
    assert (stat.parent_pid, stat.state) == (os.getppid(), ord("R"))


def test_io_files_are_parsed() -> None:
    text = b"rchar: 1948\nwchar: 77\nsyscr: 9\nsyscw: 3\nread_bytes: 4096\nwrite_bytes: 8192\n"
    assert parse_io(text + b"cancelled_write_bytes: 5\n") == TaskIo(1948, 77, 4096, 8192)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (b"0", ""),
        (b"", ""),
        (b"folio_wait_bit_common", "folio_wait_bit_common"),
        (b"poll_schedule_timeout.constprop.0", "poll_schedule_timeout"),
    ],
)
def test_wchan_names_are_parsed(text: bytes, place: str) -> None:
    assert parse_wchan(text) == place


@pytest.mark.parametrize(("text", "known"), [(None, None), (b"0\n", False), (b"1\n", True)])
def test_block_io_delays_are_known_only_when_accounted(
    text: bytes | None, known: bool | None
) -> None:
    assert is_block_io_accounted(text) is known


def test_beyond_the_descriptor_limit_files_are_opened_for_each_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    descriptors = DescriptorBudget(limit=1)
    held, not_held = (TaskFile(str(path), descriptors) for _ in range(2))
    assert (held.fd >= 0, not_held.fd, descriptors.open_count) == (True, -1, 1)
    assert (held.read(), not_held.read()) == (b"one", b"one")
    path.write_bytes(b"two")
    assert (held.read(), not_held.read()) == (b"two", b"two")
    for _ in range(2):
        held.close()
        not_held.close()
    assert descriptors.open_count == 0
    assert open_task_file(str(tmp_path / "missing"), descriptors) is None
