"""The processes of the job: which registered, which are alive, how each ended.

`record` and the probe write `register/<pid>.json`; this module reads the files, holds a
pidfd of each process and makes the events `process-registered` and `process-exited`.

Folders of small files in which the job's processes announce themselves and their rings.

Processes by descriptor: a pidfd never refers to another process and reports when its own ends.

The wait status comes from PIDFD_GET_INFO (Linux 6.15 and later, also when the recorder
is not the parent), from /proc/<pid>/stat while the process is still a zombie, or stays
unknown. https://man7.org/linux/man-pages/man2/pidfd_open.2.html,
include/uapi/linux/pidfd.h

The process groups that ranks announce: `groups/<pid>.<group>.json` becomes an event.

docs/design/waits-between-ranks.md, defines the group number.

Flight recorder dumps of the job's ranks, copied into the recording when the job ends.

A PyTorch rank dumps the state of its collective operations to the file named in its
environment, followed by its rank. Of the environment only that name is kept, in memory.
A dump is copied if it is a plain file owned by this user, of bounded size, and written
after the rank registered. Ranks without CUDA write one for the recorder when they end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof.agent.launch.election import read_small_json, write_private_file
from clusterprof.agent.launch.identity import (
    LAUNCHER_VARIABLES,
    read_start_ticks,
    read_stat_fields,
    resolve_placement,
)
from clusterprof.agent.launch.nccl import DUMP_FOLDER, OUTPUT_LINK
from clusterprof.agent.linux.files import OpenFolder
from clusterprof.trace.schema import Event, Gap, Record

# Two files may arrive within one timer tick (1 to 10 ms) and leave the folder's time
# unchanged: a folder is read again until its time is this old.
_SETTLED_NS = 50_000_000


class AnnouncementFolder:
    """A folder of small JSON files that are added and replaced; reports which are new.

    Checking costs one fstat() while nothing changes.
    """

    def __init__(self, folder: str, max_files: int) -> None:
        self._folder = OpenFolder(folder)
        self._at_most = max_files  # files beyond this number are not read
        self._seen: dict[str, int] = {}  # file name -> inode
        self._changed_ns = -1
        self._look_again = True

    def look_again(self) -> None:
        """Read the folder at the next check even if its time is unchanged."""
        self._look_again = True

    def list_again(self) -> None:
        """Return all files at the next check, those returned before too."""
        self._seen, self._look_again = {}, True

    def fresh(self) -> list[str] | None:
        """Return the names added or replaced since the last check; None = no change."""
        changed_ns = self._folder.read_mtime_ns()
        if changed_ns is None or (changed_ns == self._changed_ns and not self._look_again):
            return None
        age_ns = time.time_ns() - changed_ns
        self._look_again = changed_ns != self._changed_ns or 0 <= age_ns < _SETTLED_NS
        self._changed_ns = changed_ns
        names: dict[str, int] = {}
        try:
            with os.scandir(self._folder.path) as entries:
                for entry in entries:
                    if entry.name.endswith(".json") and not entry.name.startswith("."):
                        names[entry.name] = entry.inode()
                    if len(names) >= self._at_most:
                        break
        except OSError:
            self._look_again = True  # no descriptor is left, or the folder was just removed
            return None
        fresh = [name for name, inode in names.items() if self._seen.get(name) != inode]
        self._seen = names
        return fresh


_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("=QQ11Ii")  # struct pidfd_info, first version: 64 bytes
# _IOWR(0xFF, 11, 64): direction, size, type, number
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11
_STAT_EXIT_CODE = 49  # field 52, counted from the third


def open_pidfd(proc: str, pid: int, ticks: int) -> int | None:
    """Open a pidfd of the process with this pid and start time; None when it no longer exists.

    ticks: start time, field 22 of /proc/<pid>/stat, in clock ticks since boot.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None
    # Checked after opening: if the pid had been reused before, the start time differs now.
    if read_start_ticks(proc, pid) != ticks:
        os.close(descriptor)
        return None
    return descriptor


