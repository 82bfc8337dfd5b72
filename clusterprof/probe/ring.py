"""The ring into which a process writes its spans for the recorder, without locks or system calls.

docs/design/recording-format.md, specifies the bytes. The ring is memory of this process (a
sealed memfd, so that no process can truncate it); its space is reserved when it is
opened, so that writing can never fail. The first record opens it; a forked child opens
a ring of its own.

Threads: one C call gives the sequence number and another writes the record, each atomic
under the interpreter lock; no thread waits for another. On a build without that lock
two threads can, rarely, get one number: one record is then lost, with no other effect.

Files by which a process announces its ring, its rank, its device and its process groups.

Small JSON files in the run directory (docs/design/recording-format.md), each written under a
temporary name and renamed, so that a reader never sees a partial file.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import mmap
import os
import sys
from array import array
from time import monotonic_ns
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from . import handle_error, import_hooks, layout

_device = ""
_problem = ""


def _get_run_dir() -> str:
    from . import run_dir

    return run_dir


def _get_config() -> Dict[str, Any]:
    from . import config

    return config


def build_ring_path() -> str:
    """Build the path of this process's ring, used when the ring has to be a file."""
    return "%s/rings/%d.0.ring" % (_get_run_dir(), os.getpid())


def read_start_ticks() -> int:
    """Read when this process started, in clock ticks since boot (/proc/self/stat, field 22)."""
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def register_ring(fd: int, path: str, size: int, ticks: int) -> None:
    """Write which descriptor of this process, or which file, is its ring.

    size: bytes of the ring. ticks: start time of this process, in clock ticks since boot.
    Raises: OSError when the file cannot be written.
    """
    content = {
        "pid": os.getpid(),
        "started_ticks": ticks,
        "fd": None if path else fd,
        "path": path or None,
        "bytes": size,
    }
    _write_announcement("rings", "%d.0" % os.getpid(), content)


def register_process(problem: str = "") -> None:
    """Register this process as one of the job, unless it is a helper of a rank.

    Best effort: when the run directory is full or gone only the registration is lost, not
    the spans.
    """
    global _problem

    _problem = problem or _problem
    if helper:
        return
    max_characters = layout.VALUE_CHARACTERS
    variables = {
        name: os.environ[name][:max_characters] for name in layout.VARIABLES if name in os.environ
    }
    content: Dict[str, Any] = {
        "pid": os.getpid(),
        "started_ticks": read_start_ticks(),
        "role": "python",
        "variables": variables,
        "device": _device or _format_emulated_device(variables.get("CLUSTERPROF_EMULATED", "")),
        "node_local_rank": _find_node_local_rank(variables),
    }
    frameworks = _list_frameworks()
    if frameworks:
        content["frameworks"] = frameworks
    if _problem:
        content["problem"] = _problem
    try:
        _write_announcement("register", str(os.getpid()), content)
    except OSError:
        pass


def register_group(group: int, ranks: Sequence[int]) -> None:
    """Write the global ranks of a process group of the job; best effort as for a registration."""

    if helper:
        return
    pid = os.getpid()
    try:
        _write_announcement(
            "groups", "%d.%d" % (pid, group), {"pid": pid, "group": group, "ranks": ranks}
        )
    except OSError:
        pass


def set_device(device: str) -> None:
    """Register again with the device of this process ("GPU-…"), now that it is known."""
    global _device

    _device = device
    if is_open():
        register_process()


def _list_frameworks() -> str:
    """Return the frameworks imported so far, as "torch 2.13.0, jax 0.10.2"."""
    versions = []
    for name in ("torch", "jax", "tensorflow"):
        version = getattr(sys.modules.get(name), "__version__", "")
        if isinstance(version, str) and version:
            versions.append("%s %s" % (name, str.__str__(version)[:32]))
    return ", ".join(versions)


def _format_emulated_device(value: str) -> str:
    return "emulated-" + value if value.isdigit() else value if "emulated-" in value else ""


def _find_node_local_rank(variables: Dict[str, str]) -> Optional[int]:
    for name in layout.NODE_LOCAL_RANK_VARIABLES:
        if variables.get(name, "").isdigit():
            return int(variables[name])
    return None


def _write_announcement(folder: str, stem: str, content: Dict[str, Any]) -> None:
    path = "%s/%s/%s.json" % (_get_run_dir(), folder, stem)
    temporary = "%s.%d.tmp" % (path, os.getpid())
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o600)
    try:
        os.write(fd, json.dumps(content).encode())
    finally:
        os.close(fd)
    os.replace(temporary, path)


