"""The ring: where a process leaves its spans for the recorder, without a lock or a system call.

docs/design.md, section 4, has the bytes. The ring is memory of this process (a sealed memfd, so
that nobody can truncate it under us); its space is reserved when it is opened, so that writing to
it can never fail. The first record opens it; a forked child opens one of its own.

Threads: the sequence number comes out of one call into C and the record goes in with another, each
atomic under the interpreter lock; no thread waits for another. On a build without that lock two
threads can, rarely, take the same number: one record is then lost, nothing else happens.
"""

import fcntl
import itertools
import mmap
import os
import sys
from array import array
from time import monotonic_ns
from typing import Any, Callable, Dict, List, Tuple

from . import failed, importer, layout, registration

Emit = Callable[..., int]
Enter = Callable[[int, int, int, int], int]

helper = False
"""True in a data loader's worker and in the children of a rank: they are no rank, and do not
register, whatever launcher variables they inherited."""

when_open: List[Callable[[], None]] = []
"""What begins with the first record of a process."""

after_fork: List[Callable[[], None]] = []
"""What else forgets its state in a forked child."""

_capacity = layout.FIRST_CAPACITY
_may_open: List[bool] = [True]  # pop() of the only element: one thread opens, the others go on
_words: Any = None  # the ring as 8-byte words
_kept: List[Any] = []  # rings of our parents: unmapping would close a number that may be reused
_names: Dict[str, int] = {}
_next_name = itertools.count(layout.FIRST_USER_KIND)


def _emit_off(
    kind: int, start_ns: int, end_ns: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0
) -> int:
    return 0


def _enter_off(a: int, b: int, c: int, d: int) -> int:
    return monotonic_ns()


def _emit_first(
    kind: int, start_ns: int, end_ns: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0
) -> int:
    """Open the ring, then record; a thread that comes while another opens drops its record."""
    return emit(kind, start_ns, end_ns, a, b, c, d) if _opened() else 0


def _enter_first(a: int, b: int, c: int, d: int) -> int:
    return enter(a, b, c, d) if _opened() else monotonic_ns()


def _opened() -> bool:
    """Open the ring; False when another thread is about to."""
    try:
        _may_open.pop()
    except IndexError:
        return False
    try:
        _open()
    except BaseException as error:
        _may_open.append(True)  # if it was a signal's exception, the next record tries again
        failed(error)
    return True


emit: Emit = _emit_first
"""emit(kind, start_ns, end_ns, a=0, b=0, c=0, d=0) -> sequence: record one span, never raise.

Look it up as `ring.emit` at each call: it is another function before the ring is open, after a
fork and when the probe is off.
"""

enter: Enter = _enter_first
"""enter(a, b, c, d) -> now: leave word that a collective operation begins, never raise.

Its span comes when it ends; one that never does is known by this word. The next one overwrites it.
Look it up as `ring.enter` at each call.
"""


def _make_emit(words: memoryview, capacity: int) -> Emit:
    mask = capacity - 1
    pack = layout.RECORD.pack_into
    sequences = itertools.count(1)
    first, size = layout.RECORDS_OFFSET, layout.RECORD_BYTES
    # Looked up rather than computed: four operations on integers cost as much as reading a clock.
    offsets = array("q", [first + (at - 1 & mask) * size for at in range(capacity)])
    written = layout.WRITTEN_OFFSET // 8
    newest = 0

    def emit(
        kind: int, start_ns: int, end_ns: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0
    ) -> int:
        nonlocal newest
        sequence = next(sequences)
        try:
            pack(words, offsets[sequence & mask], sequence, start_ns, end_ns, kind, a, b, c, d)
        except BaseException as error:  # a value that is no 64-bit integer
            words[offsets[sequence & mask] >> 3] = 0  # what there is of the record is none
            failed(error)
        if sequence > newest:  # two threads may come here in the other order
            words[written] = newest = sequence
        return sequence

    return emit


def _make_enter(words: memoryview) -> Enter:
    pack, offset = layout.UNDER_WAY.pack_into, layout.UNDER_WAY_OFFSET

    def enter(a: int, b: int, c: int, d: int) -> int:
        now = monotonic_ns()
        try:
            pack(words, offset, now, a, b, c, d)
        except BaseException as error:
            failed(error)
        return now

    return enter


def is_open() -> bool:
    """Return whether this process has a ring: hooks that alone are no reason to open one ask."""
    return _words is not None


def helps() -> bool:
    """Return whether this process only helps a rank, and holds nobody up by what it does.

    Also one that multiprocessing ends with its parent: launchers start no rank so.
    """
    processes = sys.modules.get("multiprocessing.process")
    return helper or (processes is not None and bool(processes.current_process().daemon))


def switch_off() -> None:
    """Record nothing from now on, and leave word in the ring that this was our own decision."""
    global emit, enter
    emit = _emit_off
    enter = _enter_off
    if _words is not None:
        _words[layout.SWITCHED_OFF_OFFSET // 8] = 1


def kind_of(name: str) -> int:
    """Return the kind of the user's span `name`, giving it one if it has none; -1 = no room."""
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


def _write_name(words: memoryview, name: str, kind: int) -> None:
    text = name.encode("utf-8", "replace")[: layout.NAME_BYTES]
    text = text.decode("utf-8", "ignore").encode("utf-8")  # a character cut in two leaves whole
    offset = layout.NAMES_OFFSET + (kind - layout.FIRST_USER_KIND) * layout.NAME_BYTES
    words.cast("B")[offset : offset + len(text)] = text


def _open() -> None:
    """Make the ring of this process, announce it, and from now on write to it."""
    global emit, enter, _words
    problem = ""
    try:
        if sys.byteorder != "little":
            raise OSError("a big-endian machine")
        size = layout.RECORDS_OFFSET + _capacity * layout.RECORD_BYTES
        ticks = registration.started_ticks()
        fd, path = _reserve(size, registration.path_of_ring())
        memory = mmap.mmap(fd, size)
        layout.HEADER.pack_into(
            memory, 0, layout.MAGIC, layout.RECORD_BYTES, _capacity, os.getpid(),
            layout.NAMES_CAPACITY, ticks, 0, 0,
        )  # fmt: skip
        words = memoryview(memory).cast("Q")
        for name, kind in list(_names.items()):
            _write_name(words, name, kind)
        registration.announce_ring(fd, path, size, ticks)
        if path:
            os.close(fd)
        _words = words
        emit = _make_emit(words, _capacity)
        enter = _make_enter(words)
    except (OSError, AttributeError, ValueError) as error:
        emit = _emit_off  # no memory to be had here: the job goes on, unmarked
        enter = _enter_off
        problem = "no ring: %s" % error
    registration.register(problem)
    if _words is not None:
        _begin()


def _begin() -> None:
    """Say which hooks stand, and let others begin what they do only beside a ring."""
    now = monotonic_ns()
    for number, hooked in importer.notes:
        emit(layout.HOOK_NOTE, now, now, number, hooked)
    for begin in when_open:
        begin()


def _reserve(size: int, path: str) -> Tuple[int, str]:
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


def _after_fork_in_child() -> None:
    global emit, enter, helper, _words, _capacity
    try:
        helper = helper or _words is not None
        if emit is not _emit_off:
            emit = _emit_first
            enter = _enter_first
        _kept.append(_words)
        _words = None
        _capacity = layout.FORKED_CAPACITY
        _may_open[:] = [True]
        for forget in after_fork:
            forget()
    except BaseException as error:
        failed(error)


os.register_at_fork(after_in_child=_after_fork_in_child)
