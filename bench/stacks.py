"""What do sampled stacks cost the job, and how true are they?

Cost: a loop of Python and numpy in a training process and in a worker, in rounds with the probe's
thread and without it, in turns: by how much the process's CPU time grows, that of the thread
included, with its 95 % interval (limit 0.1 %, its upper end 0.2 %). The sampler's own CPU time
comes from its report (limit 0.1 % of the time). Bias: loops whose lines measure their own shares
of time, against the shares of the samples: all samples as they are, and with late samples moved
from a call that gives the interpreter lock away to the Python before it.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from clusterprof.agent.launch import launcher
from tests.support.probe_jobs import STACK_SAMPLE, STACK_SAMPLER, list_stacks, parse_ring

COST_S = 240.0
ROUND = 2000  # pieces of work in a round with stacks, or without: about three seconds
BIAS_S = 60.0
LATE_NS = 300_000
"""A sample later than this waited for the interpreter lock."""

HEAD = """
import json, sys, time
now, cpu = time.perf_counter_ns, time.process_time_ns
probe = sys.modules.get("_clusterprof_probe")
length_s = float(sys.argv[2])
SPENT = {}

def spend_python(ns):
    end = now() + ns
    while now() < end:
        pass

def start(helper):
    ring = probe.load()
    if helper:
        ring.helper = True
    ring.emit(64, 1, 2)
    if helper:
        probe._annotations.stacks.note_fetch()

def finish(rounds):
    import _clusterprof_probe.interpreter_lock as watch
    watch._stop_at_exit()
    words = probe.load()._words
    with open(sys.argv[1], "wb") as file:
        file.write(bytes(words.cast("B")))
    print(json.dumps({"rounds": rounds, "spent": SPENT}))
"""

COST_JOB = """
import numpy as np

def work():
    x = np.arange(20_000, dtype=np.float64)
    total = 0
    for number in range(3_000):
        total += number * number % 7
        if number % 300 == 0:
            total += float(np.sqrt(x).sum())
    return total

def descend(depth):
    return descend(depth - 1) if depth else run()

def run():
    import _clusterprof_probe.interpreter_lock as watch
    rounds = []
    end, was_on = now() + int(length_s * 1e9), True
    while now() < end:
        for on in (False, True) if len(rounds) % 4 else (True, False):
            watch.stop()
            if on:
                for sampler in () if was_on else watch._samplers:
                    sampler.started_ns += now() - stopped  # its budget is of the time that it runs
                watch._start_watching()
            elif was_on:
                stopped = now()
            was_on = on
            used = cpu()
            for _ in range(ROUND):
                work()
            rounds.append([int(on), cpu() - used])
    return rounds

start(HELPER)
finish(descend(15))
"""

BIAS_JOB = """
import hashlib
DATA = bytes(1 << 20)

def spend_hash(ns):  # gives the interpreter lock away
    end = now() + ns
    while now() < end:
        hashlib.sha256(DATA[: 1 << 19]).digest()

def spend_calls(ns):  # Python that gives the lock away for a moment after each 0.4 ms
    end = now() + ns
    while now() < end:
        spend_python(400_000)
        hashlib.sha256(DATA[:4096]).digest()

def spend_sleep(ns):
    time.sleep(ns / 1e9)

def run():
    parts = PARTS
    names = [name for name, _, _ in parts]
    functions = {name: make(name, function) for name, function, _ in parts}
    end = now() + int(length_s * 1e9)
    while now() < end:
        for name, _, ns in parts:
            began = now()
            functions[name](ns)
            SPENT[name] = SPENT.get(name, 0) + now() - began
    return []

def make(name, function):
    space = {"function": globals()[function]}
    exec("def %s(ns):\\n    function(ns)" % name, space)
    return space[name]

import _clusterprof_probe.interpreter_lock as watch
# More samples, and so less chance in the result.
watch.PAUSE_S, watch.MAX_CPU_RATIO, watch.MAX_HELD_RATIO = 0.02, 0.1, 0.1
start(False)
finish(run())
"""

MS = 1_000_000
PYTHON, SLEEP, HASH, CALLS = "spend_python", "spend_sleep", "spend_hash", "spend_calls"
LOOPS = {  # title -> name of the line, function that spends its time, ms
    "Python only, 7 to 60 ms": [("a", PYTHON, 60), ("b", PYTHON, 26), ("c", PYTHON, 7)],
    "Python only, 1 to 4 ms": [("a", PYTHON, 4), ("b", PYTHON, 2), ("c", PYTHON, 1)],
    "blocking only": [("a", SLEEP, 30), ("b", SLEEP, 12), ("c", HASH, 8)],
    "mixed, Python over 5 ms": [("a", PYTHON, 25), ("b", SLEEP, 15), ("c", HASH, 10)],
    "mixed, Python under 5 ms": [("a", PYTHON, 3), ("b", SLEEP, 4), ("c", HASH, 3)],
    "mixed, with short calls": [("a", CALLS, 12), ("b", HASH, 3), ("c", SLEEP, 3)],
    "mixed, step of 50 ms": [("a", PYTHON, 20), ("b", SLEEP, 20), ("c", PYTHON, 10)],
}


@dataclass(frozen=True)
class Job:
    """What a job measured, and its ring."""

    rounds: list[tuple[int, int]]
    """Per round: 1 with stacks, 0 without; CPU time of the process, ns."""
    spent: dict[str, int]
    """Per line of a loop: its time, ns."""
    ring: bytes


def run_job(folder: Path, code: str, stacks: launcher.StackPaths | None, length_s: float) -> Job:
    """Run a job under the probe with stacks on or off."""
    run_dir = folder / f"run-{stacks}"
    if not run_dir.exists():
        run_dir.mkdir(mode=0o700)
        launcher.install_probe(run_dir, gpu_events=False, strict=False, stacks=stacks)
    environ = launcher.with_probe_path(run_dir, os.environ)
    environ.pop("CLUSTERPROF_DISABLE", None)
    path = folder / "ring"
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code, str(path), str(length_s)],
        env=environ,
        check=True,
        capture_output=True,
        text=True,
    )
    result = json.loads(done.stdout)
    rounds = [(on, used) for on, used in result["rounds"]]
    return Job(rounds, result["spent"], path.read_bytes())


def main() -> None:
    """Measure costs in pairs, then the bias of each loop."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, helper in (("training loop", "False"), ("worker", "True")):
            measure_slowdown(
                folder, title, COST_JOB.replace("HELPER", helper).replace("ROUND", str(ROUND))
            )
        print("bias, points of the line that is farthest off (raw; late samples moved):")
        for title, parts in LOOPS.items():
            measure_bias(folder, title, parts)


