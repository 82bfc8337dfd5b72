"""The ring: what lies in it, who may touch it, and what survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from clusterprof.agent.launch import launcher
from tests.support import job_python
from tests.support.probe_jobs import (
    UNTIL_HELD,
    Ring,
    RingWatcher,
    Span,
    clean_environment,
    install_probe,
    parse_ring,
    record_code,
    run_python,
)

ROOT = str(Path(__file__).parents[2])

HEAD = """
import gc, os, sys, time
import _clusterprof_probe as probe
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return install_probe(tmp_path / "run")


def only(rings: list[Ring]) -> Ring:
    (ring,) = rings
    return ring


def test_a_span_is_read_as_emitted(run_dir: Path) -> None:
    code = HEAD + "assert probe.emit(1, 10, 20, 3, -1, 5, 1) == 1; probe.emit(7, 30, 40)"
    ring = only(record_code(code, run_dir))
    assert ring.spans == [Span(1, 10, 20, 1, 3, -1, 5, 1), Span(2, 30, 40, 7, 0, 0, 0, 0)]
    assert (ring.capacity, ring.switched_off) == (2048, 0)


def test_the_ring_and_the_process_are_announced(run_dir: Path) -> None:
    code = HEAD + (
        "probe.emit(1, 10, 20)\n"
        "stat = open('/proc/self/stat').read().rpartition(')')[2].split()\n"
        "open(sys.argv[1], 'w').write('%d %s' % (os.getpid(), stat[19]))"
    )
    note = run_dir / "note"
    ring = only(record_code(code, run_dir, str(note), RANK="3", LOCAL_RANK="1", OTHER="x"))
    pid, ticks = (int(word) for word in note.read_text().split())
    assert (ring.pid, ring.started_ticks) == (pid, ticks)
    announced = json.loads((run_dir / f"rings/{pid}.0.json").read_text())
    assert isinstance(announced.pop("fd"), int)
    # 4,096 bytes of header and names + 2,048 records of 64 bytes = 135,168
    assert announced == {"pid": pid, "started_ticks": ticks, "path": None, "bytes": 135168}
    assert json.loads((run_dir / f"register/{pid}.json").read_text()) == {
        "pid": pid,
        "started_ticks": ticks,
        "role": "python",
        "variables": {"RANK": "3", "LOCAL_RANK": "1"},
        "device": "",
        "node_local_rank": 1,
    }
    assert not list(run_dir.glob("r*/*.tmp"))


def test_an_emulated_device_is_registered(run_dir: Path) -> None:
    record_code(HEAD + "probe.emit(1, 10, 20)", run_dir, CLUSTERPROF_EMULATED="0")
    (path,) = (run_dir / "register").iterdir()
    assert json.loads(path.read_text())["device"] == "emulated-0"


def test_versions_of_imported_frameworks_are_registered(run_dir: Path) -> None:
    code = HEAD + (
        "import types\n"
        "for name, version in (('torch', '2.13.0'), ('jax', None), ('tensorflow', 'v' * 99)):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    sys.modules[name].__version__ = version\n"
        "probe.emit(1, 10, 20)"
    )
    record_code(code, run_dir)
    (path,) = (run_dir / "register").iterdir()
    assert json.loads(path.read_text())["frameworks"] == "torch 2.13.0, tensorflow " + "v" * 32


def test_nothing_is_announced_before_the_first_record(run_dir: Path) -> None:
    assert run_python("-c", "import _clusterprof_probe", run_dir=run_dir).returncode == 0
    assert not list((run_dir / "rings").iterdir()) + list((run_dir / "register").iterdir())


def test_the_oldest_records_are_overwritten(run_dir: Path) -> None:
    ring = only(
        record_code(HEAD + "gc.disable(); [probe.emit(65, i, i + 1) for i in range(5000)]", run_dir)
    )
    # 5,000 written, 2,048 kept: sequences 2,953 … 5,000, which are i = 2,952 … 4,999. The end of
    # the interpreter may add some collections, which push out as many of ours.
    over = ring.written - 5000
    assert 0 <= over < 10
    assert [span.sequence for span in ring.spans] == list(range(2953 + over, 5001))
    assert [span.start_ns for span in ring.spans] == list(range(2952 + over, 5000))


