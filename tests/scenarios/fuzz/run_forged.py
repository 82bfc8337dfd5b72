"""Fuzz the analysis with forged recordings, each in a process of its own with limits.

    python -m tests.scenarios.fuzz.run_forged [--inputs N] [--first N] [--state DIR]

Every input is a copy of a recording of tests/recordings with some frames forged (see forge); the
same number is the same input. `clusterprof analyze`, every other time with `--json`, must end in a
report or a clear refusal. Anything else is a finding: another error, more than 6 s of CPU, more
than 512 MiB beyond what the process had, the death of the process. Findings are appended to
DIR/forged.jsonl, and a run goes on where the one before stopped. Returns 1 when anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from tests.scenarios.fuzz.forge import forge_recording

RECORDINGS = Path(__file__).parents[2] / "recordings"
SOURCES = ("v1", "dlrm-8rank", "v1", "v1", "dlrm-8rank", "v1", "h200/sleep", "v1", "dlrm-8rank")
CPU_SECONDS = 6.0
WALL_SECONDS = 300
"""For what waits, and nothing comes; a busy machine is slow."""
MEMORY_BYTES = 512 << 20
GOOD_STATUS = range(7)
SAVED_EVERY = 100
OUTPUTS: tuple[tuple[str, ...], ...] = ((), ("--json",))


class Hang(BaseException):
    """The analysis took more CPU than its bound."""


def main() -> int:
    """Forge and analyze so many recordings; return 1 when anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=5000, help="in all runs")
    parser.add_argument("--first", type=int, help="begin here, whatever was done")
    parser.add_argument("--state", type=Path, default=Path(".fuzz"))
    asked = parser.parse_args()
    asked.state.mkdir(parents=True, exist_ok=True)
    done = asked.state / "forged.json"
    known = json.loads(done.read_text()) if done.is_file() else {"inputs": 0, "findings": {}}
    findings: Counter[str] = Counter(known["findings"])
    first = known["inputs"] if asked.first is None else asked.first
    prepare_process()
    for number in range(first, asked.inputs):
        what, trace = try_forged(number)
        if what:
            findings[what] += 1
            with (asked.state / "forged.jsonl").open("a") as file:
                file.write(json.dumps({"number": number, "what": what, "trace": trace}) + "\n")
        if number % SAVED_EVERY == SAVED_EVERY - 1 or number == asked.inputs - 1:
            done.write_text(json.dumps({"inputs": number + 1, "findings": findings}, indent=1))
            print(f"{number + 1:,} inputs, {findings.total():,} findings", flush=True)
    for what, count in findings.most_common():
        print(f"  {count:,} x {what}")
    return int(bool(findings))


def prepare_process() -> None:
    """Analyze every source once, so that what is imported on first use is there before a fork."""
    for name in dict.fromkeys(SOURCES):
        for words in OUTPUTS:
            what, trace = analyze_recording(RECORDINGS / name, words)
            if what:
                raise SystemExit(f"{name} is not analyzed: {what}\n{trace}")
    gc.freeze()


def try_forged(number: int) -> tuple[str, str]:
    """Forge a recording and analyze it in a fork; ("", "") when no promise was broken."""
    with tempfile.TemporaryDirectory(prefix="clusterprof-forged-", dir=find_memory()) as name:
        run = Path(name) / "run"
        shutil.copytree(RECORDINGS / SOURCES[number % len(SOURCES)], run)
        forge_recording(run, number)
        return run_limited(lambda: analyze_recording(run, OUTPUTS[number % len(OUTPUTS)]))


def analyze_recording(run: Path, words: Sequence[str]) -> tuple[str, str]:
    """Run `clusterprof analyze` with these words; return what was wrong, and its trace."""
    from clusterprof.cli.app import main as run_command

    errors = io.StringIO()
    try:
        output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = run_command(["analyze", str(run), *words])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException as error:  # what escapes is what is looked for
        return describe_error(error)
    if "Traceback" in errors.getvalue():
        return "a traceback", errors.getvalue()[-4000:]
    if status not in GOOD_STATUS:
        return f"exit code {status}", errors.getvalue()[-4000:]
    return "", ""


def describe_error(error: BaseException) -> tuple[str, str]:
    """Name a defect by its error and place, and return the trace too."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/clusterprof/" in frame.filename] or frames
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    return f"{type(error).__name__} at {where}", "".join(traceback.format_exception(error))[-4000:]


def run_limited(call: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Call in a process of its own with limits of CPU, memory and time."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            memory = pages * resource.getpagesize() + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            spent = int(sum(os.times()[:2])) + int(CPU_SECONDS)
            resource.setrlimit(resource.RLIMIT_CPU, (spent + 4, spent + 8))
            signal.signal(signal.SIGPROF, raise_hang)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            signal.alarm(WALL_SECONDS)
            answer = json.dumps(call())
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            os.write(writer, answer.encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        return f"died of signal {-status}", ""
    if not data:
        return "no answer", ""
    what, trace = json.loads(data)
    return what, trace


def raise_hang(_signal: int, _frame: FrameType | None) -> None:
    """End what takes too long, with the place where it was."""
    raise Hang(f"more than {CPU_SECONDS} s of CPU")


def find_memory() -> str | None:
    """Return a folder in memory, None without one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(code)
