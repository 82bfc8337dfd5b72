"""The page that says which device is inside which call of the driver, since when.

Written by the helper around every call, read by the recorder when an answer is late or the helper
has crashed: a memory file that both map, so that nothing has to be sent by a process that hangs or
is dead. 48 bytes per slot, slot 0 the library itself, slot `i + 1` device `i`:

    i64 since_ns (monotonic; 0 = in no call) · u64 thread · 32 bytes name of the call

Behind the page the helper's `faulthandler` writes which thread a fatal signal hit.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from typing import NamedTuple

PAGE_BYTES = 4096
_SLOT = struct.Struct("<qQ32s")
_SLOTS = PAGE_BYTES // _SLOT.size
_FAULT_BYTES = 65536
_CURRENT = re.compile(rb"Current thread 0x([0-9a-fA-F]+)")


class InCall(NamedTuple):
    """A call that had not returned when the page was read."""

    device: int
    """Its index; -1 = the library itself."""
    since_ns: int
    thread: int
    call: str


def create() -> int:
    """Return the descriptor of a new marker."""
    fd = os.memfd_create("clusterprof-helper", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE_BYTES)
    return fd


def attach(fd: int) -> mmap.mmap:
    """Map a marker."""
    return mmap.mmap(fd, PAGE_BYTES)


def enter(page: mmap.mmap, index: int, since_ns: int, thread: int, call: str) -> None:
    """Note that a call begins; devices beyond the page are not noted."""
    if index + 1 < _SLOTS:
        name = call.encode("ascii", "replace")[:32]
        _SLOT.pack_into(page, (index + 1) * _SLOT.size, since_ns, thread, name)


def leave(page: mmap.mmap, index: int) -> None:
    """Note that a call is back."""
    if index + 1 < _SLOTS:
        _SLOT.pack_into(page, (index + 1) * _SLOT.size, 0, 0, b"")


def in_calls(page: mmap.mmap) -> list[InCall]:
    """Return the calls that are not back, by device."""
    found = []
    for slot in range(_SLOTS):
        since_ns, thread, name = _SLOT.unpack_from(page, slot * _SLOT.size)
        if since_ns:
            call = name.rstrip(b"\0").decode("ascii", "replace")
            found.append(InCall(slot - 1, since_ns, thread, call))
    return found


def culprits(page: mmap.mmap, fd: int) -> list[InCall]:
    """Return the call a fatal signal hit; all calls not back when that cannot be told."""
    calls = in_calls(page)
    hit = _CURRENT.search(os.pread(fd, _FAULT_BYTES, PAGE_BYTES))
    named = [call for call in calls if hit is not None and call.thread == int(hit[1], 16)]
    return named or calls
