"""The thread that sees waits for the interpreter lock: what it records, and that nobody sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.probing import INTERPRETER_WAIT, install, recorded

KEEP_LOCK = """
import ctypes, os, sys, threading, time
import _clusterprof_probe as probe
probe.emit(64, 1, 2)
usleep = ctypes.PyDLL(None).usleep  # called with the lock kept, as by an extension
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return install(tmp_path / "run")


def test_c_code_that_keeps_the_lock_is_a_wait(run_dir: Path) -> None:
    code = KEEP_LOCK + (
        "time.sleep(0.2)\n"
        "before = time.monotonic_ns(); usleep(400_000); after = time.monotonic_ns()\n"
        "time.sleep(0.2)\n"
        "open(sys.argv[1], 'w').write('%d %d' % (before, after))"
    )
    note = run_dir / "note"
    (ring,) = recorded(code, run_dir, str(note), with_gc=True)
    before, after = (int(word) for word in note.read_text().split())
    waits = [span for span in ring.of(INTERPRETER_WAIT) if before <= span.start_ns < after]
    # The thread wanted the lock after at most 75 ms, and got it when it was given away.
    (wait,) = waits
    assert wait.end_ns >= after - 1_000_000
    assert wait.start_ns <= before + 250_000_000
    assert 25_000_000 <= wait.a <= 75_000_000


def test_the_job_does_not_see_the_thread(run_dir: Path) -> None:
    code = KEEP_LOCK + (
        "assert threading.active_count() == 1\nassert len(os.listdir('/proc/self/task')) == 2\n"
    )
    assert len(recorded(code, run_dir)) == 1


def test_a_fork_happens_without_the_thread(run_dir: Path) -> None:
    code = KEEP_LOCK + (
        "import warnings; warnings.simplefilter('error')\n"  # 3.12 warns of forks with threads
        "pid = os.fork()\n"
        "if pid == 0: os._exit(len(os.listdir('/proc/self/task')) - 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "assert len(os.listdir('/proc/self/task')) == 2\n"
    )
    assert len(recorded(code, run_dir)) == 1


def test_it_takes_no_signal(run_dir: Path) -> None:
    code = KEEP_LOCK + (
        "import signal\n"
        "while len(sys._current_frames()) < 2: time.sleep(0.01)\n"  # it has begun
        "time.sleep(0.2)\n"
        "(other,) = set(map(int, os.listdir('/proc/self/task'))) - {os.getpid()}\n"
        "text = open('/proc/self/task/%d/status' % other).read()\n"
        "blocked = int(text.split('SigBlk:')[1].split()[0], 16)\n"
        "assert blocked >> (signal.SIGTERM - 1) & 1 and blocked >> (signal.SIGPROF - 1) & 1\n"
        "assert not blocked >> (signal.SIGSEGV - 1) & 1\n"
    )
    assert len(recorded(code, run_dir)) == 1
