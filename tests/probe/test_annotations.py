"""clusterprof.step() and clusterprof.span(): the two words a job may say itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import job_python
from tests.support.probe_jobs import (
    DATA_WAIT,
    FETCH,
    STEP,
    Ring,
    clean_environment,
    install_probe,
    record_code,
)

ROOT = str(Path(__file__).parents[2])

CLOCK = """
import sys, time
sys.path.insert(0, sys.argv[1])
clock = [1_000]
def monotonic_ns():
    clock[0] += 1
    return clock[0]
time.monotonic_ns = monotonic_ns
import clusterprof
import _clusterprof_probe as probe
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return install_probe(tmp_path / "run")


def marked(run_dir: Path, code: str) -> Ring:
    (ring,) = record_code(CLOCK + code, run_dir, ROOT)
    assert ring.switched_off == 0
    return ring


def test_annotations_do_nothing_without_a_recording() -> None:
    code = (
        "import clusterprof, sys\n"
        "with clusterprof.span('x'): clusterprof.step()\n"
        "print([name for name in sys.modules if name.startswith(('clusterprof.', '_cluster'))])"
    )
    command = [job_python.PYTHON, "-c", code]
    result = subprocess.run(command, env=clean_environment(PYTHONPATH=ROOT), capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"[]\n", b"")


def test_spans_have_the_names_given_by_the_user(run_dir: Path) -> None:
    code = (
        "for name in ('augment', 'tokenise', 'augment'):\n"
        "    with clusterprof.span(name): clock[0] += 100"
    )
    ring = marked(run_dir, code)
    assert ring.names == {64: "augment", 65: "tokenise"}
    # One reading of the clock before, 100 inside, one after: 101.
    assert [(s.kind, s.end_ns - s.start_ns) for s in ring.spans] == [
        (64, 101),
        (65, 101),
        (64, 101),
    ]


def test_a_span_ends_when_an_exception_leaves_the_block(run_dir: Path) -> None:
    code = (
        "try:\n    with clusterprof.span('x'): 1 // 0\nexcept ZeroDivisionError: clusterprof.step()"
    )
    assert [span.kind for span in marked(run_dir, code).spans] == [64, STEP]


def test_spans_named_after_phases_have_the_phase_kind(run_dir: Path) -> None:
    names = ("data_wait", "h2d", "checkpoint", "forward", "backward", "collective", "eval")
    code = f"for name in {(*names, 'compile')}:\n    with clusterprof.span(name): pass"
    ring = marked(run_dir, code)
    assert ring.names == {}
    assert [(s.kind, s.a, s.b) for s in ring.spans] == [
        (DATA_WAIT, -1, -1),
        (4, -1, 0),
        (5, -1, 0),
        (9, 0, 0),
        (10, 0, 0),
        (11, 0, -1),
        (12, 0, 0),
        (13, 0, 0),
    ]


def test_an_annotated_fetch_separates_cpu_time_from_waiting(run_dir: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import clusterprof\n"
        "with clusterprof.span('fetch'):\n"
        "    time.sleep(0.03)\n"
        "    began = time.thread_time()\n"
        "    while time.thread_time() - began < 0.03: pass"
    )
    (ring,) = record_code(code, run_dir, ROOT)
    (fetch,) = ring.of(FETCH)
    # 30 ms asleep and 30 ms of CPU: the CPU time leaves out all of the sleep and none of the rest.
    assert fetch.a == 1
    assert 30_000_000 <= fetch.b + fetch.c <= fetch.end_ns - fetch.start_ns - 29_900_000


def test_the_cpu_time_of_a_fetch_includes_the_current_tick(run_dir: Path) -> None:
    # Nobody but us reads the thread's clock inside a fetch, and each begins after a sleep: what
    # the thread used since its last scheduler tick, 0 to 4 of 10 ms, would else be missing.
    # As many rounds as take 10 ms of CPU, independent of other load.
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import clusterprof\n"
        "rounds, began = 0, time.thread_time_ns()\n"
        "while time.thread_time_ns() - began < 30_000_000:\n"
        "    for _ in range(1000): pass\n"
        "    rounds += 1000 / 3\n"
        "with clusterprof.span('fetch'): used = 0  # opens the ring\n"
        "for _ in range(10):\n"
        "    time.sleep(0.003)\n"
        "    began = time.thread_time_ns()\n"
        "    with clusterprof.span('fetch'):\n"
        "        for _ in range(int(rounds)): pass\n"
        "    used += time.thread_time_ns() - began\n"
        "open(sys.argv[2], 'w').write(str(used))"
    )
    note = run_dir / "note"
    (ring,) = record_code(code, run_dir, ROOT, str(note))
    used = int(note.read_text())
    _, *fetches = ring.of(FETCH)
    assert len(fetches) == 10
    assert 0.95 * used <= sum(fetch.b + fetch.c for fetch in fetches) <= used + 10 * 1000


