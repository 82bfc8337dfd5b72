"""What PyTorch and NCCL record themselves: variables for the job, bounds of the output, RAS.

**Variables.** PyTorch's flight recorder keeps the last operations of each process, and NCCL's
Inspector plugin writes how long each took. Their output goes to `<run dir>/nccl`, a link to the
folder `nccl` of the node's recording. A variable that the user has set is never changed, and with
it none of its family.

Sources: torch/csrc/distributed/c10d/FlightRecorder.hpp (buffer), DebugInfoWriter (dump files);
NVIDIA/nccl, plugins/profiler/inspector/README.md.

**Output.** The Inspector writes a file per process, `<host>-pid<pid>.log`, through the link `nccl`
of the run directory into the folder `nccl` of the recording. It grows as long as the job runs:

    plugin    |============================|===>      at its own position in its file
    recorder  |------- given back ---------| newest 16 MiB stay

The recorder gives the oldest blocks of a file back to the file system (a hole, which reads as
zeros); the plugin notices nothing. Where that is impossible, the file is emptied instead. Readers
skip zeros and a line without its beginning.

Source: NVIDIA/nccl, plugins/profiler/inspector/inspector.cc and json.cc; fallocate(2).

**RAS.** NCCL 2.24 and later listens on `NCCL_RAS_ADDR`, localhost:28028 by default. A client sends
lines and reads an answer; after the status the service closes the connection:

    CLIENT PROTOCOL 2      SERVER PROTOCOL 2
    TIMEOUT 5              OK
    SET FORMAT json        OK          (before 2.28.9: ERROR: Unknown command, and text follows)
    VERBOSE STATUS         the status

The query never waits: the recorder calls `poll` at every flush, and gives up after some seconds.
It connects only if the listening socket belongs to this user, so that no job of others is asked.

Sources: NVIDIA/nccl, src/ras/client.cc and client_support.cc; proc(5), /proc/net/tcp.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterprof.trace.schema import Record

OUTPUT_LINK = "nccl"
DUMP_FOLDER = "dumps"
"""Of the run directory: where ranks leave the flight recorder's operations for the recorder."""
DUMP_PREFIX = "flight_rank_"
_BUFFER_ENTRIES = "2000"  # PyTorch's own default since 2.6: about a megabyte
# PyTorch 2.9 renamed them. It warns in the job's output of the old names, which the probe therefore
# sets only for an older PyTorch (`probe.hooks.distributed`).
_BUFFER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_PLUGIN_VARIABLE = "NCCL_PROFILER_PLUGIN"
_INSPECTOR_PREFIX = "NCCL_INSPECTOR_"
_PLUGIN_NAME = "libnccl-profiler-inspector.so"
_PLUGIN_FOLDERS = (
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"),
    *("/usr/local/lib", "/usr/local/nccl/lib", "/opt/nvidia/nccl/lib", "/opt/nccl/lib"),
)
_MAX_LIBRARY_FOLDERS = 64  # of LD_LIBRARY_PATH: each is a look at a file system
INSPECTOR_INTERVAL_US = 10_000_000
"""Time between two writes of the plugin, us. It keeps at most 1,024 operations of a communicator
until then, so that its output is bounded even where nobody takes it: some 50 KB/s each."""


def with_nccl_variables(
    environ: Mapping[str, str], run_dir: Path, has_end: bool = False
) -> dict[str, str]:
    """Return the environment with the variables that the user has not set.

    has_end: whether the recording may end before the job does. Then the plugin is left out, because
    nobody would bound its output.
    """
    result = dict(environ)
    output = run_dir / OUTPUT_LINK
    reserve_output(run_dir)
    if not any(name in environ for name in _BUFFER_VARIABLES):
        result[_BUFFER_VARIABLES[0]] = _BUFFER_ENTRIES
    if not any(name in environ for name in _DUMP_VARIABLES):
        result[_DUMP_VARIABLES[0]] = str(output / DUMP_PREFIX)
        result.setdefault(_DUMP_ON_TIMEOUT, "1")
    plugin = None if has_end else find_inspector_plugin(environ)
    if plugin is not None:
        result |= {
            _PLUGIN_VARIABLE: plugin,
            f"{_INSPECTOR_PREFIX}ENABLE": "1",
            f"{_INSPECTOR_PREFIX}DUMP_DIR": str(output),
            f"{_INSPECTOR_PREFIX}DUMP_THREAD_INTERVAL_MICROSECONDS": str(INSPECTOR_INTERVAL_US),
        }
    return result


