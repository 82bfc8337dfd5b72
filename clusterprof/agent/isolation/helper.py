"""`python -m clusterprof.recorder.helper NAME`: makes the calls that can hang or crash.

Speaks `recorder.wire` on stdin and stdout. One thread per device, so that a call that hangs holds
only its own; the main thread only listens, so that the end of the pipe is always noticed.

    → ["sample", index, sequence]      ← ["values", index, sequence, t_ns, changes, notes]
    → ["adopt", index]                 ← ["adopted", index, entry, signals]
                                       ← ["opened", inventory, [signals]] | ["unavailable", k, m, r]

Signals are a device's own list. `changes` is [place, value, place, value …] of what is not as in
the answer before (the first has all), for most of what is asked of a GPU ten times a second changes
once a second or never. A value is a number or [kind, message, remedy]. None: nothing new since.
At the end of the pipe the helper ends its tools and leaves, but not out of a call: killing a
process inside the driver has frozen GPUs until a reboot. It waits for the call to return, and after
a while goes if the call sleeps where a signal can reach it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import sys
import threading
import time
from _queue import SimpleQueue  # without what `queue` imports
from collections.abc import Callable, Sequence
from typing import Any

from clusterprof.errors import Unavailable
from clusterprof.recorder import marker, wire
from clusterprof.recorder.drivers import library

_OOM_SCORE_ADJUST = 500
_GRACE_NS = 10_000_000_000
_MARKER_FD = 3
_NOTHING = object()


def main(arguments: list[str]) -> None:
    """Serve `NAME [--skip I,J] [--grace-ns N] [--gpm off]` until stdin ends; never returns."""
    name = arguments[0]
    options = dict(zip(arguments[1::2], arguments[2::2]))
    skip = {int(word) for word in options.get("--skip", "").split(",") if word}
    opened = library(name, options)
    _settle()
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not get between the messages
    service = _Service(opened, skip, answers)
    threading.Thread(target=service.open, daemon=True).start()
    service.listen()
    service.depart(int(options.get("--grace-ns", _GRACE_NS)))


class _Service:
    def __init__(self, opened: Callable[..., Any], skip: set[int], answers: int) -> None:
        self._opened, self._skip, self._answers = opened, skip, answers
        self._page = marker.attach(_MARKER_FD)
        self._sending = threading.Lock()
        self._wanted: dict[int, _Mailbox] = {}
        self._library: Any = None

    def open(self) -> None:
        try:
            library = self._opened(self._mark, self._skip)
        except Unavailable as reason:
            self._send(["unavailable", reason.kind, reason.message, reason.remedy])
            return
        except Exception as error:  # a binding that cannot even be imported
            self._send(["unavailable", "failed", f"{type(error).__name__}: {error}"[:300], ""])
            return
        _return_memory()
        self._library = library
        for index, device in enumerate(library.devices):
            mailbox = self._wanted[index] = _Mailbox()
            threading.Thread(target=self._serve, args=(device, mailbox), daemon=True).start()
        signals = [self._signals(device) for device in library.devices]
        self._send(["opened", library.inventory, signals])

    def listen(self) -> None:
        """Hand requests to the devices' threads until the recorder closes its end."""
        buffer = bytearray()
        while data := os.read(0, 65536):
            buffer += data
            for payload in wire.frames(buffer):
                message = wire.decode(payload)
                mailbox = self._wanted.get(message[1])
                if mailbox is not None:
                    mailbox.put(message)

    def depart(self, grace_ns: int) -> None:
        """End tools, and exit as soon as no call of the driver is interrupted by that."""
        ended_ns = time.monotonic_ns()
        end_tools = getattr(self._library, "end_tools", None)
        if end_tools is not None:
            end_tools()
        while marker.in_calls(self._page):
            if time.monotonic_ns() - ended_ns > grace_ns and not _in_kernel():
                break
            time.sleep(0.05 if time.monotonic_ns() - ended_ns < _GRACE_NS else 1.0)
        os._exit(0)

    def _serve(self, device: Any, mailbox: _Mailbox) -> None:
        told: list[Any] = []
        while True:
            message = mailbox.get()
            if message[0] == "adopt":
                device, told = self._library.adopt(message[1]), []
                entry = self._library.inventory[message[1]]
                self._send(["adopted", message[1], entry, self._signals(device)])
                continue
            t_ns = time.monotonic_ns()
            sampled = device.sample()
            changes = None
            if sampled is not None:
                changes, told = _changes(told, sampled), list(sampled)
            t_ns = getattr(device, "t_ns", t_ns)  # of values that a tool brought earlier
            notes = []
            while device.notes:
                notes.append(list(device.notes.popleft()))
            self._send(["values", message[1], message[2], t_ns, changes, notes])

    def _signals(self, device: Any) -> list[str]:
        """What a device tells; of most libraries all devices tell the same."""
        return list(getattr(device, "signals", self._library.signals))

    def _mark(self, index: int, call: str) -> None:
        if call:
            since_ns = time.monotonic_ns()
            marker.enter(self._page, index, since_ns, threading.get_ident(), call)
        else:
            marker.leave(self._page, index)

    def _send(self, message: list[Any]) -> None:
        data = wire.frame(message)
        with self._sending:
            while data:
                try:
                    data = data[os.write(self._answers, data) :]
                except OSError:  # the recorder is gone; `listen` notices, too
                    return


class _Mailbox:
    """Messages for one thread."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[list[Any]] = SimpleQueue()  # a semaphore is dearer by far

    def put(self, message: Any) -> None:
        self._messages.put(message)

    def get(self) -> Any:
        return self._messages.get()


def _changes(told: list[Any], sampled: Sequence[Any]) -> list[Any]:
    """Return places and values of what is not as it was told; all of a list of another length."""
    if len(told) != len(sampled):
        told = [_NOTHING] * len(sampled)
    changes: list[Any] = []
    for at, (old, new) in enumerate(zip(told, sampled)):
        if new is not old and (new != old or type(new) is not type(old)):
            changes += (at, _plain(new))
    return changes


def _plain(value: Any) -> Any:
    return [value.kind, value.message, value.remedy] if isinstance(value, Unavailable) else value


def _settle() -> None:
    """Be a process that may crash: no core file, no terminal signals, first in line for the OOM."""
    for name in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(name, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # The recorder bounds its own address space; a driver maps far more than it uses.
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    with contextlib.suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, str(_OOM_SCORE_ADJUST).encode())
        finally:
            os.close(fd)
    os.lseek(_MARKER_FD, marker.PAGE_BYTES, os.SEEK_SET)
    faulthandler.enable(_MARKER_FD, all_threads=True)  # only that form names the thread


def _return_memory() -> None:
    """Give back what importing took; the binding's 8,000 lines may just have been compiled."""
    import ctypes
    import gc

    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _in_kernel() -> bool:
    """True when a thread of ours sleeps uninterruptibly or runs, which a call may be doing."""
    own = str(threading.get_native_id())
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/stat", "rb") as file:
            if tid != own and file.read().rpartition(b") ")[2][:1] in (b"D", b"R"):
                return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
