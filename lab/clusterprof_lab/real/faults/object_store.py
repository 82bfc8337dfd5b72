"""A slow object store that the dataset itself reads over HTTP.

As root, the store has a network namespace of its own at the far end of a virtual cable, so its
address is not that of a peer. Otherwise it runs on this machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from clusterprof_lab.real.faults import processes
from clusterprof_lab.real.faults.base import Options, Place, make_read_options

SERVER = Path(__file__).with_name("object_server.py")
READ_BYTES = 131_072
JITTER = 0.2
_OWN_NS = 2_500_000  # of a GET beside its delay: two timers round up to a millisecond each
_LOOPBACK = "127.0.0.1"
_NETWORK = "10.78"
_SLEEP = ["sh", "-c", "ip link set lo up; echo ready; cat >/dev/null"]


class ObjectStore:
    """Each GET takes so long that a batch takes as long as a slowed step.

    A third of it is the delay before the first byte by default; `delayed` of the scenario says
    how much, the rest is the bandwidth of a request.
    """

    name = "object-store"

    def why_not_here(self) -> str:
        """Return why it cannot be made here, "" when it can: serving HTTP needs no privilege."""
        return (
            processes.list_missing_commands("unshare", "ip", "nsenter")
            if _make_isolated_network()
            else ""
        )

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Start the store; records are ranges of one object."""
        reads = int(place.options.get("reads", 2))
        gets = place.items * reads
        delayed = place.get_number("delayed", 0.34)
        budget_ns = 0.0 if place.clean else place.slowed_ns - gets * _OWN_NS
        delay_ns = round(budget_ns * delayed / gets / (1 + JITTER / 2))
        line_s = budget_ns * (1 - delayed) / 1e9
        rate = round(gets * READ_BYTES / line_s) if line_s > 0 else 0
        log = place.make_path("object-store.jsonl")
        with ExitStack() as stack:
            address, enter = _LOOPBACK, list[str]()
            if _make_isolated_network():
                address, enter = stack.enter_context(_make_remote_host(place))
            words = [address, str(delay_ns), str(JITTER), str(rate), str(log)]
            serve = [*enter, sys.executable, "-I", str(SERVER), *words]
            server = stack.enter_context(processes.run_until_stdin_ends(serve))
            port = int(server.stdout.readline())
            data = f"http://{address}:{port}/records"
            yield Options(make_read_options(data, reads, READ_BYTES), log=log)


def _make_isolated_network() -> bool:
    return os.geteuid() == 0


@contextmanager
def _make_remote_host(place: Place) -> Iterator[tuple[str, list[str]]]:
    """Make a host at the far end of a cable of the node; yield its address and how to enter it."""
    with processes.run_until_stdin_ends(["unshare", "--net", *_SLEEP], wait_for=b"ready\n") as host:
        number = host.pid % 16_384  # two stores on one machine must not meet: a subnet of four each
        near, far = f"store{number}", f"far{number}"
        here, there = (f"{_NETWORK}.{number // 64}.{number % 64 * 4 + i}" for i in (1, 2))
        enter = ["nsenter", f"--target={host.pid}", "--net", "--"]
        add = ["ip", "link", "add", near, "type", "veth", "peer", "name", far]
        processes.run_command(*add, "netns", str(host.pid))
        # The link goes when the far host does.
        if place.node is not None:
            processes.run_command("ip", "link", "set", near, "netns", str(place.node.pid))
        for prefix, name, address in (place.make_node_command(), near, here), (enter, far, there):
            processes.run_command(*prefix, "ip", "address", "add", f"{address}/30", "dev", name)
            processes.run_command(*prefix, "ip", "link", "set", name, "up")
        yield there, enter


FAULT = ObjectStore()
