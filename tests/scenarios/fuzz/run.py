"""Fuzz what reads files of others: mutated seeds, in processes with limits; findings are kept.

    python -m tests.scenarios.fuzz.run [--format NAME] [--inputs N] [--jobs J] [--state DIR]
                                       [--store FILE]

An input may end in records or in a clear refusal. Anything else is a finding: another error, more
than 2 s of CPU, more than 256 MiB beyond what the process had, the death of the process. The
formats are those of all importers, and our own: recordings, rings, the run directory (own_formats).
Most are read from memory, some from files, and some go through the whole analysis (10 s). A run
goes on where the one before stopped; the same number gives the same input. Findings lie below DIR,
one file per defect with its trace beside it; mend the importer and copy the input to
tests/analysis/importers/fuzzed/<format>/, where a test reads it from then on. The counts are stored
in bench/results/faults.json, from which `make docs` makes a table of docs/reliability.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from tests.scenarios.faults.results import STORE, store_mutations
from tests.scenarios.fuzz.own_formats import OWN_FORMATS
from tests.scenarios.fuzz.trial import (
    READ,
    REFUSED,
    UNKNOWN,
    Format,
    list_imported_formats,
    signature,
)

SECONDS_AT_MOST = 2.0
DEAF_SECONDS_AT_MOST = 30.0  # of CPU: for what holds the interpreter, and hears no alarm
WALL_SECONDS_AT_MOST = 900.0  # for what waits, and nothing comes; a busy machine is slow
MEMORY_BYTES = 256 << 20
BATCH = 10_000
ON_DISK = 100  # one in so many is read from a file, the others from memory
ANALYSED = 1_000  # one in so many goes through the whole analysis
WHOLE_SECONDS_AT_MOST = 10.0
ANALYSIS = "analysis: "
"""Begins the outcomes of whole analyses."""
LIMITED_ANEW = 256  # after so many the memory that a limit starts from is looked at again


class Hang(BaseException):
    """An input took more than 2 s of CPU; a busy machine makes nothing hang."""


def main() -> int:
    """Fuzz some formats; return 1 when anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="", help="name of a format; all without it")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="per format, in all runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--state", type=Path, default=Path(".fuzz"))
    parser.add_argument("--store", type=Path, default=STORE, help="file of the counts")
    asked = parser.parse_args()
    formats: list[Format] = [*list_imported_formats(), *OWN_FORMATS]
    chosen = [format_ for format_ in formats if asked.format in ("", format_.name)]
    if not chosen:
        parser.error(f"no format {asked.format}: {', '.join(item.name for item in formats)}")
    bad = 0
    for format_ in chosen:
        if not format_.cases:
            print(f"{format_.name}: no seeds in tests/analysis/importers/seeds/{format_.name}")
            bad = 1
            continue
        campaign = Campaign(format_, asked.state, asked.inputs, asked.jobs)
        bad |= campaign.run()
        store_mutations(asked.store, format_.name, campaign.count_outcomes())
    return bad


