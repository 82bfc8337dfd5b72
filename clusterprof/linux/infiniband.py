"""/sys/class/infiniband: traffic, errors, congestion and link of the ports of RDMA devices.

Documentation/ABI/stable/sysfs-class-infiniband; the names in `hw_counters` are those of the drivers
(drivers/infiniband/hw/*), docs.nvidia.com "Understanding mlx5 Linux Counters", docs.aws.amazon.com
"Monitor an Elastic Fabric Adapter".

    mlx5_0/ports/1/state                    4: ACTIVE
    mlx5_0/ports/1/rate                     400 Gb/sec (4X NDR)
    mlx5_0/ports/1/counters/port_rcv_data   345091702026      data octets divided by 4

`counters` hold what the InfiniBand specification's performance management does: 64 bits of data,
but 32, 16 or 8 bits of the rest, and such a counter stops at its end instead of beginning anew. A
port without performance management says "N/A (no PMA)". Reading asks the card's firmware.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from clusterprof.errors import Unavailable, unavailable_from_os_error
from clusterprof.linux.roots import Roots
from clusterprof.linux.task import Descriptors, TaskFile

WORD_BYTES = 4
ACTIVE = 4
PORTS_AT_MOST = 64
_RATE = re.compile(rb"([\d.]+) Gb/sec(?: \((\d+)X)?")
_BYTES_PER_GIGABIT = 125_000_000
_NOT_COUNTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)

# Where each counter stops; data and packets have 64 bits where the port has the extended set.
_ENDS = {
    "symbol_error": 0xFFFF,
    "link_downed": 0xFF,
    "port_xmit_discards": 0xFFFF,
    "port_xmit_wait": 0xFFFFFFFF,
    "port_rcv_data": 0xFFFFFFFF,
    "port_xmit_data": 0xFFFFFFFF,
}


class Source(NamedTuple):
    """The files one signal is added up from: those of the first group of which any is there."""

    groups: tuple[tuple[str, ...], ...]
    factor: int = 1


# Names by driver: mlx5 (and what bnxt_re calls alike), bnxt_re, irdma, efa, ionic.
RECEIVED = Source(
    (
        ("rx_roce_only_bytes",),
        ("rx_bytes",),
        ("ip4InOctets", "ip6InOctets"),
        ("rx_rdma_ucast_bytes", "rx_rdma_mcast_bytes"),
    )
)
SENT = Source(
    (
        ("tx_roce_only_bytes",),
        ("tx_bytes",),
        ("ip4OutOctets", "ip6OutOctets"),
        ("tx_rdma_ucast_bytes", "tx_rdma_mcast_bytes"),
    )
)
RECEIVED_WORDS = Source((("port_rcv_data",),), WORD_BYTES)
SENT_WORDS = Source((("port_xmit_data",),), WORD_BYTES)
XMIT_WAIT = Source((("port_xmit_wait",),))
CNP_RECEIVED = Source(
    (
        ("rp_cnp_handled", "rp_cnp_ignored"),
        ("rx_cnp_pkts",),
        ("cnpHandled", "cnpIgnored"),
        ("rx_rdma_cnp_pkts",),
    )
)
CNP_SENT = Source((("np_cnp_sent",), ("np_cnp_pkts",), ("tx_cnp_pkts",), ("cnpSent",),
                   ("tx_rdma_cnp_pkts",)))  # fmt: skip
ECN_MARKED = Source((("np_ecn_marked_roce_packets",), ("rx_ecn_marked_pkts",), ("RxECNMrkd",)))
OUT_OF_SEQUENCE = Source((("out_of_sequence",), ("oos_drop_count",), ("out_of_seq_request",)))
RETRANSMITS = Source(
    (
        ("packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err", "roce_adp_retrans"),
        ("seq_err_naks_rcvd", "to_retransmits"),
        ("RetransSegs",),
        ("tcpRetransSegs",),
        ("retrans_pkts",),
    )
)
LINK_DOWNED = Source((("link_downed",),))
SYMBOL_ERRORS = Source((("symbol_error",),))
DISCARDS = Source(
    (
        (
            "port_xmit_discards",
            "rx_roce_discards",
            "tx_roce_discards",
            "rx_drops",
            "ip4InDiscards",
            "ip6InDiscards",
        ),
    )
)


class Link(NamedTuple):
    """What a port says of its link."""

    state: int | Unavailable
    """1 DOWN, 2 INIT, 3 ARMED, 4 ACTIVE, 5 ACTIVE_DEFER."""
    bytes_per_second: int | Unavailable
    lanes: int | Unavailable


def ports(roots: Roots) -> list[tuple[str, str]]:
    """Return (device, port) of every port, in order; raises Unavailable without any device."""
    folder = roots.sys / "class/infiniband"
    try:
        devices = sorted(os.listdir(folder))
    except OSError as error:
        raise unavailable_from_os_error(error, str(folder)) from None
    found: list[tuple[str, str]] = []
    for device in devices:
        try:
            numbers = sorted(
                os.listdir(folder / device / "ports"), key=lambda name: (len(name), name)
            )
        except OSError:
            continue
        found += [(device, number) for number in numbers]
    return found[:PORTS_AT_MOST]


class Port:
    """The files of one port: counters to be read often, the link rarely."""

    def __init__(self, roots: Roots, device: str, number: str, descriptors: Descriptors) -> None:
        """Open the files that are there; which those are does not change while the port lives."""
        self.name = f"{device}/{number}"
        self._folder = str(roots.sys / "class/infiniband" / device / "ports" / number)
        self._descriptors = descriptors
        # Counters of a device with one port may lie with the device.
        places = [f"{self._folder}/{kind}" for kind in ("counters", "hw_counters")]
        places.append(str(roots.sys / "class/infiniband" / device / "hw_counters"))
        self._paths: dict[str, str] = {}
        for place in places:
            for name in _entries(place):
                self._paths.setdefault(name, f"{place}/{name}")
        self._files: dict[str, TaskFile] = {}
        self._chosen: dict[Source, tuple[str, ...]] = {}

    def value(self, *sources: Source) -> int | Unavailable:
        """Return the sum of the first source that gives a number, else why the first does not."""
        why: Unavailable | None = None
        for source in sources:
            value = self._sum(source)
            if not isinstance(value, Unavailable):
                return value
            if why is None or why.kind == "absent":
                why = value
            if why.kind != "absent":
                break  # it is counted and cannot be told now: another count would not go on from it
        assert why is not None
        return why

    def link(self) -> Link:
        """Return state, speed and width; the speed of a link that is not up means nothing."""
        try:
            state = int(self._text("state").split(b":", 1)[0])
        except OSError as error:
            why = unavailable_from_os_error(error, f"{self._folder}/state")
            return Link(why, why, why)
        except ValueError:
            why = Unavailable("failed", f"{self._folder}/state: not understood", "")
            return Link(why, why, why)
        if state != ACTIVE:
            down = Unavailable("absent", f"the link of {self.name} is not up", "")
            return Link(state, down, down)
        try:
            return Link(state, *parse_rate(self._text("rate")))
        except (OSError, ValueError):
            why = Unavailable("absent", f"the driver does not say the rate of {self.name}", "")
            return Link(state, why, why)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _sum(self, source: Source) -> int | Unavailable:
        names = self._chosen.get(source)
        if names is None:
            there = (tuple(n for n in group if n in self._paths) for group in source.groups)
            names = self._chosen[source] = next(filter(None, there), ())
        total, counted = 0, False
        why = Unavailable("absent", f"the driver of {self.name} does not count it", "")
        for name in names:
            value = self._number(name)
            if not isinstance(value, Unavailable):
                total, counted = total + value, True
            elif value.kind != "absent":
                return value  # one part is unknown, so the sum is
            else:
                why = value
        return total * source.factor if counted else why

    def _number(self, name: str) -> int | Unavailable:
        try:
            text = self._text_of(name)
        except OSError as error:
            if error.errno in _NOT_COUNTED:
                return Unavailable("absent", f"the driver of {self.name} does not count it", "")
            return unavailable_from_os_error(error, self._paths[name])
        try:
            value = int(text)
        except ValueError:  # "N/A (no PMA)"
            return Unavailable("absent", f"{self.name} keeps no {name}", "")
        if value == _ENDS.get(name):
            message = f"{name} of {self.name} stands at its end, {value}, and counts no further"
            return Unavailable("failed", message, "reset it with perfquery -R")
        return value

    def _text_of(self, name: str) -> bytes:
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = TaskFile(self._paths[name], self._descriptors)
        return file.read()

    def _text(self, name: str) -> bytes:
        with open(f"{self._folder}/{name}", "rb") as file:
            return file.read()


def parse_rate(text: bytes) -> tuple[int, int | Unavailable]:
    """Return bytes per second and lanes of a line as "200 Gb/sec (4X HDR)"; raises ValueError."""
    match = _RATE.match(text)
    if match is None:
        raise ValueError(text)
    lanes = int(match[2]) if match[2] else Unavailable("absent", "the driver says no width", "")
    return round(float(match[1]) * _BYTES_PER_GIGABIT), lanes


def _entries(folder: str) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()
