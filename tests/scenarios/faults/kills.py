"""kill -9 at random moments, processes that are frozen, and jobs that end in every way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from clusterprof.probe import layout
from clusterprof.trace.schema import Event, Record
from tests.scenarios.faults.devices import list_device_times
from tests.scenarios.faults.model import Fault, Trial
from tests.scenarios.faults.rig import (
    RecordedJob,
    count_spans,
    draw_pause,
    find_largest_gap_s,
    list_children,
    list_times,
    read_recording,
    simulate_driver,
    wait_until_gone,
)
from tests.support.killed_jobs import RecordedJobs, measure_lost_ns, read_cpu_delay_ns
from tests.support.nvml.simulated import make_uuid
from tests.support.recording_runs import is_alive, list_events, make_job_id, wait_until

MAX_RUN_S = 2.0
LONG_FREEZE_S = 7.0
WORK = layout.FIRST_USER_KIND
LOST_AT_MOST_S = 1.0
GONE_AT_MOST_S = 2.0
MAX_HELPER_GAP_NS = 5_000_000_000
"""A new helper starts Python and the driver's library, here on a machine with other work."""
CODES = (*range(256), *(-number for number in range(1, 32) if number not in (17, 18, 23, 28)))
"""Exit codes, and signals that end a process or are tried; CHLD, CONT, URG and WINCH do not."""
STOPPING = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}

# Forks a worker every 50 ms that marks spans until it is killed; says how many spans each marked.
FORKER = """
import mmap, os, sys, time
import _clusterprof_probe as probe
probe.prepare()
stop, answer, page = sys.argv[1:4]
with probe.span("work"):
    pass
shared = mmap.mmap(-1, 8)
with open(page, "r+b") as file:
    done = mmap.mmap(file.fileno(), 8)
worker = os.fork()
if worker == 0:
    for number in range(40000):
        with probe.span("work"):
            time.sleep(0.002)
        shared[:8] = (number + 1).to_bytes(8, "little")
    os._exit(0)
done[:8] = worker.to_bytes(8, "little")
os.waitpid(worker, 0)
marked = int.from_bytes(shared[:8], "little")
steps, value = 0, 1
while not os.path.exists(stop):
    time.sleep(0.01)
with open(answer, "w") as file:
    file.write("%d %d" % (steps, value))
with open(answer + ".worker", "w") as file:
    file.write(str(marked))
sys.exit(7)
"""


def _check_loss(records: list[Record], killed_ns: int, delayed_ns: int) -> Trial:
    """Return how much was lost before a kill; time without a CPU does not count."""
    lost_s = (measure_lost_ns(records, killed_ns) - delayed_ns) / 1e9
    assert lost_s <= LOST_AT_MOST_S, f"{lost_s:.2f} s were lost"
    return Trial(max(lost_s, 0.0))


def kill_recorder(folder: Path, number: int) -> Trial:
    """Kill the recorder; the job goes on, and what was written before is there."""
    with RecordedJob(folder, number) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        before_ns = read_cpu_delay_ns(agent)
        time.sleep(draw_pause(number, 0, MAX_RUN_S))
        killed_ns, delayed_ns = time.monotonic_ns(), read_cpu_delay_ns(agent) - before_ns
        os.kill(agent, signal.SIGKILL)
        steps = job.steps
        job.wait_for_steps(steps + 50)
        job.end()
    records, reader = read_recording(job.out)
    assert reader.damage.damaged_places == 0
    return _check_loss(records, killed_ns, delayed_ns)


def kill_both(folder: Path, number: int) -> Trial:
    """Kill recorder and job at the same moment, as a cgroup is killed."""
    with RecordedJob(folder, number) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        before_ns = read_cpu_delay_ns(agent)
        time.sleep(draw_pause(number, 0, MAX_RUN_S))
        killed_ns, delayed_ns = time.monotonic_ns(), read_cpu_delay_ns(agent) - before_ns
        os.kill(job.process.pid, signal.SIGKILL)
        os.kill(agent, signal.SIGKILL)
        wait_until_gone(agent)
        assert job.process.wait() == -signal.SIGKILL
    records, reader = read_recording(job.out)
    assert reader.damage.damaged_places == 0
    return _check_loss(records, killed_ns, delayed_ns)


