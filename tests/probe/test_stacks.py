"""Sampled stacks of the thread that trains: what is recorded, its bounds, and forks meanwhile."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import FunctionType

import pytest

from clusterprof.probe import stacks
from tests.support.job_python import skip_free_threaded
from tests.support.probe_jobs import (
    STACK_SAMPLE,
    STACK_SAMPLER,
    Ring,
    install_probe,
    list_stacks,
    record_code,
    select_long_values,
)

HEAD = """
import os, sys, time
import _clusterprof_probe as probe
probe.emit(64, 1, 2)
"""
TAKE = """
import _clusterprof_probe.interpreter_lock as watch
watch.stop()
def take():
    done = probe.make_lock(); done.acquire()
    probe.start_thread(take_from_thread, (done,))
    done.acquire()
def take_from_thread(done):
    sampler = watch._samplers[0]
    now = sampler.take()
    sampler.record(now, now, 50_000_000)
    done.release()
"""
"""A sample of the main thread in `take`, so that a test needs not wait for the thread."""


needs_lock = skip_free_threaded()
needs_resume = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python before 3.11 has no instruction for an entry"
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return install_probe(tmp_path / "run", stacks="full")


def only_stack(rings: list[Ring]) -> list[tuple[str, str, int, int]]:
    (ring,) = rings
    (sample,) = ring.of(STACK_SAMPLE)
    return list_stacks(ring.log)[sample.a]


@needs_lock
def test_samples_name_the_line_that_sleeps(run_dir: Path) -> None:
    code = HEAD + "def pause():\n    time.sleep(1.5)\npause()"
    (ring,) = record_code(code, run_dir)
    named = list_stacks(ring.log)
    samples = [span for span in ring.of(STACK_SAMPLE) if len(named[span.a]) > 1]
    assert len(samples) >= 3
    # HEAD has 4 lines, the first of them empty: `def pause` is in line 5
    (stack,) = {tuple(named[span.a]) for span in samples}
    assert [(frame[0], frame[1], frame[3]) for frame in stack] == [
        ("<string>", "<module>", 7),
        ("<string>", "pause", 6),
    ]
    assert stack[1][2] == 5
    # The first and the last may find it on its way into the sleep or out of it.
    inner = [span for span in samples[1:-1] if span.end_ns - span.start_ns < 300_000]
    assert {chr(span.d) for span in inner} <= {"S"}
    for before, span in itertools.pairwise(samples):
        assert span.b == span.end_ns - before.end_ns
        assert span.c == 0


@needs_lock
def test_the_thread_that_ends_steps_is_sampled(run_dir: Path) -> None:
    code = HEAD + (
        "import threading\n"
        "def train():\n"
        "    probe.step(); probe.step()\n"
        "    time.sleep(1)\n"
        "thread = threading.Thread(target=train); thread.start(); thread.join()"
    )
    (ring,) = record_code(code, run_dir)
    named = list_stacks(ring.log)
    assert "train" in [named[span.a][-1][1] for span in ring.of(STACK_SAMPLE)]


@needs_lock
def test_the_stack_sampler_reports_its_cost_at_exit(run_dir: Path) -> None:
    code = HEAD + (
        "time.sleep(0.6)\n"
        "import _clusterprof_probe.interpreter_lock as watch\n"
        "watch._stop_at_exit()"
    )
    (ring,) = record_code(code, run_dir)
    (report,) = ring.of(STACK_SAMPLER)
    assert report.a == len(ring.of(STACK_SAMPLE)) >= 1
    assert report.b > 0
    assert (report.c, report.d) == (0, 0)


def test_disabled_stack_sampling_writes_no_log_or_samples(tmp_path: Path) -> None:
    run_dir = install_probe(tmp_path / "run", stacks=None)
    (ring,) = record_code(HEAD + "time.sleep(0.4)", run_dir)
    assert (ring.of(STACK_SAMPLE), ring.log) == ([], b"")


@pytest.mark.parametrize(
    ("paths", "name"),
    # BLAKE2b of "/job/train.py", 8 bytes
    [("full", "/job/train.py"), ("hash", "0410782d50d39946.py"), ("names", "train.py")],
)
def test_stack_file_names_follow_the_configuration(
    tmp_path: Path, paths: object, name: str
) -> None:
    run_dir = install_probe(tmp_path / "run", stacks=paths)  # type: ignore[arg-type]
    code = HEAD + TAKE + "exec(compile('take()', '/job/train.py', 'exec'))"
    assert [frame[0] for frame in only_stack(record_code(code, run_dir))] == [
        "<string>",
        name,
        "<string>",
    ]


def test_probe_frames_are_left_out(run_dir: Path) -> None:
    code = HEAD + TAKE + "take()"
    assert [frame[1] for frame in only_stack(record_code(code, run_dir))] == ["<module>", "take"]


@needs_lock
@needs_resume
def test_c_code_before_a_call_is_attributed_to_its_line(run_dir: Path) -> None:
    # Searching the list keeps the interpreter lock for some ms. It is given away where `step` is
    # entered, which does nothing.
    code = """
    def step(value=None): pass
    def work():
        until = time.monotonic() + 2
        while time.monotonic() < until:
            contains = -1 in numbers
            step()
    numbers = list(range(400_000))
    work()
    """
    (ring,) = record_code(HEAD + textwrap.dedent(code), run_dir)
    named = list_stacks(ring.log)
    samples = [span for span in ring.of(STACK_SAMPLE) if named[span.a]]
    ends = Counter(named[span.a][-1][1:4:2] for span in samples)
    line = HEAD.count("\n") + 6
    assert ends["work", line] > 5
    assert [end for end in ends if end[0] == "step"] == []


class _CallAtExit:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        _note_line_before()


_noted: list[int] = []


def _note_line_before(*_: object) -> None:
    """Note how many lines before the caller's call its last instruction that takes time is."""
    caller = sys._getframe(2)
    line = stacks._find_line_before(caller.f_code, caller.f_lasti)
    _noted.append(line and line - caller.f_code.co_firstlineno)


