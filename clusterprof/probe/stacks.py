"""Python stacks of the thread that trains, or of the thread of a worker that fetches.

A thread of the probe (`interpreter_lock.py`) wakes some twenty times a second and takes the frames
of the other thread by `sys._current_frames()`. A stack becomes a number: files, functions, places
(a line of a function) and stacks (the caller's stack and a place) are numbered as they are first
seen, and each new one is appended to the log behind the ring's records. Only paths, names and line
numbers are read, never a variable.

The tables are bounded: a stack without room gets the number 0 and is counted. Frames are let go
before anything gives the interpreter lock away, so that no object of the job lives longer.
"""

import opcode
import os
import sys
from _thread import get_ident, get_native_id
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import layout, ring

MAX_PLACES = 4096
MAX_OTHERS = 8
"""Number of other threads that are sampled after a wait for the lock."""
_WAITING_FILES = ("threading.py", "queue.py", "queues.py", "selectors.py", "connection.py")
MAX_STACKS, MAX_FORKED_STACKS = 8192, 4096
"""Numbers in the table of a first process, and of a forked one."""
LATE_NS = 300_000
"""A sample this much later than due waited for the interpreter lock."""
FIRST_CPU_NS = 100_000.0
"""CPU time of a sample before it is measured."""
REPORT_NS = 60_000_000_000
FIRST_REPORT_NS = 10_000_000_000
"""Time between two reports about the sampler itself, and to the first of them."""
FULL_PATHS, HASHED_PATHS, BASE_NAMES = 0, 1, 2
"""Values of `stack_paths` in the probe's configuration."""
_OWN, _NO_ROOM = -1, -2
_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STATE_BYTES = 64  # of /proc/self/task/<tid>/stat: number, name and state fit