Emit = Callable[..., int]
Enter = Callable[[int, int, int, int], int]

helper = False
"""True in workers of a data loader and in children of a rank.

They are not ranks and do not register, whatever launcher variables they inherited.
"""

on_open: List[Callable[[], None]] = []
"""Callbacks run with the first record of a process."""

after_fork: List[Callable[[], None]] = []
"""Callbacks that clear the state of other modules in a forked child."""

_capacity = layout.FIRST_CAPACITY
_log_bytes = layout.FIRST_LOG_BYTES
_may_open: List[bool] = [True]  # pop() of the only element: only one thread opens the ring
_words: Any = None  # the ring as 8-byte words
_parent_rings: List[
    Any
] = []  # of parents: unmapping would close a descriptor number that may be reused
_names: Dict[str, int] = {}
_next_name = itertools.count(layout.FIRST_USER_KIND)


def _skip_emit(
    kind: int, start_ns: int, end_ns: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0
) -> int:
    return 0


def _skip_enter(a: int, b: int, c: int, d: int) -> int:
    return monotonic_ns()


def _open_and_emit(
    kind: int, start_ns: int, end_ns: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0
) -> int:
    """Open the ring, then record; while another thread opens it the record is dropped."""
    return emit(kind, start_ns, end_ns, a, b, c, d) if _open_once() else 0


def _open_and_enter(a: int, b: int, c: int, d: int) -> int:
    return enter(a, b, c, d) if _open_once() else monotonic_ns()


def _open_once() -> bool:
    """Open the ring; return False when another thread is opening it."""
    try:
        _may_open.pop()
    except IndexError:
        return False
    try:
        _open_ring()
    except BaseException as error:
        _may_open.append(True)  # if a signal raised the exception, the next record tries again
        handle_error(error)
    return True


emit: Emit = _open_and_emit
"""emit(kind, start_ns, end_ns, a=0, b=0, c=0, d=0) -> sequence: record one span.

Never raises. Look it up as `ring.emit` at each call: it is replaced when the ring
opens, after a fork and when the probe is switched off.
"""

enter: Enter = _open_and_enter
"""enter(a, b, c, d) -> now: note that a collective operation begins, never raise.

Its span is written when it ends; for one that never ends this note is the only trace.
The next operation overwrites it. Look it up as `ring.enter` at each call.
"""


def _make_emit(words: memoryview, capacity: int) -> Emit:
    mask = capacity - 1
    pack = layout.RECORD.pack_into
    sequences = itertools.count(1)
    first, size = layout.RECORDS_OFFSET, layout.RECORD_BYTES
    # A table instead of computation: four integer operations cost as much as reading a clock.
    offsets = array("q", [first + (slot - 1 & mask) * size for slot in range(capacity)])
    written = layout.WRITTEN_OFFSET // 8
    newest = 0

    def emit(
        kind: int, start_ns: int, end_ns: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0
    ) -> int:
        nonlocal newest
        sequence = next(sequences)
        try:
            pack(words, offsets[sequence & mask], sequence, start_ns, end_ns, kind, a, b, c, d)
        except BaseException as error:  # a value is no 64-bit integer
            words[offsets[sequence & mask] >> 3] = 0  # mark the incomplete record as invalid
            handle_error(error)
        if sequence > newest:  # two threads may arrive here in reverse order
            words[written] = newest = sequence
        return sequence

    return emit


def _make_enter(words: memoryview) -> Enter:
    pack, offset = layout.UNDER_WAY.pack_into, layout.UNDER_WAY_OFFSET

    def enter(a: int, b: int, c: int, d: int) -> int:
        now_ns = monotonic_ns()
        try:
            pack(words, offset, now_ns, a, b, c, d)
        except BaseException as error:
            handle_error(error)
        return now_ns

    return enter


def is_open() -> bool:
    """Return whether this process has a ring; hooks that must not open one check this first."""
    return _words is not None


def is_helper() -> bool:
    """Return whether this process only helps a rank, so that the rank does not wait for it.

    True also for daemon processes of multiprocessing: launchers never start ranks like
    that.
    """
    processes = sys.modules.get("multiprocessing.process")
    return helper or (processes is not None and bool(processes.current_process().daemon))


