"""The kernel's log as it is written, and what the NVIDIA driver says in it.

Every read of /dev/kmsg returns one record, `priority,sequence,microseconds,flags;text`, with lines
of `KEY=value` behind it; without O_NONBLOCK it would wait for the next. A reader that is overtaken
by the ring buffer gets EPIPE and goes on at the oldest record there is
(Documentation/ABI/testing/dev-kmsg). Opening it needs CAP_SYSLOG where kernel.dmesg_restrict is 1
(kernel/printk/printk.c).

The driver writes errors of a GPU as `NVRM: Xid (PCI:0000:3b:00): 79, …`, with ` GPU-I:03` behind
the address for a MIG instance, and those of an NVSwitch as SXid. What a code means is in NVIDIA's
manual "Xid Errors".
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from clusterprof.errors import Unavailable, unavailable_from_os_error

PATH = "/dev/kmsg"
_RECORD_BYTES = 8192  # the longest there is: CONSOLE_EXT_LOG_MAX
_RECORDS_AT_MOST = 2000  # of one look: a log that overflows must not hold anybody up
_XID = re.compile(
    r"(?P<switch>S?)Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)(?: GPU-I:(?P<instance>\d+))?\): "
    r"(?P<code>\d+)\b,?\s*(?P<text>.*)"
)
_TEXT_AT_MOST = 200
_DENIED = Unavailable(
    "denied",
    f"{PATH}: permission denied",
    "an administrator must set kernel.dmesg_restrict=0 or give the recorder CAP_SYSLOG",
)
_ABSENT = "give the container /dev/kmsg"


class DriverError(NamedTuple):
    """An error that the NVIDIA driver wrote to the log."""

    t_ns: int
    """Of the kernel's log clock, which runs with CLOCK_MONOTONIC but for milliseconds."""
    pci: str
    """Domain, bus and device, as written."""
    code: int
    text: str
    instance: int | None
    """MIG GPU instance."""
    of_switch: bool


class KernelLog:
    """What comes into the log from now on."""

    def __init__(
        self,
        path: str = PATH,
        read: Callable[[int, int], bytes] = os.read,
    ) -> None:
        """Open it at its end; raises Unavailable."""
        self._read = read
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except PermissionError:
            raise _DENIED.with_traceback(None) from None
        except OSError as error:
            raise unavailable_from_os_error(error, path, _ABSENT) from None
        try:
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:  # no log, but something that has no end
            pass

    def records(self) -> Iterator[bytes]:
        """Return what has come since the last call; raises Unavailable when that fails."""
        for _ in range(_RECORDS_AT_MOST):
            try:
                record = self._read(self._fd, _RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # records were lost; what is left follows
            except OSError as error:
                raise unavailable_from_os_error(error, PATH) from None
            if not record:
                return
            yield record

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


def driver_error(record: bytes) -> DriverError | None:
    """Return what the NVIDIA driver says in a record, None when it is not of it."""
    if b"Xid (" not in record:  # nearly all of them
        return None
    head, _, rest = record.decode("utf-8", "replace").partition(";")
    line = rest.partition("\n")[0]
    found = _XID.search(line)
    words = head.split(",")
    if found is None or len(words) < 3 or not words[2].isdecimal():
        return None
    instance = found["instance"]
    return DriverError(
        int(words[2]) * 1000,
        found["pci"].lower(),
        int(found["code"][:9]),
        found["text"][:_TEXT_AT_MOST].strip(),
        None if instance is None else int(instance),
        bool(found["switch"]),
    )
