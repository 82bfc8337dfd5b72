"""RDMA ports of fixture machines whose counters are read when a test asks for it."""

from __future__ import annotations

import time

from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.collectors.rdma import RdmaCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import NothingNew, Unavailable

PATIENCE = 20.0
COUNTERS = [
    "receive_bytes_total",
    "transmit_bytes_total",
    "transmit_wait_total",
    "cnp_total",
    "cnp_sent_total",
    "ecn_marked_total",
    "out_of_sequence_total",
    "retransmits_total",
    "discards_total",
    "link_downed_total",
    "symbol_errors_total",
    "receive_errors_total",
    "link_recoveries_total",
    "out_of_buffer_total",
    "not_ready_total",
]
LINK = ["state_count", "link_bytes_per_second", "link_width_lanes_count"]


_RIGS: list[RdmaRig] = []


def close_rigs() -> None:
    """Close every collector: a waiting thread keeps it alive, and its files stay open."""
    while _RIGS:
        _RIGS.pop().collector.close()


class RdmaRig:
    """A collector whose counters are read anew at each reading that the test asks for."""

    def __init__(self, roots: Roots) -> None:
        self.now_ns = 0
        context = Context(roots, None, list)
        self.collector = RdmaCollector(context, self.clock, first_wait_seconds=PATIENCE)
        self.columns = self.collector.open()
        _RIGS.append(self)

    def clock(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def read_all(self) -> dict[tuple[str, str], Value]:
        """Return the next reading, however long it takes."""
        self.now_ns += 1_000_000  # a reading takes nanoseconds of this clock: it may rest over
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                values = self.collector.sample()
            except NothingNew:
                time.sleep(0.001)
                continue
            keys = [(signal.name, device) for signal, device in self.columns]
            return dict(zip(keys, values, strict=True))
        raise AssertionError("nothing was read")

    def read_fresh(self) -> dict[tuple[str, str], Value]:
        """Return a reading that began after this call."""
        self.read_all()
        return self.read_all()


def pick_port(zoo: dict[tuple[str, str], Value], port: str, names: list[str]) -> list[Value]:
    return [zoo[f"rdma.{name}", port] for name in names]


def make_not_counted() -> Unavailable:
    return Unavailable("absent", "the driver has no such counter", "")


def make_saturated(port: str, name: str, value: int) -> Unavailable:
    message = f"{name} of {port} is saturated at {value} and counts no further"
    return Unavailable("failed", message, "reset it with perfquery -R")
