"""The thread that sees waits for the interpreter lock: what it records, and that nobody sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.job_python import skip_free_threaded
from tests.support.probe_jobs import INTERPRETER_WAIT, STACK_SAMPLE, install_probe, record_code

pytestmark = skip_free_threaded()

KEEP_LOCK = """
import ctypes, os, sys, threading, time
import _clusterprof_probe as probe
probe.emit(64, 1, 2)
usleep = ctypes.PyDLL(None).usleep  # called with the lock kept, as by an extension
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return install_probe(tmp_path / "run")


def test_c_code_that_holds_the_interpreter_lock_is_a_wait(run_dir: Path) -> None:
    code = KEEP_LOCK + (
        "time.sleep(0.2)\n"
        "before = time.monotonic_ns(); usleep(400_000); after = time.monotonic_ns()\n"
        "time.sleep(0.2)\n"
        "open(sys.argv[1], 'w').write('%d %d' % (before, after))"
    )
    note = run_dir / "note"
    (ring,) = record_code(code, run_dir, str(note), with_gc=True)
    before, after = (int(word) for word in note.read_text().split())
    waits = [span for span in ring.of(INTERPRETER_WAIT) if before <= span.start_ns < after]
    # The thread wanted the lock after at most 75 ms, and got it when it was given away.
    # On a busy machine the wake-up after it may be late for the same reason.
    assert max(wait.end_ns for wait in waits) >= before + 400_000_000
    assert waits[0].start_ns <= before + 250_000_000
    # A pause ends early to lower the switch interval; what is left of it follows.
    assert 200_000 <= waits[0].a <= 75_000_000


def test_the_watcher_thread_is_invisible_to_the_threading_module(run_dir: Path) -> None:
    code = KEEP_LOCK + (
        "assert threading.active_count() == 1\nassert len(os.listdir('/proc/self/task')) == 2\n"
    )
    assert len(record_code(code, run_dir)) == 1


def test_a_fork_happens_without_the_watcher_thread(run_dir: Path) -> None:
    code = KEEP_LOCK + (
        "import warnings; warnings.simplefilter('error')\n"  # 3.12 warns of forks with threads
        "pid = os.fork()\n"
        "if pid == 0: os._exit(len(os.listdir('/proc/self/task')) - 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        # The thread before the fork may still be ending.
        "end = time.monotonic() + 10\n"
        "while len(os.listdir('/proc/self/task')) != 2: assert time.monotonic() < end\n"
    )
    assert len(record_code(code, run_dir)) == 1


def test_the_watcher_thread_blocks_signals(run_dir: Path) -> None:
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
    assert len(record_code(code, run_dir)) == 1


OWN_INTERVAL = KEEP_LOCK + (
    "import _clusterprof_probe.interpreter_lock as watch\n"
    "read = sys.getswitchinterval\n"
    "sys.setswitchinterval(0.007); own = read()\n"
)
"""A job with a switch interval of its own."""
BY_HAND = OWN_INTERVAL + "watch.stop()\nwhile len(os.listdir('/proc/self/task')) > 1: pass\n"
"""The same, after the thread has ended."""


@pytest.fixture
def sampled_dir(tmp_path: Path) -> Path:
    return install_probe(tmp_path / "sampled", stacks="full")


def test_the_switch_interval_is_lowered_and_restored(run_dir: Path) -> None:
    code = BY_HAND + (
        "watch.lower_switch_interval(); assert read() == 1e-6 * 100\n"
        "assert watch.restore_switch_interval() and read() == own\n"
        "assert not watch.restore_switch_interval() and read() == own"
    )
    assert len(record_code(code, run_dir)) == 1


def test_c_code_that_holds_the_lock_lengthens_the_switch_interval(run_dir: Path) -> None:
    # 0.04 of how late samples are, whole microseconds, from 0.1 to 1 ms.
    code = BY_HAND + (
        "loop, chosen = watch._Watch(), []\n"
        "for late_ms in (0, 0.5, 4, 100):\n"
        "    loop.mean_late_ns = late_ms * 1e6\n"
        "    watch.lower_switch_interval(loop._choose_switch_interval())\n"
        "    chosen.append(round(read() * 1e6))\n"
        "    assert watch.restore_switch_interval() and read() == own\n"
        "assert chosen == [100, 100, 160, 1000], chosen"
    )
    assert len(record_code(code, run_dir)) == 1