def test_an_annotated_fetch_records_bytes_read_from_the_device(
    run_dir: Path, tmp_path: Path
) -> None:
    # The truth is the same thread's own counter of the bytes that came from block devices.
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import clusterprof\n"
        "def from_devices():\n"
        "    text = open('/proc/thread-self/io').read()\n"
        "    return int(text.partition('\\nread_bytes: ')[2].split()[0])\n"
        "fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)\n"
        "os.pwrite(fd, bytes(1 << 20), 0); os.fsync(fd)\n"
        "with clusterprof.span('fetch'): pass\n"
        "os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "before = from_devices()\n"
        "with clusterprof.span('fetch'): os.pread(fd, 1 << 20, 0)\n"
        "open(sys.argv[3], 'w').write(str(from_devices() - before))"
    )
    note = run_dir / "note"
    (ring,) = record_code(code, run_dir, ROOT, str(tmp_path / "data"), str(note))
    read = int(note.read_text())
    if not read:
        pytest.skip("the temporary folder does not lie on a block device")
    assert [fetch.d for fetch in ring.of(FETCH)] == [0, read]
    assert read >= 1 << 20


def test_a_long_span_name_is_cut_between_characters(run_dir: Path) -> None:
    ring = marked(run_dir, "with clusterprof.span('x' + 'ü' * 30): pass")
    # 48 bytes hold x and 23 characters of 2 bytes = 47; the 24th would end at byte 49.
    assert ring.names == {64: "x" + "ü" * 23}


def test_at_most_64_span_names_are_kept(run_dir: Path) -> None:
    code = "for i in range(70):\n    with clusterprof.span('name %d' % i): pass"
    ring = marked(run_dir, code)
    assert ring.names == {64 + i: f"name {i}" for i in range(64)}
    assert [span.kind for span in ring.spans] == list(range(64, 128))


def test_marked_steps_follow_each_other_without_gaps(run_dir: Path) -> None:
    code = (
        "probe.emit(1, 500, 600)\n"
        "from _clusterprof_probe import annotations; annotations.begin_first_step(500)\n"
        "for at in (2_000, 3_000, 4_000):\n"
        "    clock[0] = at; clusterprof.step()"
    )
    assert [(s.start_ns, s.end_ns, s.a, s.b) for s in marked(run_dir, code).of(STEP)] == [
        (500, 2_001, 0, 1),
        (2_001, 3_001, 1, 1),
        (3_001, 4_001, 2, 1),
    ]


def test_the_first_mark_without_a_known_start_ends_no_step(run_dir: Path) -> None:
    code = "for at in (2_000, 3_000):\n    clock[0] = at; clusterprof.step()"
    steps = marked(run_dir, code).of(STEP)
    assert [(s.start_ns, s.end_ns, s.a, s.b) for s in steps] == [(2_001, 3_001, 0, 1)]


def test_after_the_first_mark_optimizers_do_not_end_steps(run_dir: Path) -> None:
    code = (
        "from _clusterprof_probe import annotations\n"
        "annotations.begin_first_step(1_500)\n"
        "annotations.finish_optimizer_step(2_000)\n"  # step 0, before the marks are known
        "clock[0] = 2_099; clusterprof.step()\n"  # the same step, said again: 2,100 begins step 1
        "annotations.finish_optimizer_step(3_000)\n"
        "clock[0] = 3_099; clusterprof.step()"
    )
    assert [(s.start_ns, s.end_ns, s.a, s.b) for s in marked(run_dir, code).of(STEP)] == [
        (1_500, 2_000, 0, 0),
        (2_100, 3_100, 1, 1),
    ]


def test_batches_end_steps_without_an_optimizer(run_dir: Path) -> None:
    code = (
        "from _clusterprof_probe import annotations\n"
        "annotations.begin_first_step(1_000)\n"
        "for at in range(1, 8):\n"
        "    annotations.note_batch(7, 1_000 * at)\n"
        "    annotations.note_batch(8, 1_000 * at + 500)"  # a second loader in the same loop
    )
    assert [(s.start_ns, s.end_ns, s.a, s.b) for s in marked(run_dir, code).of(STEP)] == [
        (1_000, 5_000, 0, 3),  # four batches may be accumulated; the fifth is too many
        (5_000, 6_000, 1, 3),
        (6_000, 7_000, 2, 3),
    ]


