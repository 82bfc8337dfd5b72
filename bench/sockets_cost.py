"""What does a sample of the job's TCP connections cost among connections of other processes?

    python bench/sockets_cost.py

CPU time (user + system) of the collector `sockets`, which samples once a second: 60 samples that
are a second apart by its own clock, so that lists, reads of descriptors and pauses come as in a
recording. The connections are real ones between two sockets of this machine's own address. Those
that count as the job's are treated as connections to another node, which costs the same.
"""

from __future__ import annotations

import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.sockets import SocketsCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.network.netlink import map_addresses_to_interfaces
from clusterprof.errors import DevicesChanged

SAMPLES = 60
SECOND_NS = 1_000_000_000
CASES = ((0, 0), (1000, 0), (1000, 32), (1000, 200), (10000, 32))  # of others, of the job
TARGET_US = 1000
# A job: opens so many connections to an address, both their ends its own, and waits.
JOB = """
import socket, sys
address, count = sys.argv[1], int(sys.argv[2])
server = socket.create_server((address, 0), backlog=128)
ends = []
for _ in range(count):
    ends += [socket.create_connection(server.getsockname()), server.accept()[0]]
print("open", flush=True)
sys.stdin.read()
"""


class OutwardAddresses(dict[bytes, str]):
    """The machine's addresses, none of which is taken for the machine's own as a peer's."""

    def __contains__(self, address: object) -> bool:
        return False


def main() -> None:
    """Measure every case and print it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    address = find_own_address()
    print("µs of CPU per sample, one a second: mean, 95 % and most; target mean 1,000")
    for others, ours in CASES:
        processes = [start_job(address, count // 2) for count in (others, ours)]
        try:
            costs = measure(processes[1].pid, ours)
        finally:
            for process in processes:
                process.communicate()
        ranked = sorted(costs)
        print(
            f"  {others:>6} sockets of others, {ours:>4} of the job"
            f"   {statistics.fmean(costs):7.1f} {ranked[len(ranked) * 95 // 100]:7.1f}"
            f" {ranked[-1]:7.1f}",
            flush=True,
        )


def find_own_address() -> str:
    """Return an IPv4 address of this machine that is not loopback."""
    for address, nic in map_addresses_to_interfaces().items():
        if nic != "lo" and len(address) == 4:
            return socket.inet_ntoa(address)
    sys.exit("this machine has no address besides loopback")


def start_job(address: str, count: int) -> subprocess.Popen[str]:
    """Start a process with so many connections, both ends its own."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", JOB, address, str(count)], stdin=pipe, stdout=pipe, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def measure(pid: int, ours: int) -> list[float]:
    """Return the cost of each sample once all connections are known."""
    now = [0]

    def clock() -> int:
        return now[0] + time.monotonic_ns()

    outward = OutwardAddresses(map_addresses_to_interfaces())
    collector: Any = SocketsCollector(
        Context(Roots(), None, lambda: [pid]), clock, addresses=lambda: outward
    )
    collector.open()
    costs = []
    for number in range(SAMPLES + 100):
        now[0] += SECOND_NS
        began = time.process_time_ns()
        try:
            collector.sample()
        except DevicesChanged:
            collector.close()
            collector.open()
        cost = (time.process_time_ns() - began) / 1e3
        if number >= 100:
            costs.append(cost)
    assert len(collector._known) == ours, f"{len(collector._known)} of {ours} were found"
    collector.close()
    return costs


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    main()
