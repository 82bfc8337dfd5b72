"""The helper process as the recorder sees it: start, send, receive, notice its death, abandon.

It is neither waited for nor killed: killing a process inside the driver has frozen GPUs
until a reboot. It exits when its pipe is closed.

Messages between recorder and helper: length-prefixed msgpack.

    u32 little-endian length · msgpack array

The helper may use 15 MB including the driver's library, and `msgspec` alone takes five;
so it uses this small codec. The recorder decodes with `msgspec`, which it loads anyway.
https://github.com/msgpack/msgpack/blob/master/spec.md

A shared page that states which device is inside which driver call, and since when.

The helper writes it around every call; the recorder reads it when an answer is late or
the helper has crashed. Both map one memory file, so a hanging or dead process need not
send anything. 48 bytes per slot, slot 0 for the library itself, slot `i + 1` for device
`i`:

    i64 since_ns (monotonic; 0 = in no call) · u64 thread · 32 bytes name of the call

After the page, the helper's `faulthandler` writes which thread received a fatal signal.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 20  # a longer message is corrupt

_INT = struct.Struct(">Bq")
_UINT = struct.Struct(">BQ")
_FLOAT = struct.Struct(">Bd")
_SIZED = struct.Struct(">BI")
_NIL, _FALSE, _TRUE = 0xC0, 0xC2, 0xC3
_FLOAT64, _UINT64, _INT64, _STR32, _ARRAY32, _MAP32 = 0xCB, 0xCF, 0xD3, 0xDB, 0xDD, 0xDF


def encode_message(message: list[Any]) -> bytes:
    """Encode a message with its length prefix.

    message: of None, bool, int, float, str, list, tuple and dict. Raises: TypeError for a
    value of another type.
    """
    parts: list[bytes] = []
    _pack_value(message, parts.append)
    payload = b"".join(parts)
    return LENGTH.pack(len(payload)) + payload


def take_payloads(buffer: bytearray) -> Iterator[bytes]:
    """Remove every complete message from the front of `buffer` and yield its payload.

    Raises: ValueError for a length above the maximum.
    """
    while len(buffer) >= LENGTH.size:
        (size,) = LENGTH.unpack_from(buffer)
        if size > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {size} bytes")
        if len(buffer) < LENGTH.size + size:
            return
        payload = bytes(buffer[LENGTH.size : LENGTH.size + size])
        del buffer[: LENGTH.size + size]
        yield payload


def decode_message(payload: bytes) -> Any:
    """Decode a payload made by `encode_message`.

    Raises: ValueError for other msgpack encodings, or for bytes after the message.
    """
    value, end = _unpack_value(payload, 0)
    if end != len(payload):
        raise ValueError("extra bytes after the message")
    return value


def _pack_value(value: Any, append: Callable[[bytes], None]) -> None:
    if isinstance(value, float):
        append(_FLOAT.pack(_FLOAT64, value))
    elif value is None or isinstance(value, bool):
        append(bytes((_NIL if value is None else _TRUE if value else _FALSE,)))
    elif isinstance(value, int):
        append(_UINT.pack(_UINT64, value) if value >= 1 << 63 else _INT.pack(_INT64, value))
    elif isinstance(value, str):
        text = value.encode("utf-8", "replace")
        append(_SIZED.pack(_STR32, len(text)))
        append(text)
    elif isinstance(value, list | tuple):
        append(_SIZED.pack(_ARRAY32, len(value)))
        for item in value:
            _pack_value(item, append)
    elif isinstance(value, dict):
        append(_SIZED.pack(_MAP32, len(value)))
        for key, item in value.items():
            _pack_value(key, append)
            _pack_value(item, append)
    else:
        raise TypeError(f"cannot send {type(value).__name__}")


def _unpack_value(data: bytes, offset: int) -> tuple[Any, int]:
    code = data[offset] if offset < len(data) else -1
    if code in (_NIL, _FALSE, _TRUE):
        return (None if code == _NIL else code == _TRUE), offset + 1
    try:
        if code == _FLOAT64:
            return _FLOAT.unpack_from(data, offset)[1], offset + 9
        if code in (_INT64, _UINT64):
            return (_INT if code == _INT64 else _UINT).unpack_from(data, offset)[1], offset + 9
        if code not in (_STR32, _ARRAY32, _MAP32):
            raise ValueError(f"unknown code {code:#x}")
        size = _SIZED.unpack_from(data, offset)[1]
    except struct.error as error:
        raise ValueError("cut short") from error
    offset += _SIZED.size
    if code == _STR32:
        if offset + size > len(data):
            raise ValueError("cut short")
        return data[offset : offset + size].decode("utf-8", "replace"), offset + size
    items = []
    for _ in range(size * (2 if code == _MAP32 else 1)):
        item, offset = _unpack_value(data, offset)
        items.append(item)
    if code == _ARRAY32:
        return items, offset
    try:
        return dict(zip(items[::2], items[1::2])), offset
    except TypeError as error:  # a list or a map as the key of a map
        raise ValueError("not a key") from error


PAGE_BYTES = 4096
_CALL_SLOT = struct.Struct("<qQ32s")
_SLOT_COUNT = PAGE_BYTES // _CALL_SLOT.size
_MAX_FAULT_BYTES = 65536
_CRASHED_THREAD = re.compile(rb"Current thread 0x([0-9a-fA-F]+)")


class DriverCall(NamedTuple):
    """A driver call that had not returned when the page was read."""

    device: int
    """Device index; -1 = the library itself."""
    since_ns: int
    thread: int
    call: str


def create_marker() -> int:
    """Create a marker page and return its descriptor.

    Raises: OSError when the memory file cannot be created.
    """
    fd = os.memfd_create("clusterprof-helper", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE_BYTES)
    return fd


def attach_marker(fd: int) -> mmap.mmap:
    """Map a marker page from its descriptor."""
    return mmap.mmap(fd, PAGE_BYTES)


def begin_call(page: mmap.mmap, index: int, since_ns: int, thread: int, call: str) -> None:
    """Mark that a call begins; devices beyond the page are ignored."""
    if index + 1 < _SLOT_COUNT:
        name = call.encode("ascii", "replace")[:32]
        _CALL_SLOT.pack_into(page, (index + 1) * _CALL_SLOT.size, since_ns, thread, name)


def finish_call(page: mmap.mmap, index: int) -> None:
    """Mark that a call has returned."""
    if index + 1 < _SLOT_COUNT:
        _CALL_SLOT.pack_into(page, (index + 1) * _CALL_SLOT.size, 0, 0, b"")


def list_unfinished_calls(page: mmap.mmap) -> list[DriverCall]:
    """Return the calls that have not returned, by device."""
    calls = []
    for slot in range(_SLOT_COUNT):
        since_ns, thread, name = _CALL_SLOT.unpack_from(page, slot * _CALL_SLOT.size)
        if since_ns:
            call = name.rstrip(b"\0").decode("ascii", "replace")
            calls.append(DriverCall(slot - 1, since_ns, thread, call))
    return calls


def find_crashed_calls(page: mmap.mmap, fd: int) -> list[DriverCall]:
    """Return the call hit by a fatal signal; all unfinished calls if the thread is unknown."""
    calls = list_unfinished_calls(page)
    match = _CRASHED_THREAD.search(os.pread(fd, _MAX_FAULT_BYTES, PAGE_BYTES))
    named = [call for call in calls if match is not None and call.thread == int(match[1], 16)]
    return named or calls


_BOOT_CODE = (
    "import sys; sys.path += sys.argv.pop(1).split(':'); "
    "from clusterprof.agent.isolation.helper import main; main(sys.argv[1:])"
)
_DECODER = msgspec.msgpack.Decoder()
_READ_BYTES = 65536
MAX_REQUESTS = 64
"""Most requests in one write: at about 40 bytes each they fit into PIPE_BUF."""


class HelperProcess:
    """One running helper."""

    def __init__(
        self, python: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Start the helper.

        Raises: OSError when the system cannot start a process.
        """
        self.exit_signal = 0
        """The signal that killed the helper, valid once `ended()` is true; 0 = normal exit."""
        self._buffer = bytearray()
        self._reaped = self._at_end = False
        self._fds: list[int] = []
        try:
            their_in, self._out = self._pipe()
            self._in, their_out = self._pipe()
            self._marker = _move_above_stdio(create_marker())
            self._fds.append(self._marker)
            self._page = attach_marker(self._marker)
            self.pid = _start_process(
                python, arguments, environment, (their_in, their_out, self._marker)
            )
        except OSError:
            self._close_all()
            raise
        for fd in (their_in, their_out):
            os.close(fd)
            self._fds.remove(fd)
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    def send(self, requests: Sequence[list[Any]]) -> bool:
        """Send at most `MAX_REQUESTS` requests without waiting.

        All go in one write, so the helper wakes up once. Returns False when the pipe is full or
        has no reader.
        """
        try:
            # shorter than PIPE_BUF: written as a whole or not at all
            os.write(self._out, b"".join(map(encode_message, requests)))
        except OSError:
            return False
        return True

    def receive(self) -> list[Any]:
        """Return the messages that have arrived, without waiting."""
        try:
            while data := os.read(self._in, _READ_BYTES):
                self._buffer += data
            self._at_end = True
        except BlockingIOError:
            pass
        try:
            return [_DECODER.decode(payload) for payload in take_payloads(self._buffer)]
        except (ValueError, msgspec.DecodeError):
            self._at_end = True  # undecodable output: treat the helper as dead
            return []

    def wait_readable(self, seconds: float) -> None:
        """Wait until a message arrives or the time is over."""
        import select

        poller = select.poll()  # select() takes no descriptor above 1023
        poller.register(self._in, select.POLLIN)
        poller.poll(1000 * max(0.0, seconds))

    def ended(self) -> bool:
        """Return whether the helper has closed its end of the pipe and no longer exists."""
        return self._at_end and self.reap()

    def reap(self) -> bool:
        """Collect the exit status if there is one; return whether the process no longer exists."""
        if not self._reaped:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # its status was collected elsewhere
                self._reaped = True
                return True
            if pid:
                self._reaped = True
                self.exit_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return self._reaped

    def find_unfinished_call(self, index: int) -> DriverCall | None:
        """Return the unfinished call of a device (-1: the library itself), None without one."""
        for call in list_unfinished_calls(self._page):
            if call.device == index:
                return call
        return None

    def find_crashed_calls(self) -> list[DriverCall]:
        """Return the call that crashed the helper, or all calls that may have."""
        return find_crashed_calls(self._page, self._marker)

    def close(self) -> None:
        """Close the pipe; a hanging helper is left running."""
        self._page.close()
        self._close_all()
        self.reap()

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        moved = _move_above_stdio(ends[0]), _move_above_stdio(ends[1])
        self._fds += moved
        return moved

    def _close_all(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def _move_above_stdio(fd: int) -> int:
    """Move a descriptor out of the range 0 to 3, which the child redirects."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return int(moved)


def _start_process(
    python: str, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
) -> int:
    # -I -S: the job's sitecustomize and working directory have no influence; the helper can import
    # what the recorder can.
    path = ":".join(entry for entry in sys.path if entry and ":" not in entry)
    return os.posix_spawn(
        python,
        [python, "-I", "-S", "-c", _BOOT_CODE, path, *arguments],
        {**environment, "CLUSTERPROF_DISABLE": "1"},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, fds[0], 0),
            (os.POSIX_SPAWN_DUP2, fds[1], 1),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, fds[2], 3),
        ],
        setpgroup=0,  # Ctrl-C is meant for the job
        setsigmask=(),  # the recorder may block signals to read them from a descriptor
    )