_QUICK_NAMES = (
    *("LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_METHOD"),
    *("LOAD_SMALL_INT", "PUSH_NULL", "PRECALL", "KW_NAMES", "EXTENDED_ARG", "COPY", "SWAP"),
    *("CACHE", "NOP", "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST"),  # 3.12, 3.13
    *("LOAD_FAST_BORROW", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"),  # 3.14
)
_CACHE, _RESUME = opcode.opmap.get("CACHE", -1), opcode.opmap.get("RESUME", -1)
"""Before Python 3.11 nothing shows that a function has just been entered."""
_QUICK = frozenset(opcode.opmap[name] for name in _QUICK_NAMES if name in opcode.opmap)

_probe: Any = sys.modules[__name__.rpartition(".")[0]]

on_first_fetch: List[Callable[[], None]] = []
"""Callbacks run when a worker fetches for the first time."""

_fetch_thread: Tuple[int, int] = (0, 0)
_has_fetched = False


def note_fetch() -> None:
    """Note that this thread builds a batch; the first time in a worker, sampling begins."""
    global _fetch_thread, _has_fetched
    if _has_fetched:
        return
    _has_fetched = True
    if ring.is_helper():
        _fetch_thread = get_ident(), get_native_id()
        for callback in on_first_fetch:
            callback()


def is_enabled() -> bool:
    """Return whether stacks shall be sampled, and can be in this interpreter.

    Without the interpreter lock a thread runs on while its frames are read: not safe.
    """
    has_lock = getattr(sys, "_is_gil_enabled", None)
    return bool(_probe.config.get("stacks")) and (has_lock is None or bool(has_lock()))


def find_sampled_thread() -> Tuple[int, int]:
    """Return the number in Python and in the kernel of the thread to sample."""
    if _fetch_thread[0]:
        return _fetch_thread
    thread: Tuple[int, int] = _probe._annotations.training_thread
    return thread if thread[0] else _probe.main_thread


class StackTable:
    """Numbers for stacks, and their definitions in the log."""

    def __init__(self, append: Callable[[bytes], bool], max_stacks: int, paths: int) -> None:
        """append: writes an entry, False = no room. paths: how files are named."""
        self._append = append
        self._max_stacks = max_stacks
        self._format_path = _PATH_FORMATS.get(paths, _cut_path)
        self._files: Dict[str, int] = {}
        self._functions: Dict[Tuple[int, int, str], int] = {}
        self._places: Dict[Tuple[int, int], int] = {}
        self._stacks: Dict[int, int] = {}
        # Instruction -> place. Codes are kept so that no other code gets the same id.
        self._instructions: Dict[Tuple[int, int], int] = {}
        self._codes: Dict[int, CodeType] = {}
        self._places_before: Dict[Tuple[int, int], int] = {}
        self._codes_before: List[CodeType] = []

    def number_stack(self, frame: Optional[FrameType]) -> int:
        """Return the number of the stack that ends in a frame, 0 = the table is full.

        A thread that has just entered a function gave the interpreter lock away there. It was in
        the code before that call when it was asked to.
        """
        places: List[int] = []
        get_number = self._instructions.get
        if frame is not None and frame.f_back is not None and _is_entry(frame):
            frame = frame.f_back
            before = self._number_place_before(frame)
            if before == _NO_ROOM:
                return 0
            if before >= 0:
                places.append(before)
                frame = frame.f_back
        while frame is not None:
            code = frame.f_code
            place_number = get_number((id(code), frame.f_lasti))
            if place_number is None:
                place_number = self._number_instruction(code, frame)
            if place_number >= 0:
                places.append(place_number)
                if len(places) == layout.MAX_FRAMES:
                    break
            elif place_number == _NO_ROOM:
                return 0
            frame = frame.f_back
        places.reverse()
        stack, stacks = 0, self._stacks
        for place_number in places:
            key = stack * MAX_PLACES + place_number
            number = stacks.get(key)
            if number is None:
                number = len(stacks) + 1
                entry = layout.STACK_ENTRY.pack(layout.STACK_TAG, stack, place_number)
                if number > self._max_stacks or not self._append(entry):
                    return 0
                stacks[key] = number
            stack = number
        return stack

    def _number_instruction(self, code: CodeType, frame: FrameType) -> int:
        if code.co_filename.startswith(_OWN_FOLDER):
            place_number = _OWN
        else:
            place_number = self._number_place(code, frame.f_lineno or code.co_firstlineno)
            if place_number == _NO_ROOM:
                return place_number
        if len(self._instructions) >= MAX_PLACES:
            self._instructions.clear()
            self._codes.clear()
        self._codes[id(code)] = code
        self._instructions[id(code), frame.f_lasti] = place_number
        return place_number

    def _number_place_before(self, frame: FrameType) -> int:
        """Number the code that ran in a frame before its present call; _OWN = none did."""
        code, instruction = frame.f_code, frame.f_lasti
        place_number = self._places_before.get((id(code), instruction))
        if place_number is None:
            is_own = code.co_filename.startswith(_OWN_FOLDER)
            line = 0 if is_own else _find_line_before(code, instruction)
            place_number = self._number_place(code, line) if line else _OWN
            if len(self._places_before) < MAX_PLACES:
                self._codes_before.append(code)
                self._places_before[id(code), instruction] = place_number
        return place_number

    def _number_place(self, code: CodeType, line: int) -> int:
        function = self._number_function(code)
        place_number = self._places.get((function, line))
        if place_number is None and function >= 0:
            entry = layout.PLACE_ENTRY.pack(layout.PLACE_TAG, function, line)
            if len(self._places) < MAX_PLACES and self._append(entry):
                place_number = self._places[function, line] = len(self._places)
        return _NO_ROOM if place_number is None else place_number

    def _number_function(self, code: CodeType) -> int:
        file = self._number_file(code.co_filename)
        name = getattr(code, "co_qualname", code.co_name)
        key = file, code.co_firstlineno, name
        function = self._functions.get(key)
        if function is None and file >= 0:
            text = name[: layout.MAX_NAME_CHARACTERS].encode("utf-8", "replace")
            entry = layout.FUNCTION_ENTRY.pack(layout.FUNCTION_TAG, *key[:2], len(text)) + text
            if self._append(entry):
                function = self._functions[key] = len(self._functions)
        return _NO_ROOM if function is None else function

    def _number_file(self, path: str) -> int:
        file = self._files.get(path)
        if file is None:
            text = self._format_path(path).encode("utf-8", "replace")
            if self._append(layout.FILE_ENTRY.pack(layout.FILE_TAG, len(text)) + text):
                file = self._files[path] = len(self._files)
        return _NO_ROOM if file is None else file


class Sampler:
    """Takes stack samples of a thread, and records them and their cost."""

    def __init__(self) -> None:
        self.own_cpu_ns = 0
        """CPU time of the sampling thread since the last report."""
        self.started_ns = monotonic_ns()
        self.all_cpu_ns = 0
        """CPU time of the sampling thread since then."""
        self.mean_cpu_ns = FIRST_CPU_NS
        """CPU time of the thread per sample, averaged over the last samples."""
        self.mean_held_ns = 0.0
        """Part of it in which a sample kept the lock from the job."""
        self.interval_ns = 0
        """Time for which the last sample stands."""
        self._table: Optional[StackTable] = None
        self._samples = self._unreadable = self._overflowed = 0
        self._reported_ns = self._report_due_ns = 0
        self._taken_ns = 0
        self._stack = 0
        self._thread = (0, 0)
        self._state_file = -1
        self._waits = False

    def take(self) -> int:
        """Take the frames now, and return when, ns; 0 = none, or there is no ring to write to.

        Nothing in here gives the interpreter lock away.
        """
        table = self._table
        if table is None:
            table = self._table = make_table()
            if table is None:
                return 0
        now_ns = monotonic_ns()
        thread = find_sampled_thread()
        if thread != self._thread:
            self.close()
            self._thread = thread
        frame = sys._current_frames().get(thread[0])
        self._waits = False
        if frame is None:
            self._stack = 0
            self._unreadable += 1
            return now_ns
        self._waits = frame.f_code.co_filename.endswith(_WAITING_FILES)
        self._stack = table.number_stack(frame)
        del frame
        if not self._stack:
            self._overflowed += 1
        return now_ns

    def take_others(self) -> List[Tuple[int, int]]:
        """Return number and stack of each other thread that does not wait for work.

        One of them kept the lock, or makes what the sampled thread waits for. The number is that in
        the kernel, else 1. Nothing in here gives the interpreter lock away.
        """
        table = self._table
        if table is None:
            return []
        own_thread = get_ident()
        threads = getattr(sys.modules.get("threading"), "_active", {})
        stacks: List[Tuple[int, int]] = []
        for thread, frame in sys._current_frames().items():
            is_other = thread != own_thread and thread != self._thread[0]
            if is_other and not frame.f_code.co_filename.endswith(_WAITING_FILES):
                number = getattr(threads.get(thread), "native_id", None)
                stacks.append((number or 1, table.number_stack(frame)))
                if len(stacks) == MAX_OTHERS:
                    break
        return stacks

    def waits_for_others(self) -> bool:
        """Return whether the thread sampled last waited for another one, in a queue or an event."""
        return self._waits

    def record_others(
        self, stacks: List[Tuple[int, int]], due_ns: int, taken_ns: int, length_ns: int
    ) -> None:
        """Record the stacks of other threads, each for an equal part of some time."""
        for number, stack in stacks:
            part_ns = length_ns // len(stacks)
            ring.emit(layout.STACK_SAMPLE, due_ns, taken_ns, stack, part_ns, number, 0)

    def record(self, due_ns: int, taken_ns: int, interval_ns: int) -> None:
        """Record the sample that was taken last, and how its thread is now.

        due_ns: when it was due. interval_ns: time for which it stands when it is the first.
        """
        if self._taken_ns:
            interval_ns = taken_ns - self._taken_ns
        else:
            self._reported_ns = taken_ns
            self._report_due_ns = taken_ns + FIRST_REPORT_NS
        self._taken_ns = taken_ns
        self.interval_ns = interval_ns
        self._samples += 1
        due_ns = min(due_ns, taken_ns)
        # A late sample came when its thread gave the lock away: it ran Python before.
        state = self._read_state() if taken_ns - due_ns < LATE_NS else 0
        ring.emit(layout.STACK_SAMPLE, due_ns, taken_ns, self._stack, interval_ns, 0, state)
        if taken_ns >= self._report_due_ns:
            self.report(taken_ns)

    def report(self, now_ns: int) -> None:
        """Record the number of samples since the last report, and their cost."""
        if not self._samples:
            return
        counts = self._samples, self.own_cpu_ns, self._unreadable, self._overflowed
        ring.emit(layout.STACK_SAMPLER, self._reported_ns, now_ns, *counts)
        self._samples = self.own_cpu_ns = self._unreadable = self._overflowed = 0
        self._reported_ns = now_ns
        self._report_due_ns = now_ns + REPORT_NS

    def _read_state(self) -> int:
        """Read the letter of the thread's state, 0 = not known; gives the interpreter lock away."""
        try:
            if self._state_file < 0:
                path = "/proc/self/task/%d/stat" % self._thread[1]
                self._state_file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            line = os.pread(self._state_file, _STATE_BYTES, 0)
            return line[line.rindex(b")") + 2]
        except (OSError, ValueError, IndexError):
            return 0

    def close(self) -> None:
        """Close the file of the thread's state; the next sample opens it again."""
        if self._state_file >= 0:
            os.close(self._state_file)
            self._state_file = -1


def _is_entry(frame: FrameType) -> bool:
    """Return whether a function has just been entered, or a generator gone on."""
    instruction = frame.f_lasti
    return instruction >= 0 and frame.f_code.co_code[instruction] == _RESUME


def _find_line_before(code: CodeType, instruction: int) -> int:
    """Find the line of the last instruction before a call that may have taken time; 0 = none.

    instruction: offset of the call. Instructions that only fetch what is called take none.
    """
    instructions = code.co_code
    while instruction > 0 and instructions[instruction] == _CACHE:
        instruction -= 2
    instruction -= 2
    while instruction >= 0 and instructions[instruction] in _QUICK:
        instruction -= 2
    if instruction < 0 or instructions[instruction] == _RESUME:
        return 0
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return next(lines, None) or 0


def make_table() -> Optional[StackTable]:
    """Return an empty table that writes to the log of this process; None = there is no log."""
    append = ring.make_log_writer()
    if append is None:
        return None
    max_stacks = MAX_FORKED_STACKS if ring.is_helper() else MAX_STACKS
    return StackTable(append, max_stacks, _probe.config.get("stack_paths", FULL_PATHS))


def _cut_path(path: str) -> str:
    return path[-layout.MAX_PATH_CHARACTERS :]


def _hash_path(path: str) -> str:
    """Return 16 hex digits of the path and its suffix; names such as `<string>` stay."""
    if path.startswith("<"):
        return _cut_path(path)
    from _blake2 import blake2b

    digest = blake2b(path.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return digest + os.path.splitext(path)[1][:16]


def _get_base_name(path: str) -> str:
    return _cut_path(path if path.startswith("<") else os.path.basename(path))


_PATH_FORMATS = {FULL_PATHS: _cut_path, HASHED_PATHS: _hash_path, BASE_NAMES: _get_base_name}


def _forget() -> None:
    global _fetch_thread, _has_fetched
    _fetch_thread = (0, 0)
    _has_fetched = False
    _probe.main_thread = get_ident(), get_native_id()


ring.after_fork.append(_forget)