def test_a_partially_overwritten_record_is_skipped(run_dir: Path) -> None:
    code = HEAD + (
        "for i in range(3): probe.emit(65, i, i + 1)\n"
        "import _clusterprof_probe.ring as ring\n"
        "ring._words[4096 // 8 + 8] = 2050\n"  # slot 1: the sequence of the next round
    )
    assert [span.sequence for span in only(record_code(code, run_dir)).spans] == [1, 3]


def test_the_ring_cannot_be_truncated(run_dir: Path) -> None:
    code = HEAD + (
        "probe.emit(1, 10, 20)\n"
        "import json\n"
        "fd = json.load(open(probe.run_dir + '/rings/%d.0.json' % os.getpid()))['fd']\n"
        "for size in (0, 1 << 20):\n"
        "    try: os.truncate('/proc/self/fd/%d' % fd, size)\n"
        "    except PermissionError: print('refused', size)\n"
        "probe.emit(1, 30, 40)\n"
        "print(os.get_inheritable(fd), oct(os.fstat(fd).st_size))"
    )
    result = run_python("-c", code, run_dir=run_dir)
    assert result.stdout == b"refused 0\nrefused 1048576\nFalse 0o410000\n", result.stderr


def test_the_ring_of_a_killed_process_stays_readable(run_dir: Path) -> None:
    code = HEAD + (
        "for i in range(10): probe.emit(65, i, i + 1)\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "probe.emit(65, 10, 11); os.kill(os.getpid(), 9)"
    )
    environ = launcher.with_probe_path(run_dir, clean_environment())
    watcher = RingWatcher(run_dir)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [job_python.PYTHON, "-c", code], env=environ, stdin=pipe, stdout=pipe
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
        watcher.read_announcements()
        job.communicate(b"\n")
    assert job.returncode == -signal.SIGKILL
    assert [span.start_ns for span in watcher.read_ring(job.pid).spans] == list(range(11))


def test_a_forked_child_has_a_separate_ring(run_dir: Path) -> None:
    code = HEAD + (
        "probe.span('before')\n"
        "for i in range(3): probe.emit(64, i, i)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        f"    probe.emit(64, 100, 100); {UNTIL_HELD}; os._exit(0)\n"
        "probe.emit(64, 3, 3); os.waitpid(pid, 0)"
    )
    parent, child = sorted(record_code(code, run_dir), key=lambda ring: -ring.capacity)
    assert [span.start_ns for span in parent.spans] == [0, 1, 2, 3]
    assert [(span.sequence, span.start_ns) for span in child.spans] == [(1, 100)]
    assert (parent.capacity, child.capacity) == (2048, 512)
    assert parent.names == child.names == {64: "before"}
    # The child of a rank is no rank: it inherited its launcher variables only.
    assert [path.stem for path in (run_dir / "register").iterdir()] == [str(parent.pid)]


def test_a_child_forked_before_the_first_record_registers_separately(run_dir: Path) -> None:
    code = HEAD + (
        "import _clusterprof_probe.ring\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        f"    os.environ['RANK'] = '1'; probe.emit(7, 1, 2); {UNTIL_HELD}; os._exit(0)\n"
        "os.waitpid(pid, 0)"
    )
    ring = only(record_code(code, run_dir))
    (path,) = (run_dir / "register").iterdir()
    assert path.stem == str(ring.pid)
    assert json.loads(path.read_text())["variables"] == {"RANK": "1"}