def test_each_microsecond_of_the_jobs_switch_interval_is_restored(run_dir: Path) -> None:
    code = BY_HAND + (
        "for us in range(1, 20_001):\n"
        "    sys.setswitchinterval(us * 1e-6 + 1e-8); own = read()\n"
        "    watch.lower_switch_interval(); watch.restore_switch_interval()\n"
        "    assert read() == own, (us, own, read())"
    )
    assert len(record_code(code, run_dir)) == 1


def test_a_switch_interval_set_by_the_job_meanwhile_is_kept(run_dir: Path) -> None:
    code = BY_HAND + (
        "watch.lower_switch_interval()\n"
        "sys.setswitchinterval(0.02); own = read()\n"
        "assert watch.restore_switch_interval() and read() == own\n"
        "assert not watch.restore_switch_interval() and read() == own"
    )
    assert len(record_code(code, run_dir)) == 1


@pytest.mark.parametrize("own_s", ["0.0001", "0.00005", "0.000001"])
def test_the_switch_interval_is_never_raised(run_dir: Path, own_s: str) -> None:
    code = BY_HAND + (
        f"sys.setswitchinterval({own_s}); own = read()\n"
        "watch.lower_switch_interval(); assert read() == own\n"
        "assert not watch.restore_switch_interval() and read() == own"
    )
    assert len(record_code(code, run_dir)) == 1


def test_a_forked_child_has_the_jobs_switch_interval(run_dir: Path) -> None:
    code = BY_HAND + (
        "watch.lower_switch_interval()\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0 if read() == own else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "assert watch.restore_switch_interval() and read() == own"
    )
    assert len(record_code(code, run_dir)) == 1


def test_a_child_forked_during_the_change_can_restore_the_interval(run_dir: Path) -> None:
    # Another thread can fork whenever the interval is set: what is restored is noted until then.
    code = BY_HAND + (
        "noted, change = [], sys.setswitchinterval\n"
        "def note(seconds): noted.append(watch._lowered_from_s); change(seconds)\n"
        "sys.setswitchinterval = note\n"
        "watch.lower_switch_interval(); watch.restore_switch_interval()\n"
        "assert noted == [own, own], noted"
    )
    assert len(record_code(code, run_dir)) == 1


# The thread lowers the interval at once, and samples a second later.
LONG_LEAD = "watch.PAUSE_S = 600.0; watch._Watch._choose_lead = lambda self: 10**15\n"


def test_the_watcher_thread_restores_the_switch_interval_at_its_end(sampled_dir: Path) -> None:
    code = (
        BY_HAND
        + LONG_LEAD
        + (
            "watch._start_watching()\n"
            "while read() == own: time.sleep(0.01)\n"
            "assert read() == 1e-6 * 100\n"
            "watch.stop()\n"
            "while len(os.listdir('/proc/self/task')) > 1: time.sleep(0.01)\n"
            "assert read() == own"
        )
    )
    assert len(record_code(code, sampled_dir)) == 1


def test_forks_restore_a_lowered_switch_interval_in_the_child(sampled_dir: Path) -> None:
    code = (
        BY_HAND
        + LONG_LEAD
        + (
            "watch._start_watching()\n"
            "for _ in range(20):\n"
            "    while read() == own: time.sleep(0.001)\n"
            "    pid = os.fork()\n"
            "    if pid == 0: os._exit(0 if read() == own else 1)\n"
            "    assert os.waitpid(pid, 0)[1] == 0\n"
        )
    )
    assert len(record_code(code, sampled_dir)) == 1


def test_the_switch_interval_is_restored_after_each_sample(sampled_dir: Path) -> None:
    code = OWN_INTERVAL + (
        "before, changes = read(), []\n"
        "while len(changes) < 8:\n"
        "    now = read()\n"
        "    if now != before: changes.append(now); before = now\n"
        # Longer than 0.1 ms where samples are late: on a busy machine.
        "assert changes[1::2] == [own] * 4, changes\n"
        "assert all(99e-6 < lowered < 1001e-6 for lowered in changes[::2]), changes\n"
        "watch.stop()\n"
        "while len(os.listdir('/proc/self/task')) > 1: pass\n"
        "assert read() == own"
    )
    (ring,) = record_code(code, sampled_dir)
    assert len(ring.of(STACK_SAMPLE)) >= 3