def read_wait_status(proc: str, descriptor: int, pid: int, ticks: int) -> int | None:
    """Read the wait status of an exited process as waitpid() returns it; None while unknown."""
    buffer = bytearray(_PIDFD_INFO.size)
    _PIDFD_INFO.pack_into(buffer, 0, _PIDFD_INFO_EXIT, *(0,) * 13)
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, buffer)
    except OSError:
        pass  # an older kernel
    else:
        values = _PIDFD_INFO.unpack(buffer)
        if values[0] & _PIDFD_INFO_EXIT:
            return int(values[-1])
    fields = read_stat_fields(proc, pid)
    zombie = fields is not None and fields[0] == b"Z" and int(fields[19]) == ticks
    if fields is not None and zombie and len(fields) > _STAT_EXIT_CODE:
        return int(fields[_STAT_EXIT_CODE])
    return None


class ExitWatcher:
    """Reports which watched processes have ended.

    `descriptor` is readable while an exit has not been returned by `ended`.
    """

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, started ticks)

    @property
    def descriptor(self) -> int:
        """Descriptor to wait on."""
        return self._epoll.fileno()

    def watch(self, pid: int, ticks: int) -> bool:
        """Watch a process; return False when it has already exited."""
        pidfd = open_pidfd(self._proc, pid, ticks)
        if pidfd is None:
            return False
        self._epoll.register(pidfd, select.EPOLLIN)
        self._watched[pidfd] = (pid, ticks)
        return True

    def ended(self) -> list[tuple[int, int, int]]:
        """Return (pidfd, pid, started ticks) of ended processes; the caller closes each pidfd."""
        exits = []
        for pidfd, _ in self._epoll.poll(0):
            self._epoll.unregister(pidfd)
            exits.append((pidfd, *self._watched.pop(pidfd)))
        return exits

    def close(self) -> None:
        """Close all descriptors."""
        for pidfd in self._watched:
            os.close(pidfd)
        self._watched.clear()
        self._epoll.close()


MAX_REGISTRATIONS = 4096
_MAX_ATTRIBUTES = 16
_MAX_TEXT_CHARACTERS = 256
_STATUS_TIMEOUT_NS = 500_000_000  # how long to wait for the wait status of an exited process


@dataclass(slots=True)
class _PendingExit:
    pidfd: int
    pid: int
    ticks: int
    ended_ns: int


