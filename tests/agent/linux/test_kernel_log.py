"""The kernel's log, record by record, and what the NVIDIA driver writes into it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from clusterprof.agent.linux.kernel_log import DriverError, KernelLog, parse_driver_error
from clusterprof.errors import Unavailable

XID = (
    b"3,1234,98765432,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU "
    b"has fallen off the bus.\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n"
)


class Log:
    """A pipe of packets, opened by its path: like /dev/kmsg a read returns one record or none."""

    def __init__(self) -> None:
        reader, self.writer = os.pipe2(os.O_NONBLOCK | os.O_DIRECT)
        self.path = f"/proc/self/fd/{reader}"
        self._reader = reader

    def write(self, *records: bytes) -> None:
        for record in records:
            os.write(self.writer, record)

    def close(self) -> None:
        os.close(self.writer)
        os.close(self._reader)


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.close()


def test_a_read_returns_new_records_without_blocking(log: Log) -> None:
    opened = KernelLog(log.path)
    assert list(opened.records()) == []
    log.write(b"6,1,10,-;usb 1-1: new device\n", XID)
    assert list(opened.records()) == [b"6,1,10,-;usb 1-1: new device\n", XID]
    assert list(opened.records()) == []
    opened.close()


def test_overwritten_records_are_skipped(log: Log) -> None:
    answers: list[bytes | OSError] = [b"a", BrokenPipeError(errno.EPIPE, "lost"), b"b"]

    def read(fd: int, size: int) -> bytes:
        answer = answers.pop(0) if answers else BlockingIOError(errno.EAGAIN, "nothing")
        if isinstance(answer, OSError):
            raise answer
        return answer

    opened = KernelLog(log.path, read)
    assert list(opened.records()) == [b"a", b"b"]
    answers.append(OSError(errno.EIO, "Input/output error"))
    with pytest.raises(Unavailable) as raised:
        list(opened.records())
    assert raised.value == Unavailable("failed", "/dev/kmsg: input/output error", "")
    opened.close()


def test_an_overflowing_kernel_log_does_not_block(log: Log) -> None:
    opened = KernelLog(log.path, lambda fd, size: b"6,1,1,-;again and again\n")
    assert len(list(opened.records())) == 2000
    opened.close()


def test_a_missing_or_forbidden_kernel_log_is_a_reason(
    tmp_path: Path, as_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    with pytest.raises(Unavailable) as raised:
        KernelLog(str(tmp_path / "kmsg"))
    absent = f"{tmp_path}/kmsg: no such file or directory"
    assert raised.value == Unavailable(
        "absent", absent, "make /dev/kmsg available in the container"
    )
    (tmp_path / "kmsg").touch(mode=0)
    with as_nobody(), pytest.raises(Unavailable) as raised:
        KernelLog(str(tmp_path / "kmsg"))
    remedy = "an administrator must set kernel.dmesg_restrict=0 or give the recorder CAP_SYSLOG"
    assert raised.value == Unavailable("denied", "/dev/kmsg: permission denied", remedy)


def error(line: bytes) -> DriverError | None:
    return parse_driver_error(b"3,7,5000001,-;" + line + b"\n")


def test_driver_errors_are_parsed_in_all_formats() -> None:
    fell_off = "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    assert parse_driver_error(XID) == DriverError(
        98765432000, "0000:3b:00", 79, fell_off, None, False
    )
    collected = [
        error(b"NVRM: Xid (PCI:0000:B1:00 GPU-I:05): 119, pid=4711, Timeout waiting for RPC"),
        error(b"NVRM: Xid (0000:01:00): 13, 0005 00000000"),  # an older driver
        error(b"NVRM: Xid (PCI:0000:06:00): 48"),
        error(b"nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS"),
        error(b"NVRM: Xid (PCI:0000:06:00): 31, " + b"x" * 500),
    ]
    assert collected == [
        DriverError(5000001000, "0000:b1:00", 119, "pid=4711, Timeout waiting for RPC", 5, False),
        DriverError(5000001000, "0000:01:00", 13, "0005 00000000", None, False),
        DriverError(5000001000, "0000:06:00", 48, "", None, False),
        DriverError(5000001000, "0000:c1:00.0", 28006, "Non-fatal, Link 46 MC TS", None, True),
        DriverError(5000001000, "0000:06:00", 31, "x" * 200, None, False),
    ]


def test_unrelated_and_damaged_lines_are_not_errors() -> None:
    assert parse_driver_error(b"6,1,10,-;usb 1-1: new device\n") is None
    assert error(b"NVRM: Xid (PCI:0000:3b:00): what, ever") is None
    assert error(b"NVRM: Xid (") is None
    assert parse_driver_error(b"NVRM: Xid (PCI:0000:3b:00): 79, without a head") is None
    assert parse_driver_error(b"3,7,soon,-;NVRM: Xid (PCI:0000:3b:00): 79, text") is None
    assert parse_driver_error(b"\xff\xfe;Xid (\x00") is None
