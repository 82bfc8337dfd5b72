"""A day of recording in minutes: memory, descriptors, threads and files do not grow."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from bench import kineto
from clusterprof.trace.writer import RecordingWriter
from tests.scenarios.faults.model import Fault, NotPossible, Trial
from tests.scenarios.faults.rig import RecordedJob, read_recording, wait_until_gone
from tests.support.recording_runs import PYTHON
from tests.support.trace_samples import HEADER, SECOND_NS, ManualClock, make_second

DAY_S = 86_400
CAP_BYTES = 8 << 20
MAX_GROWTH_BYTES = 1 << 20
WINDOW_STEPS = 20_000
STEPS = 100_000
RANKS = 64
MAX_ANALYSIS_MIB = 1024

# Marks steps with a pause after every 20; the recorder empties the ring ten times a second.
STEPPER = """
import mmap, os, sys, time
import _clusterprof_probe as probe
probe.prepare()
stop, answer, page = sys.argv[1:4]
with open(page, "r+b") as file:
    done = mmap.mmap(file.fileno(), 8)
steps = 0
while not os.path.exists(stop) if steps % 500 == 0 else True:
    with probe.span("work"):
        pass
    steps += 1
    if steps % 20 == 0:
        done[:8] = steps.to_bytes(8, "little")
        time.sleep(0.004)
with open(answer, "w") as file:
    file.write("0 1")
sys.exit(7)
"""


def write_a_day(folder: Path, number: int) -> Trial:
    """Write a day of seconds with the real writer; memory stays, the folder keeps its limit."""
    clock = ManualClock()
    writer = RecordingWriter(
        folder / "node",
        HEADER,
        clock,
        keep_free_bytes=0,
        max_bytes=CAP_BYTES,
        segment_bytes=1 << 20,
    )
    batches = [make_second(n) for n in range(64)]
    memory: list[int] = []
    descriptors: list[int] = []
    largest = 0
    for past in range(DAY_S):
        clock.now_ns += SECOND_NS
        writer.append(*batches[past % 64])
        if past % 3600 == 3599:
            memory.append(read_resident_bytes(os.getpid()))
            descriptors.append(len(os.listdir("/proc/self/fd")))
            largest = max(largest, sum(f.stat().st_size for f in (folder / "node").iterdir()))
    writer.close()
    grown = memory[-1] - memory[3]
    assert grown <= MAX_GROWTH_BYTES, f"{grown} bytes in 20 h"
    assert descriptors[-1] <= descriptors[3]
    assert largest <= CAP_BYTES + (1 << 20)
    assert writer.frames_dropped == 0
    facts = {"largest folder, bytes": largest, "growth in 20 h, bytes": grown}
    return Trial(float(max(grown, 0)), DAY_S, facts)


def record_many_steps(folder: Path, number: int, steps: int = STEPS) -> Trial:
    """Record a job that marks steps as fast as a ring allows; the recorder stays as it was."""
    options = ("--keep-free", "0 B")
    with RecordedJob(folder, number, options, program=STEPPER) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        looks: list[tuple[int, int, int, int]] = []
        while job.steps < steps:
            if job.steps >= WINDOW_STEPS * (len(looks) + 1):
                looks.append((job.steps, *read_size(agent)))
            time.sleep(0.05)
        looks.append((job.steps, *read_size(agent)))
        job.end()
        wait_until_gone(agent)
    _, reader = read_recording(job.out)
    assert reader.damage.damaged_places == 0
    # a look may fall into a moment in which files are open: the largest of each third is compared
    third = len(looks) // 3
    first, last = (
        tuple(max(values) for values in zip(*part))
        for part in (looks[third:-third], looks[-third:])
    )
    grown = last[1] - first[1]
    assert grown <= MAX_GROWTH_BYTES, f"{grown} bytes between steps {first[0]} and {last[0]}"
    assert last[2] <= first[2], f"{first[2]} descriptors, then {last[2]}"
    assert last[3] <= first[3], f"{first[3]} threads, then {last[3]}"
    return Trial(float(max(grown, 0)), last[0], {"resident, MB": round(last[1] / 1e6, 1)})


def read_many_ranks(folder: Path, number: int, megabytes: int = 16) -> Trial:
    """Analyze traces of 64 ranks; no process takes more than 1 GiB.

    A real trace is repeated up to the size, and copied as that of each rank.
    """
    real = kineto.REAL_RANKS / "rank0.pt.trace.json.gz"
    if not real.is_file():
        raise NotPossible("the real traces are not beside the repository")
    traces = folder / "traces"
    traces.mkdir()
    first = traces / "rank0.pt.trace.json"
    maker = [PYTHON, str(kineto.FOLDER / "_kineto_traces.py"), str(real), str(first)]
    subprocess.run([*maker, "--megabytes", str(megabytes)], check=True, capture_output=True)
    for rank in reversed(range(RANKS)):  # the first last: it is what the others are copies of
        path = traces / f"rank{rank}.pt.trace.json"
        if rank:
            shutil.copy(first, path)
        kineto.renumber_trace(path, rank, RANKS)
    command = [PYTHON, "-m", "clusterprof", "analyze", str(traces)]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (folder / "output").read_text()[-500:]
    peak_mib = usage.ru_maxrss / 1024  # of the largest of its processes
    assert peak_mib <= MAX_ANALYSIS_MIB, f"{peak_mib:.0f} MiB"
    size_mb = sum(path.stat().st_size for path in traces.iterdir()) / 1e6
    return Trial(peak_mib, facts={"MB of traces": round(size_mb)})


def read_resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def read_size(pid: int) -> tuple[int, int, int]:
    """Return resident bytes, descriptors and threads of a process."""
    root = Path(f"/proc/{pid}")
    return (read_resident_bytes(pid), len(os.listdir(root / "fd")), len(os.listdir(root / "task")))


def _record_long(folder: Path, number: int) -> Trial:
    return record_many_steps(folder, number, 1_000_000)


def _read_large(folder: Path, number: int) -> Trial:
    return read_many_ranks(folder, number, 160)


FAULTS = (
    Fault(
        "many-ranks",
        "1 GB of traces of 64 ranks are analyzed",
        "a real trace of PyTorch's profiler, repeated and copied; the largest process is measured",
        read_many_ranks,
        1,
        1,
        "MiB of memory",
    ),
    Fault(
        "many-ranks-large",
        "10 GB of traces of 64 ranks are analyzed",
        "a real trace of PyTorch's profiler, repeated and copied; the largest process is measured",
        _read_large,
        0,
        1,
        "MiB of memory",
    ),
    Fault(
        "written-day",
        "a day is written, second by second",
        "the writer with a clock that is set; 8 MiB allowed",
        write_a_day,
        1,
        7,
        "bytes of growth in 20 h",
        "seconds",
    ),
    Fault(
        "many-steps",
        "a job marks 100,000 steps",
        "a real recorder; the job marks steps as fast as the ring allows",
        record_many_steps,
        1,
        1,
        "bytes of growth",
        "steps",
    ),
    Fault(
        "million-steps",
        "a job marks 1,000,000 steps",
        "a real recorder; the job marks steps as fast as the ring allows",
        _record_long,
        0,
        1,
        "bytes of growth",
        "steps",
    ),
)
