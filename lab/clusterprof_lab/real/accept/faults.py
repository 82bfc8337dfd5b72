"""Injected faults of an emulated cluster; their truth comes from the stopwatches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clusterprof_lab.real.cable import Link
from clusterprof_lab.real.node import Node

DATA_BYTES = 64 << 20
SLOW_DISK_BYTES_PER_SECOND = 8_000_000
_THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.read_bps_device")
_WHERE = "/dev/shm/data"
# Two ranks of a node read 5 MiB a step: for less than a step, from a slow disk for more.
_READS = ("--reads=1", "--read-bytes=327680")
_MANY_READS = ("--reads=60", "--read-bytes=327680")
_JOB = ("--compute-ms=500", "--model-mb=1.2", *_READS)

SYNCHRONIZATION = frozenset({"sync-slow-compute", "sync-imbalance"})
NETWORK = frozenset({"net-transfer", "net-congestion", "net-link", "net-path"})
STORAGE = frozenset({"storage-local"})
CONTENTION = frozenset({"cpu-contention"})
PREPROCESSING = frozenset({"cpu-preprocess"})


@dataclass(frozen=True, slots=True)
class Expected:
    """A cause that an analysis must find."""

    causes: frozenset[str]
    """Any of these, which count together."""
    nodes: frozenset[int] = frozenset()
    """Whose ranks may be named; without any, `ranks` may."""
    ranks: frozenset[int] = frozenset()
    """If neither node has one, no rank is the culprit, or the link between the nodes is."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One job on two nodes: what is wrong with which, and what must be found."""

    name: str
    what: str
    expected: Sequence[Expected] = ()
    """The largest first. None: no finding of `CLEAN_BELOW_RATIO` or more."""
    links: Mapping[int, Link] = field(default_factory=dict)
    slow_disk: int | None = None
    hogs: int | None = None
    options: Sequence[str] = ()
    """Of every node's script, beside the job's own."""
    mtu_bytes: int = 9000
    """Jumbo frames, as clusters have them: a sixth of the work for the cable."""
    nodes: int = 2
    per_node: int = 2


# A link is passed once up and once down: two links of a delay give a one-way delay of both.
SCENARIOS = (
    Scenario("clean", "nothing is wrong"),
    Scenario(
        "slow-disk",
        f"node 1 reads from a disk with {SLOW_DISK_BYTES_PER_SECOND / 1e6:.0f} MB/s",
        (Expected(STORAGE, nodes=frozenset({1})),),
        slow_disk=1,
    ),
    Scenario(
        "cpu-hogs",
        "three endless loops on node 1's CPU, all decode",
        (Expected(CONTENTION, nodes=frozenset({1})),),
        hogs=1,
        options=("--decode-ms=140",),
    ),
    Scenario(
        "slow-rank",
        "rank 3 computes 1.5 times as long",
        (Expected(SYNCHRONIZATION, ranks=frozenset({3})),),
        options=("--own", "3", "compute_ms=750"),
    ),
    Scenario(
        "slow-link",
        "node 1's link carries 300 Mbit/s",
        (Expected(NETWORK),),
        links={1: Link(rate_bits_per_second=300_000_000)},
    ),
    Scenario(
        "latency", "12 ms one way to node 1", (Expected(NETWORK),), links={1: Link(delay_s=0.012)}
    ),
    Scenario(
        "loss",
        "node 1's link loses 0.4 % of the frames, of 1,500 bytes",
        (Expected(NETWORK),),
        links={1: Link(delay_s=0.0005, loss_ratio=0.004)},
        mtu_bytes=1500,
    ),
    Scenario(
        "disk-and-link",
        "node 0 reads from a slow disk, node 1's link carries 300 Mbit/s",
        (Expected(STORAGE, nodes=frozenset({0})), Expected(NETWORK)),
        links={1: Link(rate_bits_per_second=300_000_000)},
        slow_disk=0,
    ),
    Scenario(
        "chain",
        "rank 0 decodes for long, rank 1 waits for what it sends, the others for rank 1",
        (Expected(PREPROCESSING, ranks=frozenset({0})),),
        options=("--chain", "--own", "0", "decode_ms=650"),
    ),
)


def list_script_options(scenario: Scenario, steps: int, data: str) -> list[str]:
    """Return the options of the script, the same on every node."""
    return [f"--steps={steps}", f"--data={data}", *_JOB, *scenario.options]


def make_records(path: Path) -> Path:
    """Write a file of random records to disk; return its path."""
    with path.open("wb") as file:
        for _ in range(DATA_BYTES >> 20):
            file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    return path


@contextmanager
def mount_slow_disk(node: Node, records: Path) -> Iterator[tuple[str, Sequence[str]]]:
    """Give a node a slow disk with the records; return their path there and options to add.

    A loop device with a file system of the node's own, throttled for the whole machine (nobody
    else reads it). Where that may not be done: the machine's disk and very many more reads.
    """
    if not os.access(_THROTTLE, os.W_OK):
        yield str(records), _MANY_READS
        return
    image = records.with_suffix(".ext4")
    with image.open("wb") as file:
        file.truncate(DATA_BYTES + (32 << 20))
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    attach = ["losetup", "--find", "--show", "--direct-io=on", str(image)]
    loop = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
    try:
        node.run("mkdir", "-p", _WHERE)
        node.run("mount", loop, _WHERE)
    finally:
        # In use, it is only marked: it goes when the node's mount goes, and that with the node.
        subprocess.run(["losetup", "--detach", loop], check=True)
    node.run("cp", str(records), f"{_WHERE}/records")
    node.run("sync", "-f", _WHERE)
    device = os.stat(loop).st_rdev
    number = f"{os.major(device)}:{os.minor(device)}"
    # A rule outlives everything but its own undoing, so a process of its own sees to that.
    undo = ["sh", "-c", f"cat >/dev/null; echo {number} 0 >{_THROTTLE}"]
    guard = subprocess.Popen(undo, stdin=subprocess.PIPE)
    try:
        _THROTTLE.write_text(f"{number} {SLOW_DISK_BYTES_PER_SECOND}")
        yield f"{_WHERE}/records", ()
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


@contextmanager
def run_cpu_hogs(node: Node, count: int = 3) -> Iterator[None]:
    """Keep a node's CPU busy with endless loops."""
    loop = (sys.executable, "-I", "-c", "while True: pass")
    # A session each: the scheduler may share the CPU out to sessions before it does to processes.
    busy = [node.start(*loop, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            # Ours is nsenter; the loop itself is its child in the node.
            for child in (
                Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            ):
                os.kill(int(child), 9)
            process.wait()