class Registry:
    """Registered processes: reads a folder of small files and makes events."""

    def __init__(self, run_dir: Path, proc: str = "/proc") -> None:
        self._folder = str(run_dir / "register")
        self._proc = proc
        self._exit_watcher = ExitWatcher(proc)
        self._announcements = AnnouncementFolder(self._folder, MAX_REGISTRATIONS)
        self._first = True
        self._alive: dict[int, int] = {}  # pid -> started ticks
        self._pending_exits: list[_PendingExit] = []
        self._pending: list[Record] = []
        self.has_registered = False
        """True once any process has registered, however short-lived."""

    @property
    def descriptor(self) -> int:
        """Descriptor that becomes readable when a registered process has ended."""
        return self._exit_watcher.descriptor

    def job_pids(self) -> list[int]:
        """Return the registered processes that are alive."""
        return list(self._alive)

    def has_processes(self) -> bool:
        """Return whether a registered process is alive or its exit is still to be recorded."""
        return bool(self._alive or self._pending_exits)

    def attach(self, pid: int, variables: Mapping[str, str], now_ns: int) -> bool:
        """Register a running process as the job's command; return False when it does not exist."""
        ticks = read_start_ticks(self._proc, pid)
        if ticks is None:
            return False
        attributes = {"pid": pid, "started_ticks": ticks, "role": "command", "attached": True}
        self._register({**attributes, "variables": dict(variables)}, now_ns)
        return pid in self._alive

    def look(self, now_ns: int) -> bool:
        """Read new registrations and exits; return True while a wait status is still unknown."""
        self._scan(now_ns)
        for pidfd, pid, ticks in self._exit_watcher.ended():
            if self._alive.get(pid) == ticks:
                del self._alive[pid]
            self._pending_exits.append(_PendingExit(pidfd, pid, ticks, now_ns))
        if self._pending_exits:
            self._pending_exits = [
                pending_exit
                for pending_exit in self._pending_exits
                if not self._resolve_exit(pending_exit, now_ns)
            ]
        return bool(self._pending_exits)

    def look_again(self, now_ns: int) -> None:
        """Read the folder even if its time is unchanged, while no process can join any more."""
        self._announcements.look_again()
        self.look(now_ns)

    def take(self, now_ns: int) -> list[Record]:
        """Return the events since the last call."""
        records, self._pending = self._pending, []
        return records

    def finish(self, now_ns: int) -> list[Record]:
        """Return the last events; a wait status that is still unknown stays unknown."""
        for pending_exit in self._pending_exits:
            self._resolve_exit(
                pending_exit, pending_exit.ended_ns + _STATUS_TIMEOUT_NS
            )  # treat the waiting time as over
        self._pending_exits = []
        return self.take(now_ns)

    def close(self) -> None:
        """Close all descriptors."""
        for pending_exit in self._pending_exits:
            os.close(pending_exit.pidfd)
        self._exit_watcher.close()

    def _scan(self, now_ns: int) -> None:
        fresh = self._announcements.fresh()
        if fresh is None:
            return
        for name in fresh:
            registration = read_small_json(f"{self._folder}/{name}")
            if registration is not None and name == f"{registration.get('pid')}.json":
                self._register(registration, now_ns)
        self._first = False

    def _register(self, registration: Mapping[str, Any], now_ns: int) -> None:
        attributes = parse_registration(registration)
        if attributes is None:
            return
        self.has_registered = True
        pid, ticks = attributes["pid"], attributes["started_ticks"]
        is_known = self._alive.get(pid) == ticks
        if not is_known and not self._exit_watcher.watch(pid, ticks):
            if self._first:
                self._forget(pid)  # left over from an earlier recorder of this job
            else:
                self._pending.append(Event(now_ns, "process-registered", attributes))
                self._add_exit_event(now_ns, pid, ticks, None)
            return
        self._alive[pid] = ticks
        self._pending.append(Event(now_ns, "process-registered", attributes))

    def _resolve_exit(self, pending_exit: _PendingExit, now_ns: int) -> bool:
        # The status appears when the parent has reaped the process: a moment later, or never.
        status = read_wait_status(
            self._proc, pending_exit.pidfd, pending_exit.pid, pending_exit.ticks
        )
        if status is None and now_ns - pending_exit.ended_ns < _STATUS_TIMEOUT_NS:
            return False
        os.close(pending_exit.pidfd)
        self._add_exit_event(pending_exit.ended_ns, pending_exit.pid, pending_exit.ticks, status)
        return True

    def _add_exit_event(self, t_ns: int, pid: int, ticks: int, status: int | None) -> None:
        attributes: dict[str, Any] = {"pid": pid, "started_ticks": ticks, "wait_status": status}
        if status is not None:
            killed = os.WIFSIGNALED(status)
            attributes["exit_code"] = None if killed else os.WEXITSTATUS(status)
            attributes["signal"] = os.WTERMSIG(status) if killed else None
        self._pending.append(Event(t_ns, "process-exited", attributes))
        self._forget(pid)

    def _forget(self, pid: int) -> None:
        try:
            os.unlink(f"{self._folder}/{pid}.json")
        except OSError:
            pass


