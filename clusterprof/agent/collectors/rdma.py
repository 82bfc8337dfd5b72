"""Traffic of InfiniBand, RoCE, Omni-Path and Slingshot ports, and retransmissions.

Columns: the `rdma.*` signals of every port in /sys/class/infiniband, named
"<device>/<port>", and of every Slingshot card in /sys/class/cxi ("cxi0/1"); a signal
that the driver does not count has that reason. Drivers name their own counters
differently: known are those of mlx5, mlx4, bnxt_re, irdma, efa, ionic, hfi1 and cxi,
and the counters of the InfiniBand specification.

    driver    bytes are                          which count
    mlx5      port_rcv_data, in words of 4       all traffic of the port; on Ethernet its RDMA only
    mlx4      port_rcv_data, in words of 4       32 bits on old firmware: unknown once saturated
    hfi1      port_rcv_data, in flits of 8       all traffic of the port, both PSM and verbs
    bnxt_re   rx_roce_only_bytes, or rx_bytes    RoCE, unicast
    irdma     ip4InOctets + ip6InOctets          RoCE and iWARP
    efa       rx_bytes                           all traffic of the device, RDMA included
    cxi       hni_sts_rx_ok_octets               all traffic of the card, also TCP

Some of these have 32, 16 or 8 bits and saturate: the value is unknown from then on, not
a rate of zero. A counter that wraps decreases, and that step is left out. Files that a
driver never fills (`symbol_error` and `port_xmit_wait` of hfi1) are not used. Pause
frames of a RoCE port are counted by its network interface: see `ethtool`. Reading
queries the card's firmware, so a thread reads, and a value carries the time of its
reading; state and speed are read every 10 s.

## Source

`/sys/class/infiniband/*/ports/*/{counters,hw_counters,state,rate}`, `/sys/class/cxi`
(Documentation/ABI/stable/sysfs-class-infiniband; names of hw_counters in
drivers/infiniband/hw).

## Privilege

None for reading; resetting a saturated counter needs root.

## Cost

A thread reads some 15 files for each port, once a second; reading queries the card's
firmware.

## Where it is blind

It does not show which rank or queue pair sent. A saturated counter is unknown until it
is reset. Events within a switch show only as waits, marks and retransmissions at this
port. Traffic within the node (NVLink, shared memory) does not pass through these ports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.network import rdma as names
from clusterprof.agent.linux.network.rdma import (
    CxiPort,
    InfinibandPort,
    Link,
    PortCounters,
    list_ports,
    list_slingshot_cards,
)
from clusterprof.agent.linux.reader_threads import BackgroundReader
from clusterprof.agent.linux.threads import DescriptorBudget
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.signals import Signal

_PORT_COUNTERS: tuple[tuple[Signal, tuple[names.CounterFiles, ...]], ...] = (
    (signals.RDMA_RECEIVE, (names.RECEIVED_WORDS, names.RECEIVED_BYTES)),
    (signals.RDMA_TRANSMIT, (names.SENT_WORDS, names.SENT_BYTES)),
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
_LINK_COLUMNS: tuple[Signal, ...] = (
    signals.RDMA_STATE,
    signals.RDMA_LINK_SPEED,
    signals.RDMA_LINK_WIDTH,
)
_LINK_NS = 10_000_000_000
_DESCRIPTORS = 128  # beyond this limit files are opened for each reading


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
        self._reader = BackgroundReader(self._read, clock, **waits)
        self._ports: list[PortCounters] = []
        self._names: list[tuple[str, str]] = []
        self._links: list[Link] = []
        self._link_ns = 0
        self._first: tuple[int, list[Value]] | None = None

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find the ports, read them once, and return their columns.

        Raises: Unavailable without any RDMA device.
        """
        self._names = _find_ports(self._roots)
        if not self._names:
            raise Unavailable("absent", "there is no RDMA device", "")
        descriptors = DescriptorBudget(_DESCRIPTORS)
        self._ports = [
            InfinibandPort(self._roots, device, port, descriptors)
            if port
            else CxiPort(self._roots, device, descriptors)
            for device, port in self._names
        ]
        self._links = []
        try:
            self._first = self._reader.first()
        except BaseException:
            self.close()
            raise
        kinds = [*(signal for signal, _ in _PORT_COUNTERS), *_LINK_COLUMNS]
        return [(signal, port.name) for port in self._ports for signal in kinds]

    def sample(self) -> Sequence[Value]:
        """Return the values read since the last call.

        Raises: NothingNew when there are none.
        """
        reading = self._first or self._reader.take()
        self._first = None
        if reading is None:
            raise NothingNew
        self.sampled_ns, values = reading
        return values

    def close(self) -> None:
        """Close all files once no reading is in progress."""
        ports, self._ports = self._ports, []

        def release() -> None:
            for port in ports:
                port.close()

        self._reader.close(release)

    def _read(self) -> list[Value]:
        """Read every port, in the thread."""
        try:
            current = _find_ports(self._roots)
        except Unavailable:
            current = []
        if current != self._names:
            raise DevicesChanged
        ports = self._ports
        now_ns = self._clock()
        if not self._links or now_ns - self._link_ns >= _LINK_NS:
            self._links, self._link_ns = [port.link() for port in ports], now_ns
        values: list[Value] = []
        for port, link in zip(ports, self._links):
            values += [port.value(*sources) for _, sources in _PORT_COUNTERS]
            values += link
        return values


def _find_ports(roots: Roots) -> list[tuple[str, str]]:
    """Return (device, port) of all ports, port "" for a Slingshot card; raise Unavailable."""
    slingshot = [(card, "") for card in list_slingshot_cards(roots)]
    try:
        return list_ports(roots) + slingshot
    except Unavailable:
        if slingshot:
            return slingshot
        raise