def _call(value: object = None, second: object = None) -> None:
    _note_line_before()


def _call_at_once(value: object = None) -> None:
    _call(value)


def _run_calls(numbers: list[int]) -> None:
    with _CallAtExit():
        length = -1 in numbers
    _call()
    _call(numbers)
    _call(length in numbers)
    _call_at_once(1)
    _call(numbers, length)


@needs_resume
def test_the_line_before_a_call_is_the_last_costly_line() -> None:
    # In the block, at the end of `with`, the call before (its result is let go), the argument,
    # nothing (a function that calls at once), that call.
    _noted.clear()
    _run_calls([1, 2])
    assert _noted == [2, 1, 3, 5, 0, 6]


@needs_resume
def test_a_probe_wrapper_is_not_the_line_before_a_call(run_dir: Path) -> None:
    # The function is entered from the probe's own file, after code that may take time.
    code = """
    import _clusterprof_probe.stacks as stacks
    source = "def wrap(numbers):\\n    -1 in numbers\\n    return enter(numbers)"
    scope = {"enter": None}
    exec(compile(source, stacks._OWN_FOLDER + "hook.py", "exec"), scope)
    def step(): return scope["wrap"]([1])
    def enter(numbers):
        take_entered()
    def take_entered():
        frame = sys._getframe(1)
        table = stacks.make_table()
        stacks._is_entry = lambda frame: frame.f_code.co_name == "enter"
        ring.emit(layout.STACK_SAMPLE, 1, 2, table.number_stack(frame), 0, 0, 0)
    from _clusterprof_probe import layout, ring
    scope["enter"] = enter
    step()
    """
    (ring,) = record_code(HEAD + TAKE + textwrap.dedent(code), run_dir)
    (sample,) = ring.of(STACK_SAMPLE)
    assert [frame[1] for frame in list_stacks(ring.log)[sample.a]] == ["<module>", "step"]


def test_a_deep_stack_keeps_the_innermost_frames(run_dir: Path) -> None:
    code = HEAD + TAKE + "def dig(n):\n    return dig(n - 1) if n else take()\ndig(200)"
    stack = only_stack(record_code(code, run_dir))
    assert len(stack) == 64
    assert [frame[1] for frame in stack[-2:]] == ["dig", "take"]
    assert stack[0][1] == "dig"


def test_generators_and_odd_names_are_recorded(run_dir: Path) -> None:
    code = (
        HEAD
        + TAKE
        + (
            "source = 'def inner():\\n    take()\\n    yield 1\\nlist(inner())'\n"
            "exec(compile(source, 'a\\x1b[31m\\n\\udc80b', 'exec'))"
        )
    )
    stack = only_stack(record_code(code, run_dir))
    assert [frame[0] for frame in stack[1:3]] == ["a\x1b[31m\n?b"] * 2
    assert stack[2][1:] == ("inner", 1, 2)


