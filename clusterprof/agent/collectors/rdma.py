"""What goes over InfiniBand, RoCE, Omni-Path and Slingshot ports, and what had to be sent again.

Columns: the `rdma.*` signals of every port in /sys/class/infiniband, named "<device>/<port>", and
of every Slingshot card in /sys/class/cxi ("cxi0/1"); one that the driver does not count carries
that reason. Drivers name their own counters differently: those of mlx5, mlx4, bnxt_re, irdma, efa,
ionic, hfi1 and cxi are known, and the counters of the InfiniBand specification.

    driver    bytes are                          which count
    mlx5      port_rcv_data, in words of 4       all the port carried; on Ethernet its RDMA only
    mlx4      port_rcv_data, in words of 4       32 bits on old firmware: unknown at their end
    hfi1      port_rcv_data, in flits of 8       all the port carried; PSM's and verbs' alike
    bnxt_re   rx_roce_only_bytes, or rx_bytes    RoCE, of single addresses
    irdma     ip4InOctets + ip6InOctets          RoCE and iWARP
    efa       rx_bytes                           all the device carried, RDMA reads and writes too
    cxi       hni_sts_rx_ok_octets               all the card carried, TCP too

Some of these have 32, 16 or 8 bits and stop at their end: such a value is unknown from there on,
not a rate of zero. What begins anew at its end steps back, and that step is left out. Files that a
driver never fills (`symbol_error` and `port_xmit_wait` of hfi1) are no counters. Pause frames of a
RoCE port are counted by its network interface: see `ethtool`. Reading asks the card's firmware, so
a thread reads, and a value carries the time at which it was read; state and speed are read every
10 s.

## Source

`/sys/class/infiniband/*/ports/*/{counters,hw_counters,state,rate}`, `/sys/class/cxi`
(Documentation/ABI/stable/sysfs-class-infiniband; names of hw_counters in drivers/infiniband/hw).

## Privilege

None for reading; resetting a counter that stands at its end is root's.

## Cost

A thread reads some 15 files for each port, once a second; reading asks the card's firmware.

## Where it is blind

Which rank or queue pair sent what. A counter at its end is unknown until it is reset. What happens
within a switch shows only as waits, marks and retransmissions at this port. Traffic within the node
(NVLink, shared memory) does not pass here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.linux import rdma_names as names
from clusterprof.linux.aside import Aside
from clusterprof.linux.cxi import CxiPort, cards
from clusterprof.linux.infiniband import Counters, Link, Port, ports
from clusterprof.linux.roots import Roots
from clusterprof.linux.task import Descriptors
from clusterprof.signals import Signal

_COUNTERS: tuple[tuple[Signal, tuple[names.Source, ...]], ...] = (
    (signals.RDMA_RECEIVE, (names.RECEIVED_WORDS, names.RECEIVED)),
    (signals.RDMA_TRANSMIT, (names.SENT_WORDS, names.SENT)),
    (signals.RDMA_TRANSMIT_WAIT, (names.XMIT_WAIT,)),
    (signals.RDMA_CNP, (names.CNP_RECEIVED,)),
    (signals.RDMA_CNP_SENT, (names.CNP_SENT,)),
    (signals.RDMA_ECN_MARKED, (names.ECN_MARKED,)),
    (signals.RDMA_OUT_OF_SEQUENCE, (names.OUT_OF_SEQUENCE,)),
    (signals.RDMA_RETRANSMITS, (names.RETRANSMITS,)),
    (signals.RDMA_DISCARDS, (names.DISCARDS,)),
    (signals.RDMA_LINK_DOWNED, (names.LINK_DOWNED,)),
    (signals.RDMA_SYMBOL_ERRORS, (names.SYMBOL_ERRORS,)),
    (signals.RDMA_RECEIVE_ERRORS, (names.RECEIVE_ERRORS,)),
    (signals.RDMA_LINK_RECOVERIES, (names.LINK_RECOVERIES,)),
    (signals.RDMA_OUT_OF_BUFFER, (names.OUT_OF_BUFFER,)),
    (signals.RDMA_NOT_READY, (names.NOT_READY,)),
)
_LINK: tuple[Signal, ...] = (
    signals.RDMA_STATE,
    signals.RDMA_LINK_SPEED,
    signals.RDMA_LINK_WIDTH,
)
_LINK_NS = 10_000_000_000
_DESCRIPTORS = 128  # beyond them files are opened for each reading


class RdmaCollector:
    """Traffic, congestion, errors and link of every InfiniBand and RoCE port."""

    name: ClassVar[str] = "rdma"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(
        self, context: Context, clock: Callable[[], int] = time.monotonic_ns, **waits: Any
    ) -> None:
        self._roots = context.roots
        self._clock = clock
        self.sampled_ns = 0
        """When the values that `sample()` returned were read."""
        self._aside = Aside(self._read, clock, **waits)
        self._ports: list[Counters] = []
        self._names: list[tuple[str, str]] = []
        self._links: list[Link] = []
        self._link_ns = 0
        self._first: tuple[int, list[Value]] | None = None

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find the ports, read them once, and say what can be read of each."""
        self._names = _found(self._roots)
        if not self._names:
            raise Unavailable("absent", "there is no RDMA device", "")
        descriptors = Descriptors(_DESCRIPTORS)
        self._ports = [
            Port(self._roots, device, port, descriptors)
            if port
            else CxiPort(self._roots, device, descriptors)
            for device, port in self._names
        ]
        self._links = []
        try:
            self._first = self._aside.first()
        except BaseException:
            self.close()
            raise
        kinds = [*(signal for signal, _ in _COUNTERS), *_LINK]
        return [(signal, port.name) for port in self._ports for signal in kinds]

    def sample(self) -> Sequence[Value]:
        """Return what has been read since the last call; raises NothingNew when nothing has."""
        taken = self._first or self._aside.take()
        self._first = None
        if taken is None:
            raise NothingNew
        self.sampled_ns, values = taken
        return values

    def close(self) -> None:
        """Close all files, once no reading is under way."""
        ports, self._ports = self._ports, []

        def let_go() -> None:
            for port in ports:
                port.close()

        self._aside.close(let_go)

    def _read(self) -> list[Value]:
        """Read every port, in the thread."""
        try:
            found = _found(self._roots)
        except Unavailable:
            found = []
        if found != self._names:
            raise DevicesChanged
        held = self._ports
        now_ns = self._clock()
        if not self._links or now_ns - self._link_ns >= _LINK_NS:
            self._links, self._link_ns = [port.link() for port in held], now_ns
        values: list[Value] = []
        for port, link in zip(held, self._links):
            values += [port.value(*sources) for _, sources in _COUNTERS]
            values += link
        return values


def _found(roots: Roots) -> list[tuple[str, str]]:
    """Return (device, port), "" for the port of a Slingshot card; raises Unavailable."""
    slingshot = [(card, "") for card in cards(roots)]
    try:
        return ports(roots) + slingshot
    except Unavailable:
        if slingshot:
            return slingshot
        raise