def stop_recording() -> None:
    """Stop recording, and mark in the ring that the probe disabled itself."""
    global emit, enter
    emit = _skip_emit
    enter = _skip_enter
    if _words is not None:
        _words[layout.SWITCHED_OFF_OFFSET // 8] = 1


def assign_kind(name: str) -> int:
    """Return the kind of the user's span `name`, assigning one if it is new; -1 = no space."""
    kind = _names.get(name)
    if kind is None:
        if len(_names) >= layout.NAMES_CAPACITY:
            return -1
        kind = _names.setdefault(name, next(_next_name))
        if kind >= layout.FIRST_USER_KIND + layout.NAMES_CAPACITY:
            return -1
        if _words is not None:
            _write_name(_words, name, kind)
    return kind


def make_log_writer() -> Optional[Callable[[bytes], bool]]:
    """Return a function that appends an entry to the log of definitions behind the records.

    It returns False when the log is full. Only a single thread may call it. None = the ring is not
    open or has no log.
    """
    words = _words
    size = words[layout.LOG_BYTES_OFFSET // 8] if words is not None else 0
    if not size:
        return None
    data = words.cast("B")
    first, written = len(data) - size, layout.LOG_WRITTEN_OFFSET // 8

    def append(entry: bytes) -> bool:
        begin = words[written]
        end = begin + len(entry)
        if end > size:
            return False
        data[first + begin : first + end] = entry
        words[written] = end
        return True

    return append


def _write_name(words: memoryview, name: str, kind: int) -> None:
    text = name.encode("utf-8", "replace")[: layout.NAME_BYTES]
    text = text.decode("utf-8", "ignore").encode("utf-8")  # a character cut in half is dropped
    offset = layout.NAMES_OFFSET + (kind - layout.FIRST_USER_KIND) * layout.NAME_BYTES
    words.cast("B")[offset : offset + len(text)] = text


def _open_ring() -> None:
    """Create the ring of this process, announce it, and switch `emit` and `enter` to it."""
    global emit, enter, _words
    problem = ""
    try:
        if sys.byteorder != "little":
            raise OSError("a big-endian machine")
        log_bytes = _log_bytes if _get_config().get("stacks") else 0
        size = layout.RECORDS_OFFSET + _capacity * layout.RECORD_BYTES + log_bytes
        ticks = read_start_ticks()
        fd, path = _allocate_memory(size, build_ring_path())
        memory = mmap.mmap(fd, size)
        layout.HEADER.pack_into(
            memory,
            0,
            layout.MAGIC,
            layout.RECORD_BYTES,
            _capacity,
            os.getpid(),
            layout.NAMES_CAPACITY,
            ticks,
            0,
            0,
        )
        words = memoryview(memory).cast("Q")
        words[layout.LOG_BYTES_OFFSET // 8] = log_bytes
        for name, kind in list(_names.items()):
            _write_name(words, name, kind)
        register_ring(fd, path, size, ticks)
        if path:
            os.close(fd)
        _words = words
        emit = _make_emit(words, _capacity)
        enter = _make_enter(words)
    except (OSError, AttributeError, ValueError) as error:
        emit = _skip_emit  # no memory available: the job continues without spans
        enter = _skip_enter
        problem = "no ring: %s" % error
    register_process(problem)
    if _words is not None:
        _begin_recording()


def _begin_recording() -> None:
    """Record which hooks are installed, and run the callbacks that need an open ring."""
    now_ns = monotonic_ns()
    for number, hooked in import_hooks.notes:
        emit(layout.HOOK_NOTE, now_ns, now_ns, number, hooked)
    for callback in on_open:
        callback()


def _allocate_memory(size: int, path: str) -> Tuple[int, str]:
    """Return a descriptor of `size` reserved bytes, and its path when it is a file."""
    try:
        fd = os.memfd_create("clusterprof-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError):  # seccomp, gVisor; a Python built for an old libc
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
    else:
        path = ""
    try:
        os.posix_fallocate(fd, 0, size)
        if not path:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        if path:
            os.unlink(path)
        raise
    return fd, path


def _clear_after_fork() -> None:
    global emit, enter, helper, _words, _capacity, _log_bytes
    try:
        helper = helper or _words is not None
        if emit is not _skip_emit:
            emit = _open_and_emit
            enter = _open_and_enter
        _parent_rings.append(_words)
        _words = None
        _capacity = layout.FORKED_CAPACITY
        _log_bytes = layout.FORKED_LOG_BYTES
        _may_open[:] = [True]
        for callback in after_fork:
            callback()
    except BaseException as error:
        handle_error(error)


os.register_at_fork(after_in_child=_clear_after_fork)