def test_forks_during_annotations_of_other_threads_do_not_hang(run_dir: Path) -> None:
    # Nobody has marked anything when the threads begin: they open the ring while we fork. A child
    # that waits for what a thread of its parent held would wait for ever, and run() ends it.
    code = (
        "import os, sys, threading, time; sys.path.insert(0, sys.argv[1]); import clusterprof\n"
        "sys.setswitchinterval(1e-5)\n"
        "ended = threading.Event()\n"
        "def mark(name):\n"
        "    while not ended.is_set():\n"
        "        with clusterprof.span(name): clusterprof.step()\n"
        "        time.sleep(0)\n"
        "names = ('fetch', 'forward', 'mine')\n"
        "threads = [threading.Thread(target=mark, args=(name,)) for name in names]\n"
        "for thread in threads: thread.start()\n"
        "try:\n"
        "    for _ in range(200):\n"
        "        pid = os.fork()\n"
        "        if not pid:\n"
        "            for name in names:\n"
        "                with clusterprof.span(name): clusterprof.step()\n"
        "            probe = sys.modules['_clusterprof_probe']\n"
        "            os._exit(0 if probe.on and probe.load().is_open() else 1)\n"
        "        assert os.waitpid(pid, 0)[1] == 0\n"
        "finally: ended.set()"
    )
    result = run_python("-W", "ignore", "-c", code, ROOT, run_dir=run_dir)
    assert (result.returncode, result.stderr) == (0, b"")


def test_concurrent_threads_do_not_lose_records(run_dir: Path) -> None:
    code = HEAD + (
        "import threading\n"
        "sys.setswitchinterval(1e-5)\n"
        "gc.disable()\n"
        "probe.emit(64, 0, 0)\n"
        "def mark(number):\n"
        "    for i in range(20000): probe.emit(65 + number, i, i + 1)\n"
        "threads = [threading.Thread(target=mark, args=(n,)) for n in range(4)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()"
    )
    ring = only(record_code(code, run_dir))
    others = ring.written - (1 + 4 * 20000)  # of the interpreter's lock, and as it ended
    assert 0 <= others < 10
    # Every slot holds the sequence that belongs there; the other records may be older than these.
    assert 2048 - others <= len(ring.spans) <= 2048
    assert {span.sequence for span in ring.spans} <= set(
        range(ring.written - 2047, ring.written + 1)
    )
    for number in range(4):
        starts = [span.start_ns for span in ring.spans if span.kind == 65 + number]
        assert starts == sorted(set(starts))


def test_without_memfd_the_ring_is_a_file(run_dir: Path) -> None:
    code = "import os; del os.memfd_create\n" + HEAD + "probe.emit(65, 1, 2); print(os.getpid())"
    result = run_python("-c", code, run_dir=run_dir)
    pid = int(result.stdout)
    path = run_dir / f"rings/{pid}.0.ring"
    announced = json.loads((run_dir / f"rings/{pid}.0.json").read_text())
    assert (announced["fd"], announced["path"]) == (None, str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [span.start_ns for span in parse_ring(path.read_bytes()).spans] == [1]


def test_without_ring_memory_the_probe_is_disabled_with_a_reason(run_dir: Path) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        + HEAD
        + "print(probe.emit(65, 1, 2), probe.emit(65, 3, 4), os.getpid())"
    )
    result = run_python("-c", code, run_dir=run_dir)
    assert result.stderr == b""
    first, second, pid = result.stdout.split()
    assert (first, second) == (b"0", b"0")
    assert not list((run_dir / "rings").iterdir())
    registered = json.loads((run_dir / f"register/{int(pid)}.json").read_text())
    assert registered["problem"] == f"no ring: [Errno 27] {os.strerror(27)}"


def test_an_unrepresentable_integer_disables_the_probe_and_marks_the_ring(run_dir: Path) -> None:
    code = HEAD + (
        "probe.emit(65, 1, 2); probe.emit(65, 1 << 70, 2)\nassert probe.emit(65, 3, 4) == 0"
    )
    ring = only(record_code(code, run_dir))
    assert ring.switched_off == 1
    assert [span.start_ns for span in ring.spans] == [1]
