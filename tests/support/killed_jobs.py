"""Jobs that are recorded in parallel and killed, and what is missing from their recordings."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clusterprof.agent.launch import election
from clusterprof.agent.processes.registry import has_live_process
from clusterprof.probe import layout
from clusterprof.trace.schema import Columns, Header, Record, Spans
from tests.support.recording_runs import PYTHON, make_environment, wait_until

# One process that has imported the launcher forks every job: a job costs its Python, not the
# command line's. It answers each [out, job, command…] with "job status" when that job has ended.
NURSERY = """
import json, os, select, sys
from pathlib import Path
from clusterprof.agent.launch.launcher import LaunchRequest, record_command
from clusterprof.agent.options import Plan

jobs, rest, more = {}, b"", True
while more or jobs:
    if more and select.select([0], [], [], 0.02)[0]:
        data = os.read(0, 65536)
        more = bool(data)
        *lines, rest = (rest + data).split(b"\\n")
        for line in lines:
            out, job, *command = json.loads(line)
            child = os.fork()
            if child == 0:
                os.environ["SLURM_JOB_ID"] = job
                request = LaunchRequest(command, Path(out), Plan)
                record_command(request, os.environ, lambda line: None)
            jobs[child] = job
    child, status = os.waitpid(-1, os.WNOHANG if more else 0) if jobs else (0, 0)
    if child:
        print(jobs.pop(child), status, flush=True)
"""

# Marks a span of its own every 2 ms through the real probe, until a file says to end. Says what it
# computed: whatever happens to the recorder, that must be the same.
TRAINER = """
import os, sys, time
import _clusterprof_probe as probe
probe.prepare()
steps, end = 0, time.monotonic() + 20
while time.monotonic() < end and not os.path.exists(sys.argv[1]):
    with probe.span("work"):
        time.sleep(0.002)
    steps += 1
with open(sys.argv[2], "w") as file:
    file.write("%d steps" % steps)
sys.exit(7)
"""


class RecordedJobs:
    """Starts recorded jobs in parallel, and keeps the exit status of each."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [PYTHON, "-c", NURSERY],
            env=make_environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.statuses: dict[str, int] = {}
        self._reader = ThreadPoolExecutor(1)
        self._reader.submit(self._read)

    def start(self, out: Path, job: str, *command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(out), job, *command]) + "\n")
        self._process.stdin.flush()

    def status(self, job: str) -> int:
        wait_until(lambda: job in self.statuses)
        return self.statuses[job]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.shutdown()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            job, status = line.split()
            self.statuses[job] = int(status)


def remove_run_dirs() -> None:
    """Remove the run directories that killed recorders left."""
    prefix = f"{election.RUN_DIR_PREFIX}{os.geteuid()}-"
    election.remove_stale_run_dirs(election.choose_base(os.environ), prefix, has_live_process)


def list_span_ends(records: list[Record]) -> list[int]:
    """List the ends of all spans; their sequence numbers must have no gap."""
    ends: list[int] = []
    expected = 1
    for record in records:
        if isinstance(record, Spans):
            assert (record.first_sequence, record.dropped) == (expected, 0)
            expected += len(record.columns["end_ns"])
            ends += list(record.columns["end_ns"])
            unprompted = {
                layout.GC,
                layout.INTERPRETER_WAIT,
                layout.STACK_SAMPLE,
                layout.STACK_SAMPLER,
            }
            assert set(record.columns["kind"]) <= {layout.FIRST_USER_KIND, layout.STEP} | unprompted
    return ends


def measure_lost_ns(records: list[Record], killed_ns: int) -> int:
    """Measure how much of the time before the kill is missing from samples or spans, ns."""
    samples = [
        int(t)
        for record in records
        if isinstance(record, Columns) and record.collector == "cpu"
        for t in record.t_ns
    ]
    began_ns = next(record for record in records if isinstance(record, Header)).started[
        "monotonic_ns"
    ]
    ends = list_span_ends(records)
    return killed_ns - min(max(samples, default=began_ns), max(ends, default=killed_ns))


def read_cpu_delay_ns(pid: int) -> int:
    """Read how long a process has waited for a CPU, ns: on a busy machine it is late by that."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
