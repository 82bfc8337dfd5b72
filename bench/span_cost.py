"""What does one span cost the job: two readings of the clock and one record in the ring?

The mean is over batches, beside the two clock readings alone, the context manager of the user's
API, an empty one, and a line of logging. p99.9 is over single spans, with two more clock readings.
System calls are counted by strace between two marks of the job.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from clusterprof.agent.launch import launcher

SPANS_TRACED = 1000

JOB = """
import contextlib, logging, os, sys, time
sys.path.insert(0, sys.argv[1])
import clusterprof
import _clusterprof_probe as probe
ring, now = probe.load(), time.monotonic_ns
ring.emit(64, 1, 2)
N, BATCHES = 2000, 300

def clocks():
    for _ in range(N):
        a = now(); b = now()

def spans():
    for _ in range(N):
        a = now(); b = now(); ring.emit(64, a, b, 1, 2, 3, 4)

nothing = contextlib.nullcontext()
log = logging.getLogger("span")
log.addHandler(logging.StreamHandler(open(os.devnull, "w")))
log.setLevel(logging.INFO)

def users():
    for _ in range(N):
        with clusterprof.span("mine"):
            pass

def null():
    for _ in range(N):
        with nothing:
            pass

def logged():
    for _ in range(N // 20):
        a = now(); b = now(); log.info("span %d %d", a, b)

def loop():
    for _ in range(N):
        pass

times = {clocks: [], spans: [], loop: [], users: [], null: [], logged: []}
for _ in range(BATCHES):  # interleaved: a slow moment of the machine meets all of them
    for work, each in times.items():
        count = N // 20 if work is logged else N
        began = now(); work(); each.append((now() - began) / count)

singles = []
for _ in range(200_000):
    began = now()
    a = now(); b = now(); ring.emit(64, a, b, 1, 2, 3, 4)
    singles.append(now() - began)
singles.sort()
for each in times.values():
    print(*each)
print(singles[len(singles) // 2], singles[len(singles) * 999 // 1000])
"""

TRACED = f"""
import os, time
import _clusterprof_probe as probe
ring, now = probe.load(), time.monotonic_ns
ring.emit(64, 1, 2)
os.getppid()
for _ in range({SPANS_TRACED}):
    a = now(); b = now(); ring.emit(64, a, b)
os.getppid()
"""


def main() -> None:
    """Measure in a job of its own, under the probe."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        launcher.install_probe(Path(folder), gpu_events=False, strict=False)
        environ = launcher.with_probe_path(Path(folder), os.environ)
        environ.pop("CLUSTERPROF_DISABLE", None)
        output = subprocess.run(
            [sys.executable, "-c", JOB, str(Path(__file__).resolve().parents[1])],
            env=environ,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        traced = system_calls(environ)
    batches = [[float(word) for word in line.split()] for line in output[:6]]
    clocks, spans, loop, users, null, logged = batches
    middle, late = (int(word) for word in output[6].split())
    bare = statistics.median(loop)
    costs = sorted(span - bare for span in spans)
    reading = statistics.median(clocks) - bare
    mean, least = statistics.fmean(costs), costs[0]
    print(f"one span, mean          {mean:7.0f} ns  (median batch {statistics.median(costs):.0f},")
    print(f"                                    best batch {least:.0f}; target 600)")
    print(f"two readings of a clock {reading:7.0f} ns  {mean / reading:5.1f} × for the whole span")
    for title, each in (
        ("with clusterprof.span()", users),
        ("with nullcontext()", null),
        ("a line of logging", logged),
    ):
        cost = statistics.median(each) - bare
        print(
            f"{title:<23} {cost:7.0f} ns  {cost / statistics.median(costs):5.1f} × one span, median"
        )
    print(f"single spans            {middle:7d} ns median, {late} ns p99.9, with two more readings")
    print(f"system calls in {SPANS_TRACED:,} spans: {traced}  (target 0)")


def system_calls(environ: dict[str, str]) -> str:
    """Return how many system calls lie between the two getppid() of the traced job."""
    if shutil.which("strace") is None:
        return "not counted: strace is not installed"
    with tempfile.NamedTemporaryFile("r") as file:
        command = ["strace", "-f", "-o", file.name, sys.executable, "-c", TRACED]
        subprocess.run(command, env=environ, check=True)
        lines = file.read().splitlines()
    marks = [number for number, line in enumerate(lines) if "getppid()" in line]
    if len(marks) != 2:
        return "not counted: strace did not show the job's marks"
    return str(marks[1] - marks[0] - 1)


if __name__ == "__main__":
    main()