def parse_registration(registration: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the attributes of a registration that may enter a recording, None if invalid.

    Only launcher variables are kept, and only attributes that are short scalars; job, rank,
    world and node are resolved here, so that every reader agrees on them.
    """
    pid, ticks = registration.get("pid"), registration.get("started_ticks")
    if not _is_count(pid) or not _is_count(ticks):
        return None
    raw_variables = registration.get("variables")
    variables = {
        name: raw_variables[name][:_MAX_TEXT_CHARACTERS]
        for name in LAUNCHER_VARIABLES
        if isinstance(raw_variables, dict) and isinstance(raw_variables.get(name), str)
    }
    placement = resolve_placement(variables)
    attributes: dict[str, Any] = {"role": "command", "device": "", **placement}
    for name, value in list(registration.items())[:_MAX_ATTRIBUTES]:
        if isinstance(value, str):
            attributes[name[:64]] = value[:_MAX_TEXT_CHARACTERS]
        elif isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**62):
            attributes[name[:64]] = value
    attributes["variables"] = variables
    attributes["rank"], attributes["job"] = placement["rank"], placement["job"]
    return attributes


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**62


def has_live_process(run_dir: Path, proc: str = "/proc") -> bool:
    """Return whether any process registered in a run directory is alive."""
    for path in (run_dir / "register").glob("*.json"):
        attributes = parse_registration(read_small_json(str(path)) or {})
        if attributes is None:
            continue
        if read_start_ticks(proc, attributes["pid"]) == attributes["started_ticks"]:
            return True
    return False


MAX_GROUP_ANNOUNCEMENTS = 8192  # 32 ranks of a node with 256 groups each
MAX_GROUP_FILE_BYTES = 128 << 10  # a group of 16,384 ranks


class ProcessGroupReader:
    """Reads announced process groups from small files; makes `group-announced` events."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = str(run_dir / "groups")
        self._announcements = AnnouncementFolder(self._folder, MAX_GROUP_ANNOUNCEMENTS)

    def take(self, now_ns: int) -> list[Record]:
        """Return the events of the announcements made since the last call."""
        events: list[Record] = []
        for name in self._announcements.fresh() or ():
            announced = read_small_json(f"{self._folder}/{name}", MAX_GROUP_FILE_BYTES) or {}
            attributes = parse_group(announced)
            if attributes and name == f"{attributes['pid']}.{attributes['group']}.json":
                events.append(Event(now_ns, "group-announced", attributes))
        return events

    def finish(self, now_ns: int) -> list[Record]:
        """Return the last events."""
        self._announcements.look_again()
        return self.take(now_ns)


def parse_group(announced: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the attributes that may enter a recording, None if the file announces no group."""
    pid, group, ranks = (announced.get(name) for name in ("pid", "group", "ranks"))
    if not _is_number(pid) or not _is_number(group) or not isinstance(ranks, list) or not ranks:
        return None
    if not all(map(_is_number, ranks)):
        return None
    return {"pid": pid, "group": group, "ranks": ranks}


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


_GONE_REMEDY = (
    "exclude clusterprof-* in /dev/shm from the cleaner of temporary files, or set XDG_RUNTIME_DIR"
    " and record again"
)


class RunDirWatch:
    """A source that reports once that another program deleted the run directory."""

    def __init__(self, run_dir: Path, note: Callable[[str, BaseException], None]) -> None:
        """Take the run directory; `note` writes to the recorder's log."""
        self._run_dir = run_dir
        self._folder = OpenFolder(run_dir / "register")
        self._note = note
        self._is_gone = False

    def take(self, now_ns: int) -> list[Record]:
        """Return a gap when the run directory has disappeared since the last call."""
        if self._is_gone or self._folder.read_mtime_ns() is not None:
            return []
        self._is_gone = True
        problem = (
            f"another program deleted the run directory {self._run_dir} while the job ran: steps"
            " and spans of processes that started later are missing"
        )
        self._note("run directory", FileNotFoundError(f"{problem}; {_GONE_REMEDY}"))
        return [Gap(now_ns, "probe", "", "", "failed", problem, _GONE_REMEDY)]

    def finish(self, now_ns: int) -> list[Record]:
        """Return nothing: at the end the recorder itself removes the run directory."""
        self._folder.close()
        return []


DUMP_VARIABLES = (b"TORCH_FR_DUMP_TEMP_FILE", b"TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
MAX_DUMP_BYTES = 16 << 20  # per dump
MIN_FREE_BYTES = 1 << 30  # on the recording's file system
MAX_DUMPING_RANKS = 128
AT_EXIT = "at-exit"
"""File in the folder of dumps that asks ranks for a dump when they end."""
EXIT_DUMP_PREFIX = "exit_rank_"
"""Of a dump in the recording that a rank wrote when it ended; others are of a hang."""
_EXIT_DUMP_SUFFIX = ".exit.json"
_MAX_ENVIRON_BYTES = 1 << 20


class FlightRecorderDumps:
    """A source without records: it notes where ranks will dump, and finally copies the dumps.

    A rank that uses no device writes a dump when it ends, into the run directory, if a file there
    asks for it: where PyTorch's and NCCL's own records are wanted (`--nccl`).
    """

    def __init__(self, run_dir: Path, folder: Path, proc: str) -> None:
        self._register = str(run_dir / "register")
        self._ranks: dict[str, int] = {}  # by pid
        self._ended: AnnouncementFolder | None = None
        self._marker = run_dir / DUMP_FOLDER / AT_EXIT
        if os.path.islink(run_dir / OUTPUT_LINK):
            with contextlib.suppress(OSError):
                self._marker.parent.mkdir(mode=0o700, exist_ok=True)
                write_private_file(self._marker, b"")
                self._ended = AnnouncementFolder(str(self._marker.parent), 4 * MAX_DUMPING_RANKS)
        self._announcements = AnnouncementFolder(self._register, 4 * MAX_DUMPING_RANKS)
        self._folder = folder
        self._proc = proc
        self._expected: dict[str, int] = {}  # path -> time its rank registered

    def take(self, now_ns: int) -> list[Record]:
        """Note where processes that registered since the last call will dump."""
        for name in self._announcements.fresh() or ():
            pid = name.removesuffix(".json")
            rank_count = max(len(self._expected), len(self._ranks))
            if not pid.isdigit() or rank_count >= MAX_DUMPING_RANKS:
                continue
            self._note_rank(pid, name)
            try:
                registered_ns = os.stat(f"{self._register}/{name}").st_mtime_ns
                with open(f"{self._proc}/{pid}/environ", "rb") as environ:
                    path = build_dump_path(environ.read(_MAX_ENVIRON_BYTES))
            except OSError:
                continue
            if path:
                self._expected.setdefault(path, registered_ns)
        return []

    def finish(self, now_ns: int) -> list[Record]:
        """Copy the dumps that exist; one that cannot be read is skipped."""
        with contextlib.suppress(OSError):
            os.unlink(self._marker)
        if self._ended is not None:  # a rank may have ended since the last look
            self._ended.list_again()
            self.look(now_ns)
        for path, registered_ns in self._expected.items():
            with contextlib.suppress(OSError):
                self._copy_dump(path, registered_ns, os.path.basename(path))
        return []

    def look(self, now_ns: int) -> bool:
        """Copy the dumps of ranks that ended, at once: a container ends with its job.

        Returns False: nothing more is awaited.
        """
        names: list[str] | None = None
        with contextlib.suppress(OSError):
            names = None if self._ended is None else self._ended.fresh()
        for name in names or ():
            rank = self._ranks.get(name.removesuffix(_EXIT_DUMP_SUFFIX))
            if rank is not None:
                path = f"{self._marker.parent}/{name}"
                with contextlib.suppress(OSError):
                    self._copy_dump(path, 0, f"{EXIT_DUMP_PREFIX}{rank}.json")
                    os.unlink(path)
        return False

    def _note_rank(self, pid: str, name: str) -> None:
        attributes = parse_registration(read_small_json(f"{self._register}/{name}") or {})
        rank = (attributes or {}).get("rank")
        if isinstance(rank, int):
            self._ranks[pid] = rank

    def _copy_dump(self, path: str, since_ns: int, name: str) -> None:
        content = _read_dump(path, since_ns)
        if content and _read_free_bytes(self._folder) - len(content) > MIN_FREE_BYTES:
            mode = stat.S_IMODE(os.stat(self._folder).st_mode)
            (self._folder / OUTPUT_LINK).mkdir(mode=mode, exist_ok=True)
            write_private_file(self._folder / OUTPUT_LINK / name, content, mode & 0o666)


def build_dump_path(environ: bytes) -> str:
    """Build the path of the dump from a process environment; "" = the process does not dump.

    environ: content of `/proc/<pid>/environ`. RANK=3 and
    TORCH_FR_DUMP_TEMP_FILE=/scratch/trace_ give /scratch/trace_3.
    """
    variables = dict(entry.partition(b"=")[::2] for entry in environ.split(b"\0"))
    prefix = next((variables[name] for name in DUMP_VARIABLES if variables.get(name)), b"")
    rank = variables.get(b"RANK", b"")
    if not prefix.startswith(b"/") or not rank.isdigit():
        return ""
    return os.fsdecode(prefix + rank)


def _read_dump(path: str, since_ns: int) -> bytes:
    """Return the bytes of a dump; empty if it is not ours, not a plain file, old or too large."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        plain = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not plain or status.st_mtime_ns < since_ns or status.st_size > MAX_DUMP_BYTES:
            return b""
        content = file.read(MAX_DUMP_BYTES + 1)
    return content if len(content) <= MAX_DUMP_BYTES else b""


def _read_free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