def find_inspector_plugin(environ: Mapping[str, str]) -> str | None:
    """Find the Inspector plugin of NCCL; None if there is none, or the user has set it up."""
    if any(name == _PLUGIN_VARIABLE or name.startswith(_INSPECTOR_PREFIX) for name in environ):
        return None
    folders = environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)[:_MAX_LIBRARY_FOLDERS]
    home = environ.get("NCCL_HOME", "")
    job_folders = [folder for folder in (*folders, f"{home}/lib" if home else "") if folder]
    for folder in (*job_folders, *_PLUGIN_FOLDERS):
        path = os.path.join(folder, _PLUGIN_NAME)
        if folder.startswith("/") and os.path.isfile(path):
            return path
    return None


def link_output(run_dir: Path, folder: Path) -> None:
    """Let `<run dir>/nccl` lead to the folder `nccl` of a node's recording.

    Raises: OSError when the link cannot be made.
    """
    temporary = run_dir / f"{OUTPUT_LINK}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    os.symlink(folder / OUTPUT_LINK, temporary)
    os.rename(temporary, run_dir / OUTPUT_LINK)


def reserve_output(run_dir: Path) -> None:
    """Create the link without a target, unless it exists, and the folder of dumps.

    Before the recorder starts: it asks for output and dumps only where both are. Until it links
    them to its recording nothing can be written there: the run directory is in memory, and must not
    fill.
    """
    with contextlib.suppress(OSError):
        os.symlink("absent/nccl", run_dir / OUTPUT_LINK)
    with contextlib.suppress(OSError):
        os.mkdir(run_dir / DUMP_FOLDER, 0o700)


MAX_FILE_BYTES = 16 << 20
"""Newest part of a file that is kept; half as much more may be there until the next look."""
CHECK_NS = 5_000_000_000
_MAX_OUTPUT_FILES = 1024
_BLOCK_BYTES = 1 << 20  # a multiple of every file system's block
_SUFFIX = ".log"
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_ of linux/falloc.h


class InspectorOutput:
    """A source without records: it bounds the files of the plugin."""

    def __init__(
        self, run_dir: Path, folder: Path, note: Callable[[str, BaseException], None]
    ) -> None:
        """Let the plugin write into the node's folder, if `record` has set it up."""
        self._folder = folder / OUTPUT_LINK
        self._checked_ns = 0
        self._given_back: dict[str, int] = {}  # name of a file -> its first bytes that are gone
        self._is_linked = os.path.islink(run_dir / OUTPUT_LINK)
        if self._is_linked:
            try:
                self._folder.mkdir(mode=stat.S_IMODE(os.stat(folder).st_mode), exist_ok=True)
                link_output(run_dir, folder)
            except OSError as error:
                self._is_linked = False
                note("output of NCCL", error)

    def take(self, now_ns: int) -> list[Record]:
        """Bound the files, every few seconds."""
        if self._is_linked and now_ns - self._checked_ns >= CHECK_NS:
            self._checked_ns = now_ns
            with contextlib.suppress(OSError):
                self._bound_files()
        return []

    def finish(self, now_ns: int) -> list[Record]:
        """Bound the files once more, and remove the folder if it is empty."""
        if self._is_linked:
            with contextlib.suppress(OSError):
                self._bound_files()
            with contextlib.suppress(OSError):
                self._folder.rmdir()
        return []

    def _bound_files(self) -> None:
        with os.scandir(self._folder) as entries:
            for _, entry in zip(range(_MAX_OUTPUT_FILES), entries):
                if not entry.name.endswith(_SUFFIX) or not entry.is_file(follow_symlinks=False):
                    continue
                gone_bytes = self._given_back.get(entry.name, 0)
                size_bytes = entry.stat(follow_symlinks=False).st_size
                if size_bytes - gone_bytes > MAX_FILE_BYTES + MAX_FILE_BYTES // 2:
                    keep_from = (size_bytes - MAX_FILE_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
                    remove_first_bytes(entry.path, gone_bytes, keep_from)
                    self._given_back[entry.name] = keep_from


def remove_first_bytes(path: str, begin: int, end: int) -> None:
    """Give the bytes of a file from `begin` to `end` back to the file system; its size stays.

    Raises: OSError when it cannot be opened or emptied.
    """
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _punch_hole(fd, begin, end - begin):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _punch_hole(fd: int, offset: int, length: int) -> bool:
    """Make a hole in a file; return False where that is impossible."""
    import ctypes  # only where the plugin floods

    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return bool(fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length) == 0)