def test_without_stack_sampling_the_switch_interval_is_not_changed(run_dir: Path) -> None:
    code = OWN_INTERVAL + (
        "def refuse(seconds): os._exit(1)\n"
        "sys.setswitchinterval = refuse\n"
        "end = time.monotonic() + 0.4\n"
        "while time.monotonic() < end: pass\n"
        "assert read() == own"
    )
    assert len(record_code(code, run_dir)) == 1


def test_late_samples_lower_the_switch_interval_for_32_samples(sampled_dir: Path) -> None:
    code = BY_HAND + (
        "watched = watch._Watch(); watched.sampler = watch._samplers[0]\n"
        "watched.sampler.record = lambda *times: None\n"
        "def finish(late_ns, is_prompt=False):\n"
        "    watched._finish_sample(10**9, 10**9 + late_ns, 1, is_prompt)\n"
        "    return watched.prompt_samples\n"
        "assert [finish(199_999) for _ in range(33)] == [*range(31, -1, -1), 0]\n"
        "assert [finish(200_000), finish(0)] == [32, 31]\n"
        # Asked to, a switch interval of 7 ms, or of 0.1 ms, after it was due: as late as that, less
        # a tenth of it and up to the time of a wake-up.
        "assert [finish(6_299_000), finish(6_301_000), finish(7_199_000)] == [32, 31, 30]\n"
        "assert finish(7_201_000) == 32\n"
        "assert [finish(299_000, True), finish(301_000, True)] == [31, 32]"
    )
    assert len(record_code(code, sampled_dir)) == 1


@pytest.mark.parametrize(
    ("held_ns", "cpu_ns", "pause_s"),
    [
        (0, 0, 0.05),  # the usual pause
        (45_000, 50_000, 0.05),  # 45 µs / 0.09 % = 50 ms = 50 µs / 0.1 %
        (90_000, 50_000, 0.1),  # the lock: 90 µs / 0.09 %
        (45_000, 400_000, 0.4),  # the CPU: 400 µs / 0.1 %
        (9_000_000, 0, 2.0),  # at most 2 s
    ],
)
def test_lock_and_cpu_budgets_lengthen_the_pause(
    sampled_dir: Path, held_ns: int, cpu_ns: int, pause_s: float
) -> None:
    code = BY_HAND + (
        "watched = watch._Watch(); watched.sampler = sampler = watch._samplers[0]\n"
        f"sampler.mean_held_ns, sampler.mean_cpu_ns = {held_ns}, {cpu_ns}\n"
        "sampler.all_cpu_ns = 10**15\n"
        f"assert abs(watched._choose_pause() - {pause_s}) < 1e-9, watched._choose_pause()"
    )
    assert len(record_code(code, sampled_dir)) == 1


def test_the_first_samples_have_extra_cpu_credit(sampled_dir: Path) -> None:
    code = BY_HAND + (
        "watched = watch._Watch(); watched.sampler = sampler = watch._samplers[0]\n"
        "sampler.mean_cpu_ns, sampler.started_ns = 400_000, time.monotonic_ns()\n"
        "sampler.all_cpu_ns = watch.CREDIT_CPU_NS\n"
        "assert watched._choose_pause() == 0.05\n"
        "sampler.all_cpu_ns += 10_000_000\n"  # what 10 s allow
        "assert abs(watched._choose_pause() - 0.4) < 1e-9\n"
        "sampler.started_ns -= 11 * 10**9\n"
        "assert watched._choose_pause() == 0.05"
    )
    assert len(record_code(code, sampled_dir)) == 1


def test_a_wait_for_the_lock_raises_the_cpu_budget(sampled_dir: Path) -> None:
    code = BY_HAND + (
        "watched = watch._Watch(); watched.sampler = sampler = watch._samplers[0]\n"
        "sampler.mean_held_ns, sampler.mean_cpu_ns = 10**6, 600_000\n"
        "sampler.started_ns = time.monotonic_ns() - 10**10\n"
        "sampler.all_cpu_ns = watch.CREDIT_CPU_NS + 29_000_000\n"  # 0.3 % of 10 s: 30 ms
        "assert watched._choose_pause(True) == 0.05\n"
        "sampler.all_cpu_ns += 2_000_000\n"
        "assert abs(watched._choose_pause(True) - 0.2) < 1e-9"  # 600 us / 0.3 %
    )
    assert len(record_code(code, sampled_dir)) == 1