def measure_slowdown(folder: Path, title: str, code: str) -> None:
    """Print how much longer a round takes with stacks, and the sampler's own CPU time."""
    job = run_job(folder, code, "full", COST_S)
    pairs = [dict(job.rounds[at : at + 2]) for at in range(0, len(job.rounds) - 1, 2)]
    slowdowns = sorted(pair[1] / pair[0] - 1 for pair in pairs)
    mean, half = estimate_mean(slowdowns)
    (report, *_) = ring = parse_ring(job.ring).of(STACK_SAMPLER)
    samples, own_ns = sum(span.a for span in ring), sum(span.b for span in ring)
    elapsed_ns = (ring[-1].end_ns - report.start_ns) / 2  # half of the rounds are without
    print(
        f"{title:<14} slowdown {mean:+.3%} ± {half:.3%}  "
        f"({len(pairs)} pairs; limit 0.1 %, upper end 0.2 %)"
    )
    print(
        f"{'':<14} sampler's own CPU {own_ns / elapsed_ns:.3%} of the time (limit 0.1 %), "
        f"{own_ns / samples / 1e3:.0f} µs a sample, {samples / elapsed_ns * 1e9:.1f} samples/s"
    )


def estimate_mean(values: list[float]) -> tuple[float, float]:
    """Estimate a mean without the outer fifths, and half of its 95 % interval.

    values: sorted. Source: Yuen, Biometrika 61 (1974): the trimmed mean and its standard error.
    """
    cut = len(values) // 5
    middle = values[cut : len(values) - cut]
    ends = [middle[0]] * cut, [middle[-1]] * cut
    spread = statistics.stdev([*ends[0], *middle, *ends[1]])
    return statistics.fmean(middle), 2.0 * spread / (0.6 * math.sqrt(len(values)))


def measure_bias(folder: Path, title: str, parts: list[tuple[str, str, int]]) -> None:
    """Print by how many points the shares of samples differ from the shares of time."""
    listed = [(name, function, ms * MS) for name, function, ms in parts]
    job = run_job(folder, BIAS_JOB.replace("PARTS", repr(listed)), "full", BIAS_S)
    ring = parse_ring(job.ring)
    named = list_stacks(ring.log)
    total = sum(job.spent.values())
    functions = {name: function for name, function, _ in parts}
    order = [name for name, _, _ in parts]
    raw, moved = dict.fromkeys(job.spent, 0.0), dict.fromkeys(job.spent, 0.0)
    late = count = 0
    for span in ring.of(STACK_SAMPLE):
        line = next((frame[1] for frame in named[span.a] if frame[1] in raw), None)
        if line is None:
            continue
        count += 1
        raw[line] += span.b
        is_late = span.end_ns - span.start_ns > LATE_NS
        late += is_late
        before = order[order.index(line) - 1]
        if (
            is_late
            and functions[line] not in (PYTHON, CALLS)
            and functions[before] in (PYTHON, CALLS)
        ):
            line = before  # it ran Python before: that of the line before, which is known here
        moved[line] += span.b
    if "-v" in sys.argv:
        late_ms = sorted((span.end_ns - span.start_ns) / 1e6 for span in ring.of(STACK_SAMPLE))
        print({name: (job.spent[name] / total, raw[name], moved[name]) for name in raw})
        print([late_ms[len(late_ms) * i // 20] for i in range(20)])
    errors = [
        max(abs(shares[name] / sum(shares.values()) - job.spent[name] / total) for name in raw)
        for shares in (raw, moved)
    ]
    noise = 1.96 * math.sqrt(0.25 / max(count, 1))
    print(
        f"  {title:<26} {errors[0] * 100:5.1f}  {errors[1] * 100:5.1f}   "
        f"({count} samples, {late / max(count, 1):.0%} late, chance ± {noise * 100:.1f})"
    )


if __name__ == "__main__":
    main()