DEFAULT_ADDRESS = "localhost:28028"
ADDRESS_VARIABLE = "NCCL_RAS_ADDR"
MAX_REPLY_BYTES = 512 << 10
PATIENCE_NS = 15_000_000_000
"""Time after which an answer is no longer awaited, ns. RAS itself gives up after 10 s."""
_REQUEST = b"CLIENT PROTOCOL 2\nTIMEOUT 5\nSET FORMAT json\nVERBOSE STATUS\n"
_LISTEN = "0A"  # state in /proc/net/tcp
_MAX_TABLE_LINES = 65_536
_READ_BYTES = 65_536


class RasQuery:
    """One question to the service; `poll` until it returns True."""

    def __init__(self, address: str, now_ns: int, proc: str = "/proc") -> None:
        """Connect if a socket of this user listens there; else the reason says why not."""
        self.reply = b""
        self.reason = ""
        """Why there is no complete answer; "" if there is one."""
        self._deadline_ns = now_ns + PATIENCE_NS
        self._unsent = _REQUEST
        self._socket: Any = None
        endpoint = parse_loopback_address(address)
        if endpoint is None:
            self.reason = f"{ADDRESS_VARIABLE} {address[:80]!r} is not an address of this machine"
        elif not has_own_listener(endpoint[1], proc):
            self.reason = f"no RAS service of this job listens on port {endpoint[1]}"
        else:
            self._connect(*endpoint)

    def poll(self, now_ns: int) -> bool:
        """Send and read without blocking; return whether the query is over."""
        connection = self._socket
        if connection is None:
            return True
        try:
            while self._unsent:
                self._unsent = self._unsent[connection.send(self._unsent) :]
            while len(self.reply) < MAX_REPLY_BYTES:
                data = connection.recv(_READ_BYTES)
                self.reply += data
                if not data:
                    return self._finish("")
            return self._finish(f"the answer was cut after {MAX_REPLY_BYTES} bytes")
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # not yet connected
                return self._finish(f"the RAS service: {error.strerror or error}")
        if now_ns >= self._deadline_ns:
            return self._finish(f"the RAS service did not answer within {PATIENCE_NS // 10**9} s")
        return False

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self, host: str, port: int) -> None:
        import socket  # not where `record` only needs the variables

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError as error:
            self.reason = f"no socket: {error.strerror or error}"
            return
        self._socket = connection
        connection.setblocking(False)
        status = connection.connect_ex((host, port))
        if status not in (0, errno.EINPROGRESS):
            self._finish(f"the RAS service: {os.strerror(status)}")

    def _finish(self, reason: str) -> bool:
        self.reason = reason
        self.close()
        return True


def parse_loopback_address(address: str) -> tuple[str, int] | None:
    """Parse host and port of a RAS address; None unless the host is this machine's loopback.

    address: `host:port`, with an IPv6 host in brackets.
    """
    host, _, port = address.strip().rpartition(":")
    host = host.strip("[]")
    if host in ("", "localhost"):
        host = "127.0.0.1"
    is_loopback = host == "::1" or (host.startswith("127.") and host.replace(".", "").isdigit())
    if not is_loopback or not port.isdigit() or not 0 < int(port) < 65_536:
        return None
    return host, int(port)


def has_own_listener(port: int, proc: str = "/proc") -> bool:
    """Return whether a socket of this user listens on a TCP port."""
    user = str(os.geteuid())
    return any(
        fields[3] == _LISTEN and fields[7] == user and fields[1].endswith(f":{port:04X}")
        for fields in _list_sockets(proc)
    )


def _list_sockets(proc: str) -> Iterator[list[str]]:
    for name in ("tcp", "tcp6"):
        try:
            with open(f"{proc}/net/{name}", encoding="ascii", errors="replace") as table:
                for _, line in zip(range(_MAX_TABLE_LINES), table):
                    fields = line.split()
                    if len(fields) > 7:
                        yield fields
        except OSError:
            continue