class Campaign:
    """All inputs of one format, over as many runs as it takes."""

    def __init__(self, format_: Format, state: Path, inputs: int, jobs: int) -> None:
        self.format, self.name = format_, format_.name
        self.inputs, self.jobs = inputs, max(jobs, 1)
        self.folder = state / self.name
        self.file = self.folder / "done.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        known = json.loads(self.file.read_text()) if self.file.is_file() else {}
        self.of = format_.make_generator()
        self.done: int = known.get("inputs", 0)
        self.outcomes: Counter[str] = Counter(known.get("outcomes", {}))
        self.findings: Counter[str] = Counter(known.get("findings", {}))

    def run(self) -> int:
        """Run what is left; return 1 when anything was ever found."""
        begun, at = time.monotonic(), self.done
        with tempfile.TemporaryDirectory(prefix="clusterprof-fuzz-", dir=_memory()) as folder:
            # What is imported on first use is there before processes begin.
            for case in self.format.cases:
                self.format.read(case, Path(folder), False)
            self.format.analyze(self.format.cases[0], Path(folder))
        gc.freeze()
        while self.done < self.inputs:
            rounds = min(self.jobs, -(-(self.inputs - self.done) // BATCH))
            workers = []
            for number in range(rounds):
                low = self.done + number * BATCH
                workers.append(Worker(self, low, min(low + BATCH, self.inputs)))
            while any([worker.look() for worker in workers]):
                readable = [worker.pipe for worker in workers if worker.pid]
                select.select(readable, [], [], 0.1)
            self.done = min(self.done + rounds * BATCH, self.inputs)
            self._save()
            rate = (self.done - at) / max(time.monotonic() - begun, 1e-9)
            print(f"\r{self.summarize()} {rate:,.0f}/s ", end="", flush=True)
        print(f"\r{self.summarize()}          ")
        for what, count in self.findings.most_common():
            print(f"  {count:,} x {what}")
        return int(bool(self.findings))

    def summarize(self) -> str:
        """Return the counts in a line."""
        outcomes = ", ".join(f"{count:,} {what}" for what, count in sorted(self.outcomes.items()))
        return f"{self.name}: {self.done:,} inputs: {outcomes}; {len(self.findings)} findings"

    def count_outcomes(self) -> dict[str, int]:
        """Return how many inputs ended in which way, and how many defects they showed."""
        return {
            "inputs": self.done,
            "read": self.outcomes[READ],
            "refused": self.outcomes[REFUSED] + self.outcomes[UNKNOWN],
            "analyzed": sum(
                count for name, count in self.outcomes.items() if name.startswith(ANALYSIS)
            ),
            "defects": len(self.findings),
        }

    def keep_finding(self, number: int, what: str, trace: str) -> None:
        """Keep a finding: the input that showed it first."""
        self.findings[what] += 1
        if self.findings[what] > 1:
            return
        place = self.folder / f"finding-{len(self.findings):03d}"
        place.mkdir(exist_ok=True)
        for name, data in self.of(number).files:
            (place / name.replace("/", "-")).write_bytes(data)
        (place / "trace.log").write_text(f"input {number}: {what}\n{trace}")

    def _save(self) -> None:
        known = {
            "inputs": self.done,
            "outcomes": dict(self.outcomes),
            "findings": dict(self.findings),
        }
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(known, indent=1))
        new.replace(self.file)


class Worker:
    """Some inputs in a process of their own; begun anew after what kills it."""

    def __init__(self, campaign: Campaign, low: int, high: int) -> None:
        self.campaign, self.low, self.high = campaign, low, high
        self.shared = mmap.mmap(-1, 24)
        self.pid = 0
        self._fork()

    def _fork(self) -> None:
        self.pipe, theirs = os.pipe()
        self.answer = b""
        self.shared[:24] = struct.pack("<qdd", self.low, time.monotonic(), 0.0)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            status = 1
            try:
                self._work(theirs)
                status = 0
            finally:
                os._exit(status)
        os.close(theirs)

    def look(self) -> bool:
        """Take what the process says; True while it goes on."""
        if not self.pid:
            return False
        while select.select([self.pipe], [], [], 0)[0]:
            data = os.read(self.pipe, 1 << 16)
            if not data:
                self._ended()
                return bool(self.pid)
            self.answer += data
        number, since, used_s = struct.unpack("<qdd", self.shared[:24])
        deaf = _cpu_s(self.pid) - used_s > DEAF_SECONDS_AT_MOST
        if deaf or time.monotonic() - since > WALL_SECONDS_AT_MOST:
            os.kill(self.pid, signal.SIGKILL)
            self.campaign.keep_finding(number, "hangs, and hears no alarm", "")
        return True

    def _ended(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pipe)
        self.pid = 0
        *lines, _ = self.answer.split(b"\n")
        for line in lines:
            document = json.loads(line)
            if "outcomes" in document:
                self.campaign.outcomes.update(document["outcomes"])
            else:
                self.campaign.keep_finding(document["number"], document["what"], document["trace"])
        if status == 0:
            return
        (number,) = struct.unpack("<q", self.shared[:8])
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not killed:
            self.campaign.keep_finding(number, f"the process ended with status {status}", "")
        self.campaign.outcomes["died"] += 1
        self.low = number + 1
        if self.low < self.high:
            self._fork()

    def _work(self, pipe: int) -> None:
        """In the child: try every input, and tell what was found."""
        format_, of, shared = self.campaign.format, self.campaign.of, self.shared
        outcomes: Counter[str] = Counter()
        folder = Path(tempfile.mkdtemp(prefix="clusterprof-fuzz-", dir=_memory()))
        signal.signal(signal.SIGPROF, _alarm)
        try:
            for number in range(self.low, self.high):
                case = of(number)
                now = time.monotonic(), time.process_time()
                # In one piece: packing into it would show the one who looks zeros for a moment.
                shared[:24] = struct.pack("<qdd", number, *now)
                if (number - self.low) % LIMITED_ANEW == 0:
                    _limit()
                signal.setitimer(signal.ITIMER_PROF, SECONDS_AT_MOST)  # anew for each
                try:
                    outcomes[format_.read(case, folder, number % ON_DISK == 0)] += 1
                    if number % ANALYSED == 0:
                        signal.setitimer(signal.ITIMER_PROF, WHOLE_SECONDS_AT_MOST)
                        if (analyzed := format_.analyze(case, folder)) is not None:
                            outcomes[ANALYSIS + analyzed] += 1
                except BaseException as error:  # whatever comes is what is looked for
                    signal.setitimer(signal.ITIMER_PROF, 0)
                    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
                    outcomes["found"] += 1
                    reported = {"number": number, "what": signature(error), "trace": _trace(error)}
                    os.write(pipe, json.dumps(reported).encode() + b"\n")
                    _limit()
            signal.setitimer(signal.ITIMER_PROF, 0)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.write(pipe, json.dumps({"outcomes": outcomes}).encode() + b"\n")


def _alarm(_signal: int, _frame: FrameType | None) -> None:
    raise Hang(f"more than {SECONDS_AT_MOST} s of CPU, or {WHOLE_SECONDS_AT_MOST} s of all of it")


def _cpu_s(pid: int) -> float:
    """What a process has used of the CPU."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _limit() -> None:
    """Let the process have so much more memory than it has now."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def _memory() -> str | None:
    """Files of a moment go where no disk is touched, if there is such a place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-8000:]


if __name__ == "__main__":
    sys.exit(main())