def test_a_second_loader_ends_steps_once_the_first_stops(run_dir: Path) -> None:
    code = (
        "from _clusterprof_probe import annotations\n"
        "annotations.begin_first_step(1_000)\n"
        "for at in range(1, 6): annotations.note_batch(7, 1_000 * at)\n"
        "for at in range(6, 12): annotations.note_batch(8, 1_000 * at)"
    )
    steps = marked(run_dir, code).of(STEP)
    assert [s.end_ns for s in steps] == [5_000, 10_000, 11_000]


def test_an_optimizer_step_replaces_batches_as_step_end(run_dir: Path) -> None:
    code = (
        "from _clusterprof_probe import annotations\n"
        "annotations.begin_first_step(1_000)\n"
        "for at in range(1, 7): annotations.note_batch(7, 1_000 * at)\n"
        "annotations.finish_optimizer_step(6_500)\n"
        "for at in range(7, 20): annotations.note_batch(7, 1_000 * at)\n"
        "annotations.finish_optimizer_step(19_500)"
    )
    assert [(s.end_ns, s.b) for s in marked(run_dir, code).of(STEP)] == [
        (5_000, 3),
        (6_000, 3),
        (6_500, 0),
        (19_500, 0),
    ]


@pytest.mark.parametrize(
    "before",
    [
        "class torch: is_grad_enabled = staticmethod(lambda: False)\nsys.modules['torch'] = torch",
        "from _clusterprof_probe import ring; ring.helper = True",
        "annotations.begin_framework_steps()",
        "annotations.get_native_id = lambda: 1",
    ],
    ids=["evaluation", "worker", "framework", "another thread"],
)
def test_batches_without_training_do_not_end_steps(run_dir: Path, before: str) -> None:
    code = (
        f"from _clusterprof_probe import annotations\n{before}\n"
        "annotations.begin_first_step(1_000)\n"
        "for at in range(1, 9): annotations.note_batch(7, 1_000 * at)\n"
        "with clusterprof.span('data_wait'): pass"
    )
    ring = marked(run_dir, code)
    assert ring.of(STEP) == [] and len(ring.of(DATA_WAIT)) == 1


def test_the_first_two_step_numbers_of_the_user_are_recorded(run_dir: Path) -> None:
    code = (
        "from _clusterprof_probe import annotations; annotations.begin_first_step(500)\n"
        "for number in (41, 42, 43):\n"
        "    clock[0] += 1_000; clusterprof.step(number)\n"
        "clusterprof.step()"
    )
    ring = marked(run_dir, code)
    # the job's own number, and that of the step in its process
    assert [(s.a, s.b) for s in ring.of(27)] == [(41, 0), (42, 1)]
    assert [s.end_ns for s in ring.of(27)] == [s.end_ns for s in ring.of(STEP)[:2]]


def test_step_numbers_of_the_user_replace_optimizer_numbers(run_dir: Path) -> None:
    code = (
        "from _clusterprof_probe import annotations; annotations.begin_first_step(500)\n"
        "annotations.note_job_step(8); annotations.finish_optimizer_step(1_000)\n"
        "clusterprof.step(100)\n"  # the same step, said again
        "for number in (101, 102):\n"
        "    annotations.note_job_step(9); clusterprof.step(number)"
    )
    assert [(s.a, s.b) for s in marked(run_dir, code).of(27)] == [(8, 0), (101, 1), (102, 2)]


def test_a_probe_error_inside_annotations_does_not_affect_the_job(run_dir: Path) -> None:
    code = (
        "from _clusterprof_probe import annotations\n"
        "def fail(*arguments): raise SystemExit(3)\n"
        "annotations.make_span = annotations.mark_step = fail\n"
        "with clusterprof.span('x'): clusterprof.step()\n"
        "assert not probe.on"
    )
    assert record_code(CLOCK + code, run_dir, ROOT) == []


@pytest.mark.parametrize(
    "number, error", [("SIGALRM", "TimeoutError"), ("SIGINT", "KeyboardInterrupt")]
)
def test_a_signal_exception_raised_inside_the_probe_reaches_the_job(
    run_dir: Path, number: str, error: str
) -> None:
    code = (
        "import os, signal\n"
        "def handler(number, frame): raise TimeoutError\n"
        "signal.signal(signal.SIGALRM, handler)\n"
        "from _clusterprof_probe import annotations\n"
        f"def mark(step): os.kill(os.getpid(), signal.{number}); time.sleep(1)\n"
        "annotations.mark_step = mark\n"
        f"try: clusterprof.step()\nexcept {error}: caught = True\n"
        "assert caught and probe.on"
    )
    assert record_code(CLOCK + code, run_dir, ROOT) == []