def test_sampling_keeps_no_references_to_job_objects(run_dir: Path) -> None:
    code = (
        HEAD
        + TAKE
        + (
            "import weakref\n"
            "class Thing: pass\n"
            "def hold():\n"
            "    thing = Thing(); take(); return weakref.ref(thing)\n"
            "assert hold()() is None"
        )
    )
    assert only_stack(record_code(code, run_dir))[-2][1] == "hold"


def test_a_forked_child_numbers_stacks_separately(run_dir: Path) -> None:
    code = (
        HEAD
        + TAKE
        + (
            "take()\n"
            "pid = os.fork()\n"
            "probe.emit(64, 1, 2)\n"
            "if pid: os.waitpid(pid, 0)\n"
            "else: (lambda: take())()\n"
        )
    )
    parent, child = sorted(record_code(code, run_dir), key=lambda ring: -ring.capacity)
    assert [span.a for span in parent.of(STACK_SAMPLE)] == [2]
    assert [span.a for span in child.of(STACK_SAMPLE)] == [3]
    assert [frame[1] for frame in list_stacks(child.log)[3]] == ["<module>", "<lambda>", "take"]


@needs_lock
@pytest.mark.parametrize("forks", [500, *select_long_values(10_000)])
def test_forks_under_sampling_neither_hang_nor_warn(run_dir: Path, forks: int) -> None:
    code = HEAD + (
        "import warnings; warnings.simplefilter('error')\n"  # 3.12 warns of forks with threads
        "import _clusterprof_probe.interpreter_lock as watch\n"
        "watch.PAUSE_S = watch.MAX_PAUSE_S = 0.0005\n"  # a fork falls into a sample
        f"for number in range({forks}):\n"
        "    end = time.perf_counter() + number % 7 * 3e-4\n"
        "    while time.perf_counter() < end: pass\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        assert len(os.listdir('/proc/self/task')) == 1\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "probe.emit(65, 1, 2)"
    )
    (ring,) = record_code(code, run_dir)
    assert ring.switched_off == 0
    assert ring.of(65)
    assert ring.of(STACK_SAMPLE)


class Log(list[bytes]):
    """Entries of a log with room for `room` of them."""

    def __init__(self, room: int = 10**6) -> None:
        self.room = room

    def add(self, entry: bytes) -> bool:
        if len(self) == self.room:
            return False
        self.append(entry)
        return True


def start_generator(name: str) -> Generator[None]:
    """Return a waiting generator of this name; its frame has no caller."""

    def wait() -> Generator[None]:
        yield

    code = wait.__code__.replace(co_filename=f"/job/{name}.py", co_name=name)
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=name)
    generator: Generator[None] = FunctionType(code, {})()
    next(generator)
    return generator


def test_a_stack_is_defined_once() -> None:
    log = Log()
    table = stacks.StackTable(log.add, 100, stacks.FULL_PATHS)
    waiting = [start_generator("a"), start_generator("b"), start_generator("a")]
    assert [table.number_stack(each.gi_frame) for each in waiting] == [1, 2, 1]
    assert [entry[:1] for entry in log] == [b"F", b"N", b"P", b"S"] * 2


def test_a_stack_beyond_the_table_limit_has_no_number() -> None:
    table = stacks.StackTable(Log().add, 2, stacks.FULL_PATHS)
    waiting = [start_generator(f"f{number}") for number in range(4)]
    assert [table.number_stack(each.gi_frame) for each in [*waiting, waiting[0]]] == [1, 2, 0, 0, 1]


def test_the_number_of_places_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_PLACES", 3)
    log = Log()
    table = stacks.StackTable(log.add, 100, stacks.FULL_PATHS)
    waiting = [start_generator(f"f{number}") for number in range(5)]
    assert [table.number_stack(each.gi_frame) for each in waiting] == [1, 2, 3, 0, 0]
    # Codes are let go when their cache is full; their places keep their numbers.
    assert [table.number_stack(each.gi_frame) for each in waiting] == [1, 2, 3, 0, 0]
    assert len(table._codes) <= 3
    assert sum(entry[:1] == b"P" for entry in log) == 3


@pytest.mark.parametrize("room", range(8))
def test_a_full_log_prevents_new_stack_numbers(room: int) -> None:
    log = Log(room)
    table = stacks.StackTable(log.add, 100, stacks.FULL_PATHS)
    waiting = [start_generator(name) for name in ("a", "b", "a")]
    numbers = [table.number_stack(each.gi_frame) for each in waiting]
    # Four entries a stack: with room for 4 to 7 only the first is defined.
    assert numbers == ([1, 0, 1] if room >= 4 else [0, 0, 0])
