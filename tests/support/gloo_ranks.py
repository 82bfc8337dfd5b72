"""Ranks of a real gloo job on this machine, under the probe or without it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from clusterprof.agent.launch import launcher
from tests.support import job_python
from tests.support.probe_jobs import (
    LIVENESS_SECONDS,
    UNTIL_HELD,
    Ring,
    RingWatcher,
    Span,
    clean_environment,
)
from tests.support.warm_jobs import WarmJobs

COLLECTIVE = 11
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, GATHER = range(1, 7)
SCATTER, ALL_TO_ALL, BARRIER, SEND, RECV, GRADIENTS = range(7, 13)
BLOCKING, ISSUE, WAIT = range(3)

# Every rank's first lines. One file serves all jobs of a test: each run has a name of its own.
BEGIN = """
import os, sys, time
import torch
import torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=size)
"""
# The recorder's eyes need a moment to open a ring before its process is gone; gloo aborts a rank
# whose peer leaves while it is still at work, so they leave together.
END = f"""
{UNTIL_HELD}
open(sys.argv[1] + ".left%d" % rank, "w").close()
for _ in range(500):
    if all(os.path.exists(sys.argv[1] + ".left%d" % each) for each in range(size)): break
    time.sleep(0.01)
time.sleep(0.05)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Operation:
    """A collective span with its last field decoded."""

    group: int
    number: int
    bytes: int
    what: int
    form: int
    peer: int | None
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def list_operations(ring: Ring) -> list[Operation]:
    assert ring.switched_off == 0
    return [decode_operation(span) for span in ring.of(COLLECTIVE)]


def decode_operation(span: Span) -> Operation:
    what, form, peer = span.d & 0xFF, span.d >> 8 & 0xF, span.d >> 16
    return Operation(
        span.a, span.b, span.c, what, form, peer - 1 if peer else None, span.start_ns, span.end_ns
    )


def hash_group(text: str) -> int:
    """Hash the members of a group ("0,1") as docs/design/waits-between-ranks.md defines it."""
    whole = int.from_bytes(hashlib.blake2b(text.encode()).digest()[:8], "little")
    return whole % 2**63


@dataclass(frozen=True)
class Job:
    """Results of a job of several ranks: output, exit status and ring of each."""

    returncodes: list[int]
    stdout: list[bytes]
    stderr: list[bytes]
    rings: list[Ring]


def launch_ranks(
    code: str, folder: Path, start: Path | WarmJobs | None, size: int = 2, end: str = END
) -> Job:
    """Run `code` in every rank; rings come in the order of the ranks.

    start: the run directory of the probe, None for a job without it; or what forks the ranks.
    """
    run_dir = start.run_dir if isinstance(start, WarmJobs) else start
    if run_dir is None:
        outputs = _run_ranks(code + end, folder, start, size)
        if job_python.IS_ANOTHER and any(code > 0 for code in outputs[0]):
            job_python.skip_if_unsupported(b"".join(outputs[2]))
        return Job(*outputs[:3], [])
    with RingWatcher(run_dir) as watcher:
        outputs = _run_ranks(code + end, folder, start, size)
    if job_python.IS_ANOTHER and any(code > 0 for code in outputs[0]):
        launch_ranks(code, folder, None, size, end)  # skips the test if that fails too
    rings = {ring.pid: ring for ring in watcher.read_rings()}
    ranks = {}
    for path in (run_dir / "register").iterdir():
        content = json.loads(path.read_text())
        if content["pid"] in outputs[3]:  # not of an earlier job
            ranks[int(content["variables"]["RANK"])] = rings.get(content["pid"])
    return Job(*outputs[:3], [ring for _, ring in sorted(ranks.items()) if ring is not None])


def record_ranks(code: str, folder: Path, start: Path | WarmJobs, size: int = 2) -> list[Ring]:
    """Run `code` in every rank under the probe; fail on any error or line on stderr."""
    job = launch_ranks(code, folder, start, size)
    assert job.returncodes == size * [0], b"".join(job.stderr).decode()
    errors = size * [b""]
    if job_python.IS_ANOTHER and job.stderr != errors:  # another PyTorch warns of other things
        errors = launch_ranks(code, folder, None, size).stderr
    assert job.stderr == errors, b"".join(job.stderr).decode()
    assert len(job.rings) == size
    return job.rings


Outputs = tuple[list[int], list[bytes], list[bytes], list[int]]
"""By rank: how it ended, what it wrote to stdout and to stderr, and its pid."""


def _run_ranks(code: str, folder: Path, start: Path | WarmJobs | None, size: int) -> Outputs:
    store = folder / f"store-{os.urandom(4).hex()}"
    shared = {"WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environs = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(size)]
    if isinstance(start, WarmJobs):
        done = start.run_ranks(BEGIN + code, [str(store)], environs)
        codes = [rank.returncode for rank in done]
        stdout, stderr = [rank.stdout for rank in done], [rank.stderr for rank in done]
        return codes, stdout, stderr, [rank.pid for rank in done]
    script = folder / "train.py"  # a file: what is compiled or printed of it names its lines
    script.write_text(BEGIN + code)
    jobs = []
    for environ in environs:
        env = clean_environment(**environ)
        if start is not None:
            env = launcher.with_probe_path(start, env)
        command, pipe = [job_python.PYTHON, str(script), str(store)], subprocess.PIPE
        jobs.append(
            subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, start_new_session=True)
        )
    try:
        outputs = [job.communicate(timeout=LIVENESS_SECONDS) for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    written, printed = (
        [job_python.drop_framework_logs(each) for each in batch] for batch in zip(*outputs)
    )
    return [job.returncode for job in jobs], written, printed, [job.pid for job in jobs]
