"""`python -m clusterprof.agent.isolation.helper NAME`: makes driver calls that can hang or crash.

Speaks `agent.isolation.process` on stdin and stdout. One thread per device, so that a hanging
call blocks only its own device; the main thread only listens, so that the end of the
pipe is always noticed.

    → ["sample", index, sequence]    ← ["values", index, sequence, t_ns, changes, notes]
    → ["adopt", index]               ← ["adopted", index, entry, signals]
                                     ← ["opened", inventory, [signals]]
                                     ← ["unavailable", kind, message, remedy, by user]

`signals` is the list of one device. `changes` is [index, value, index, value …] of the
values that differ from the previous answer (the first answer has all): most values of a
GPU are sampled ten times a second but change once a second or never. A value is a
number or [kind, message, remedy, by user]. None: nothing new since the last answer.

When the pipe ends the helper stops its tools and exits, but not during a call: killing
a process inside the driver has frozen GPUs until a reboot. It waits for the call to
return, and exits after a while if the call sleeps where a signal can interrupt it.
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
from _queue import SimpleQueue  # avoids the modules that `queue` imports
from collections.abc import Callable, Sequence
from typing import Any

from clusterprof.agent.isolation import process
from clusterprof.agent.isolation.drivers import get_library_opener
from clusterprof.errors import Unavailable

_HELPER_OOM_SCORE_ADJUST = 500
_GRACE_NS = 10_000_000_000
_MARKER_FD = 3
_NO_VALUE = object()


def main(arguments: list[str]) -> None:
    """Serve `NAME [--skip I,J] [--grace-ns N] [--gpm on|off]` until stdin ends; never returns."""
    name = arguments[0]
    options = dict(zip(arguments[1::2], arguments[2::2]))
    skip = {int(word) for word in options.get("--skip", "").split(",") if word}
    open_library = get_library_opener(name, options)
    _limit_process()
    answers = os.dup(1)
    os.dup2(2, 1)  # output that a library prints must not mix with the messages
    service = _Service(open_library, skip, answers)
    threading.Thread(target=service.open, daemon=True).start()
    service.listen()
    service.shut_down(int(options.get("--grace-ns", _GRACE_NS)))


class _Service:
    def __init__(self, open_library: Callable[..., Any], skip: set[int], answers: int) -> None:
        self._opened, self._skip, self._answer_fd = open_library, skip, answers
        self._page = process.attach_marker(_MARKER_FD)
        self._sending = threading.Lock()
        self._mailboxes: dict[int, _Mailbox] = {}
        self._library: Any = None

    def open(self) -> None:
        try:
            library = self._opened(self._mark, self._skip)
        except Unavailable as reason:
            self._send(["unavailable", *reason.list_fields()])
            return
        except Exception as error:  # a binding that cannot even be imported
            self._send(["unavailable", "failed", f"{type(error).__name__}: {error}"[:300], ""])
            return
        _release_memory()
        self._library = library
        for index, device in enumerate(library.devices):
            mailbox = self._mailboxes[index] = _Mailbox()
            threading.Thread(target=self._serve, args=(device, mailbox), daemon=True).start()
        signals = [self._signals(device) for device in library.devices]
        self._send(["opened", library.inventory, signals])

    def listen(self) -> None:
        """Hand requests to the devices' threads until the recorder closes its end."""
        buffer = bytearray()
        while data := os.read(0, 65536):
            buffer += data
            for payload in process.take_payloads(buffer):
                message = process.decode_message(payload)
                mailbox = self._mailboxes.get(message[1])
                if mailbox is not None:
                    mailbox.put(message)

    def shut_down(self, grace_ns: int) -> None:
        """Stop the tools, and exit as soon as that interrupts no driver call."""
        eof_ns = time.monotonic_ns()
        end_tools = getattr(self._library, "end_tools", None)
        if end_tools is not None:
            end_tools()
        while process.list_unfinished_calls(self._page):
            if time.monotonic_ns() - eof_ns > grace_ns and not _is_in_kernel():
                break
            time.sleep(0.05 if time.monotonic_ns() - eof_ns < _GRACE_NS else 1.0)
        os._exit(0)

    def _serve(self, device: Any, mailbox: _Mailbox) -> None:
        sent: list[Any] = []
        while True:
            message = mailbox.get()
            if message[0] == "adopt":
                device, sent = self._library.adopt(message[1]), []
                entry = self._library.inventory[message[1]]
                self._send(["adopted", message[1], entry, self._signals(device)])
                continue
            t_ns = time.monotonic_ns()
            sampled = device.sample()
            changes = None
            if sampled is not None:
                changes, sent = _list_changes(sent, sampled), list(sampled)
            t_ns = getattr(device, "t_ns", t_ns)  # values that a tool measured earlier
            notes = []
            while device.notes:
                notes.append(list(device.notes.popleft()))
            self._send(["values", message[1], message[2], t_ns, changes, notes])

    def _signals(self, device: Any) -> list[str]:
        """Return the signals of a device; for most libraries all devices share one list."""
        return list(getattr(device, "signals", self._library.signals))

    def _mark(self, index: int, call: str) -> None:
        if call:
            since_ns = time.monotonic_ns()
            process.begin_call(self._page, index, since_ns, threading.get_ident(), call)
        else:
            process.finish_call(self._page, index)

    def _send(self, message: list[Any]) -> None:
        data = process.encode_message(message)
        with self._sending:
            while data:
                try:
                    data = data[os.write(self._answer_fd, data) :]
                except OSError:  # the recorder has exited; `listen` notices it too
                    return


class _Mailbox:
    """A queue of messages for one thread."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[list[Any]] = SimpleQueue()  # a semaphore costs far more

    def put(self, message: Any) -> None:
        self._messages.put(message)

    def get(self) -> Any:
        return self._messages.get()


def _list_changes(sent: list[Any], sampled: Sequence[Any]) -> list[Any]:
    """Return places and values that differ from those sent; all values if the length differs."""
    if len(sent) != len(sampled):
        sent = [_NO_VALUE] * len(sampled)
    changes: list[Any] = []
    for index, (previous, value) in enumerate(zip(sent, sampled)):
        if value is not previous and (value != previous or type(value) is not type(previous)):
            changes += (index, _encode_value(value))
    return changes


def _encode_value(value: Any) -> Any:
    return list(value.list_fields()) if isinstance(value, Unavailable) else value


def _limit_process() -> None:
    """Prepare a process that may crash: no core file, no terminal signals, first OOM victim.

    SIGUSR2 is meant for the recorder: sent to its helpers, too, it must not end them in a call.
    """
    terminal = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    for name in (*terminal, signal.SIGPIPE, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # The recorder bounds its own address space; a driver maps far more than it uses.
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    with contextlib.suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, str(_HELPER_OOM_SCORE_ADJUST).encode())
        finally:
            os.close(fd)
    os.lseek(_MARKER_FD, process.PAGE_BYTES, os.SEEK_SET)
    faulthandler.enable(_MARKER_FD, all_threads=True)  # only this form prints which thread crashed


def _release_memory() -> None:
    """Release the memory of imports; 8,000 lines of the binding may just have been compiled."""
    import ctypes
    import gc

    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _is_in_kernel() -> bool:
    """Return whether another thread runs or sleeps uninterruptibly, perhaps in a driver call."""
    own_tid = str(threading.get_native_id())
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/stat", "rb") as file:
            if tid != own_tid and file.read().rpartition(b") ")[2][:1] in (b"D", b"R"):
                return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