def kill_job(folder: Path, number: int) -> Trial:
    """Kill the job; all spans that it had finished are recorded, and the recorder goes too."""
    with RecordedJob(folder, number) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        time.sleep(draw_pause(number, 0.3, MAX_RUN_S))
        os.kill(job.process.pid, signal.SIGKILL)
        assert job.process.wait() == -signal.SIGKILL
        steps = job.steps
        gone_s = wait_until_gone(agent)
    records, reader = read_recording(job.out)
    assert reader.damage.damaged_places == 0
    kept, dropped = count_spans(records, WORK)
    assert kept + dropped >= steps, f"{steps} spans finished, {kept} recorded, {dropped} counted"
    (end,) = [item for item in records if isinstance(item, Event) and item.kind == "process-exited"]
    assert end.attributes["signal"] in (signal.SIGKILL, None)
    assert gone_s <= GONE_AT_MOST_S, f"the recorder was there {gone_s:.1f} s after the job"
    return Trial(float(max(steps - kept, 0)), facts={"recorder gone after, s": round(gone_s, 2)})


def kill_worker(folder: Path, number: int) -> Trial:
    """Kill a forked worker of the job; the job goes on and the worker's spans are recorded."""
    with RecordedJob(folder, number, program=FORKER) as job:
        job.wait_for_steps(1)
        worker = job.steps
        job.wait_for_rings()
        time.sleep(draw_pause(number, 0.3, MAX_RUN_S))
        os.kill(worker, signal.SIGKILL)
        agent = job.find_recorder()
        job.end()
        wait_until_gone(agent)
        marked = int((folder / "answer.worker").read_text())
    records, _ = read_recording(job.out)
    kept, dropped = count_spans(records, WORK)
    kept -= 1  # the parent's own
    assert kept + dropped >= marked, f"{marked} spans were finished, {kept} recorded"
    return Trial(float(max(marked - kept, 0)))


def kill_helper(folder: Path, number: int) -> Trial:
    """Kill the process that asks the driver; the recorder goes on and starts another."""
    _, own = simulate_driver(folder)
    with RecordedJob(folder, number, **own) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        wait_until(lambda: list_device_times(read_recording(job.out)[0], make_uuid(0)))
        time.sleep(draw_pause(number, 0, 1.0))
        (helper,) = list_children(agent)
        killed_ns = time.monotonic_ns()
        os.kill(helper, signal.SIGKILL)
        wait_until(lambda: list_events(job.out, "helper-died"))
        wait_until(
            lambda: max(list_device_times(read_recording(job.out)[0], make_uuid(0))) > killed_ns
        )
        assert is_alive(agent)
        job.end()
        wait_until_gone(agent)
    records, reader = read_recording(job.out)
    assert reader.damage.damaged_places == 0
    gpu = list_device_times(records, make_uuid(0))
    before, after = (max(t for t in gpu if t <= killed_ns), min(t for t in gpu if t > killed_ns))
    assert after - before <= MAX_HELPER_GAP_NS, f"{(after - before) / 1e9:.1f} s"
    return Trial(
        (after - before) / 1e9, facts={"gap of cpu, s": find_largest_gap_s(list_times(records))}
    )


def freeze_recorder(folder: Path, number: int) -> Trial:
    """Stop the recorder for a while; the job goes on, what fits the ring is recorded."""
    with RecordedJob(folder, number) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        time.sleep(draw_pause(number, 0.2, 0.6))
        os.kill(agent, signal.SIGSTOP)
        steps = job.steps
        job.wait_for_steps(steps + 100)
        # every fourth for so long that spans are overwritten in the ring
        time.sleep(LONG_FREEZE_S if number % 4 == 3 else draw_pause(number, 0, 1.5))
        os.kill(agent, signal.SIGCONT)
        job.end()
        steps = job.steps
        wait_until_gone(agent)
    records, reader = read_recording(job.out)
    assert reader.damage.damaged_places == 0
    kept, dropped = count_spans(records, WORK)
    assert kept + dropped >= steps, f"{steps} spans finished, {kept} recorded, {dropped} counted"
    return Trial(float(max(steps - kept, 0)))


