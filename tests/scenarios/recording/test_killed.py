"""kill -9 at random moments: of the recorder, forty times; of the job; of both."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clusterprof.probe import layout
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Event, Spans
from tests.support.killed_jobs import (
    TRAINER,
    RecordedJobs,
    list_span_ends,
    measure_lost_ns,
    read_cpu_delay_ns,
    remove_run_dirs,
)
from tests.support.recording_runs import (
    PYTHON,
    RECORD,
    find_recorder_pid,
    get_run_dir,
    make_environment,
    make_job_id,
    read_records,
    wait_for_end,
    wait_for_recording,
    wait_until,
)

AT_ONCE = 4
LOST_AT_MOST_NS = 1_000_000_000  # of the time in which a CPU could be had
AFTER_KILL_S = 0.2


@pytest.fixture
def nursery() -> Iterator[RecordedJobs]:
    made = RecordedJobs()
    yield made
    made.close()
    remove_run_dirs()


def kill_once(nursery: RecordedJobs, folder: Path, number: int) -> int:
    """Record a job, kill its recorder at a random moment, end the job; return what was lost."""
    folder.mkdir()
    out, stop, printed = folder / "out", folder / "stop", folder / "said"
    job = make_job_id(f"kill{number}")
    nursery.start(out, job, PYTHON, "-c", TRAINER, str(stop), str(printed))
    agent = find_recorder_pid(job)
    wait_until(lambda: list(get_run_dir(job).glob("rings/*.json")))  # it trains
    before_ns = read_cpu_delay_ns(agent)
    time.sleep(random.Random(number).uniform(0, 2.0))
    killed_ns, delayed_ns = time.monotonic_ns(), read_cpu_delay_ns(agent) - before_ns
    os.kill(agent, signal.SIGKILL)
    time.sleep(AFTER_KILL_S)
    stop.touch()
    assert os.waitstatus_to_exitcode(nursery.status(job)) == 7
    assert printed.read_text().endswith(" steps")
    reader = NodeReader(list_node_folders(out)[0])
    records = list(reader)  # opens, every time
    assert reader.damage.damaged_places == 0
    return measure_lost_ns(records, killed_ns) - delayed_ns


def test_a_killed_recorder_leaves_a_readable_recording_and_an_unharmed_job(
    nursery: RecordedJobs, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        lost = list(threads.map(lambda n: kill_once(nursery, tmp_path / str(n), n), range(8)))
    assert len(lost) == 8  # how much was lost is a matter of `make accept`


@pytest.mark.accept
@pytest.mark.parametrize("runs", [40, pytest.param(400, marks=pytest.mark.long)])
def test_a_killed_recorder_loses_at_most_a_second(
    nursery: RecordedJobs, tmp_path: Path, runs: int
) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        lost = list(threads.map(lambda n: kill_once(nursery, tmp_path / str(n), n), range(runs)))
    assert len(lost) == runs
    print("lost, ms:", [round(ns / 1e6) for ns in sorted(lost)])
    assert max(lost) <= LOST_AT_MOST_NS


def test_a_killed_job_keeps_its_last_spans(nursery: RecordedJobs, tmp_path: Path) -> None:
    out, job = tmp_path / "out", make_job_id("dies")
    program = textwrap.dedent("""
        import os, signal, time
        import _clusterprof_probe as probe
        probe.prepare()
        with probe.span("first"):
            pass
        time.sleep(0.5)  # a ring comes with the first span; the recorder looks for it at 10 Hz
        for number in range(5):
            with probe.span("last"):
                time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    script = tmp_path / "train.py"
    script.write_text(program)
    nursery.start(out, job, PYTHON, str(script))
    assert nursery.status(job) == signal.SIGKILL
    wait_for_end(out)
    spans = [record for record in read_records(out) if isinstance(record, Spans)]
    kinds = [kind for span in spans for kind in span.columns["kind"]]
    assert kinds.count(layout.FIRST_USER_KIND + 1) == 5
    assert spans[-1].names[layout.FIRST_USER_KIND + 1] == "last"


def test_a_stopped_recorder_does_not_stop_the_job(nursery: RecordedJobs, tmp_path: Path) -> None:
    out, stop, printed, job = (
        tmp_path / "out",
        tmp_path / "stop",
        tmp_path / "said",
        make_job_id("stop"),
    )
    nursery.start(out, job, PYTHON, "-c", TRAINER, str(stop), str(printed))
    agent = find_recorder_pid(job)
    wait_until(lambda: list(get_run_dir(job).glob("rings/*.json")))  # it trains
    time.sleep(0.3)
    os.kill(agent, signal.SIGSTOP)
    time.sleep(0.5)
    stop.touch()
    assert os.waitstatus_to_exitcode(nursery.status(job)) == 7
    os.kill(agent, signal.SIGCONT)
    wait_for_end(out)
    steps = int(printed.read_text().split()[0])
    assert (
        len(list_span_ends(read_records(out))) >= steps
    )  # 250 in half a second: the ring held them


def test_a_new_process_of_the_job_replaces_a_killed_recorder(tmp_path: Path) -> None:
    job = make_job_id("again")
    out, env = tmp_path / "out", make_environment(job)
    first = subprocess.Popen([*RECORD, "-o", str(out), "--", "/bin/sleep", "60"], env=env)
    wait_for_recording(out)
    os.kill(find_recorder_pid(job), signal.SIGKILL)
    subprocess.run([*RECORD, "-o", str(out), "--", "/bin/true"], env=env, check=True)
    # A process that ends before a recorder knows it is not that recorder's to report.
    wait_until(lambda: first.pid in _pids_of_events(out, "process-registered", recorders=2))
    first.kill()
    first.wait()
    # The run directory goes before the last frames are written.
    wait_until(lambda: first.pid in _pids_of_events(out, "process-exited", recorders=2))
    wait_until(lambda: not get_run_dir(job).exists())
    assert len(list_node_folders(out)) == 2  # one for each recorder


def _pids_of_events(out: Path, kind: str, recorders: int) -> set[int]:
    """Return the pids in a kind of event of the last recorder, once so many have written."""
    folders = list_node_folders(out)
    if len(folders) < recorders:
        return set()
    return {
        record.attributes["pid"]
        for record in NodeReader(folders[-1])
        if isinstance(record, Event) and record.kind == kind
    }
