"""The kernel's log as it is written, and the NVIDIA driver's error messages in it.

Every read of /dev/kmsg returns one record, `priority,sequence,microseconds,flags;text`, followed by
lines of `KEY=value`; without O_NONBLOCK it would wait for the next record. A reader that is
overtaken by the ring buffer gets EPIPE and continues at the oldest remaining record
(Documentation/ABI/testing/dev-kmsg). Opening it needs CAP_SYSLOG where kernel.dmesg_restrict is 1
(kernel/printk/printk.c).

The driver writes errors of a GPU as `NVRM: Xid (PCI:0000:3b:00): 79, …`, with ` GPU-I:03` after the
address for a MIG instance, and those of an NVSwitch as SXid. NVIDIA's manual "Xid Errors" explains
the codes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from clusterprof.errors import Unavailable, convert_os_error

PATH = "/dev/kmsg"
_RECORD_BYTES = 8192  # the longest record: CONSOLE_EXT_LOG_MAX
_MAX_RECORDS = 2000  # per call: an overflowing log must not delay the recorder
_XID = re.compile(
    r"(?P<switch>S?)Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)(?: GPU-I:(?P<instance>\d+))?\): "
    r"(?P<code>\d+)\b,?\s*(?P<text>.*)"
)
_MAX_TEXT_CHARS = 200
_DENIED = Unavailable(
    "denied",
    f"{PATH}: permission denied",
    "an administrator must set kernel.dmesg_restrict=0 or give the recorder CAP_SYSLOG",
)
_ABSENT_REMEDY = "make /dev/kmsg available in the container"


class DriverError(NamedTuple):
    """An error that the NVIDIA driver wrote to the log."""

    t_ns: int
    """On the kernel's log clock, which follows CLOCK_MONOTONIC to within milliseconds."""
    pci: str
    """Domain, bus and device, as written."""
    code: int
    text: str
    instance: int | None
    """MIG GPU instance."""
    is_switch: bool


class KernelLog:
    """Records written to the kernel log from now on."""

    def __init__(self, path: str = PATH, read: Callable[[int, int], bytes] = os.read) -> None:
        """Open the log at its end.

        Raises: Unavailable when it cannot be opened.
        """
        self._read = read
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except PermissionError:
            raise _DENIED.with_traceback(None) from None
        except OSError as error:
            raise convert_os_error(error, path, _ABSENT_REMEDY) from None
        try:
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:  # no log, but a file that cannot seek to its end
            pass

    def records(self) -> Iterator[bytes]:
        """Yield the records since the last call.

        Raises: Unavailable when reading fails.
        """
        for _ in range(_MAX_RECORDS):
            try:
                record = self._read(self._fd, _RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # records were lost; what is left follows
            except OSError as error:
                raise convert_os_error(error, PATH) from None
            if not record:
                return
            yield record

    def close(self) -> None:
        """Close the log."""
        os.close(self._fd)


def parse_driver_error(record: bytes) -> DriverError | None:
    """Parse an NVIDIA driver error from a record; None when the record is no such error."""
    if b"Xid (" not in record:  # nearly all records
        return None
    head, _, text = record.decode("utf-8", "replace").partition(";")
    line = text.partition("\n")[0]
    match = _XID.search(line)
    words = head.split(",")
    if match is None or len(words) < 3 or not words[2].isdecimal():
        return None
    instance = match["instance"]
    return DriverError(
        int(words[2]) * 1000,
        match["pci"].lower(),
        int(match["code"][:9]),
        match["text"][:_MAX_TEXT_CHARS].strip(),
        None if instance is None else int(instance),
        bool(match["switch"]),
    )