def freeze_job(folder: Path, number: int) -> Trial:
    """Stop the job for a while; the recorder records on."""
    with RecordedJob(folder, number) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        os.kill(job.process.pid, signal.SIGSTOP)
        stopped_ns = time.monotonic_ns()
        time.sleep(draw_pause(number, 0.5, 1.5))
        continued_ns = time.monotonic_ns()
        os.kill(job.process.pid, signal.SIGCONT)
        steps = job.steps
        job.wait_for_steps(steps + 20)
        job.end()
        wait_until_gone(agent)
    records, _ = read_recording(job.out)
    inside = [t for t in list_times(records) if stopped_ns <= t <= continued_ns]
    assert inside, "nothing was sampled while the job was stopped"
    kept, dropped = count_spans(records, WORK)
    assert kept + dropped >= job.steps
    return Trial(float(max(job.steps - kept, 0)))


def end_recorder(folder: Path, number: int) -> Trial:
    """Ask the recorder to end (SIGTERM, SIGINT); the last frame is written and the job goes on."""
    with RecordedJob(folder, number) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        time.sleep(draw_pause(number, 0.1, 1.0))
        asked_ns = time.monotonic_ns()
        os.kill(agent, (signal.SIGTERM, signal.SIGINT)[number % 2])
        gone_s = wait_until_gone(agent)
        assert len(list_events(job.out, "recorder-stopped")) == 1
        steps = job.steps
        job.wait_for_steps(steps + 20)
        job.end()
    records, reader = read_recording(job.out)
    assert reader.damage.damaged_places == 0 and reader.damage.torn_tail_bytes == 0
    lost_s = max(0.0, (asked_ns - max(list_times(records))) / 1e9)
    assert gone_s <= GONE_AT_MOST_S, f"it took {gone_s:.1f} s"
    return Trial(lost_s, facts={"gone after, s": round(gone_s, 2)})


def end_in_every_way(folder: Path, number: int) -> Trial:
    """End jobs with every exit code and signal: the status is that of the command alone."""
    nursery = RecordedJobs()
    try:
        for code in CODES:
            if code < 0 and -code in STOPPING:
                continue
            job = make_job_id(f"end{number}-{code}")
            words = f"exit {code}" if code >= 0 else f"kill -{-code} $$; exit 0"
            nursery.start(folder / str(code), job, "/bin/sh", "-c", words)
            status = os.waitstatus_to_exitcode(nursery.status(job))
            assert status == code, f"{words!r} ended with {status}"
    finally:
        nursery.close()
    return Trial(injected=len(CODES) - len(STOPPING))


def _kill(
    name: str, title: str, inject: Callable[[Path, int], Trial], unit: str, short: int = 24
) -> Fault:
    return Fault(name, title, "SIGKILL at a random moment", inject, short, 500, unit, at_once=4)


FAULTS = (
    _kill("kill-recorder", "the recorder is killed", kill_recorder, "s", 40),
    _kill("kill-helper", "the process that asks the driver is killed", kill_helper, "s"),
    _kill("kill-both", "recorder and job are killed together", kill_both, "s", 40),
    _kill("kill-job", "the job is killed", kill_job, "spans"),
    _kill("kill-worker", "a worker of the job is killed", kill_worker, "spans"),
    Fault(
        "freeze-recorder",
        "the recorder is stopped for up to 7 s and goes on",
        "SIGSTOP, SIGCONT",
        freeze_recorder,
        16,
        200,
        "spans",
        at_once=4,
    ),
    Fault(
        "freeze-job",
        "the job is stopped for up to 1.5 s and goes on",
        "SIGSTOP, SIGCONT",
        freeze_job,
        8,
        100,
        "spans",
        at_once=4,
    ),
    Fault(
        "end-recorder",
        "the recorder is asked to end",
        "SIGTERM, SIGINT at a random moment",
        end_recorder,
        16,
        200,
        "s",
        at_once=4,
    ),
    Fault(
        "exit-status",
        "the job ends with every exit code and every signal",
        "`sh -c 'exit N'`, `kill -N $$`",
        end_in_every_way,
        1,
        4,
        counted="ends",
    ),
)
