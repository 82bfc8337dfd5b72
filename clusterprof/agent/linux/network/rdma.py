"""/sys/class/infiniband: traffic, errors, congestion and link state of RDMA ports.

Documentation/ABI/stable/sysfs-class-infiniband; the drivers' counter names are in
`agent.linux.network.rdma`.

    mlx5_0/ports/1/state                    4: ACTIVE
    mlx5_0/ports/1/rate                     400 Gb/sec (4X NDR)
    mlx5_0/ports/1/counters/port_rcv_data   345091702026      data octets divided by 4

`counters` holds the counters of the InfiniBand specification's performance management: 64 bits of
data, but 32, 16 or 8 bits of the rest, and these saturate instead of wrapping. A port without
performance management reads "N/A (no PMA)". Reading queries the card's firmware.

Counter names of RDMA drivers: the files that make up one signal.

Names by driver, from their source under drivers/infiniband/hw and from the vendors:

    mlx5     counters.c; docs.nvidia.com "Understanding mlx5 Linux Counters". Queue counters have
             32 bits and wrap, congestion counters have 64
    mlx4     main.c, the diagnostic counters rq_num_* and sq_num_*; 32 bits
    bnxt_re  hw_counters.c; rx_bytes counts unicast only, on newer cards rx_roce_only_*
    irdma    verbs.c; the driver extends 24 to 56 bits to 64, so nothing wraps. Generation 3 has
             "RNR received", "Rcvd Out of order packets" with blanks in the file's name
    efa      efa_verbs.c; docs.aws.amazon.com "Monitor an Elastic Fabric Adapter": rx_bytes and
             tx_bytes include all traffic of the device; bytes of reads and writes are not added
    ionic    octets of unicast and multicast of the Pensando driver
    hfi1     mad.c, chip.c (Omni-Path): see `OMNI_PATH`
    cxi      not below /sys/class/infiniband: `agent.linux.network.rdma`

The specification's own counters (`port_*`, `symbol_error`, …) are those of InfiniBand Architecture
volume 1, performance management: data in words of four octets; a narrow counter saturates.

/sys/class/cxi: Slingshot cards (Cassini), which are no RDMA devices of the kernel.

HewlettPackard/shs-cxi-driver (cass_telem.c, cass_sysfs.c); "HPE Cassini Performance Counters User
Guide".

    cxi0/device/telemetry/hni_sts_rx_ok_octets   8812345678@1700000000.123456789
    cxi0/device/properties/speed                 200000       megabits per second
    cxi0/device/properties/link                  1            0 while it is down

A value is followed by the wall-clock time of its reading. Counters have up to 56 bits and wrap. A
card has one port, here called 1. Without /sys/class/cxi (in a container) the files are found
through the card's network interface, hsn0/device.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.threads import DescriptorBudget, TaskFile
from clusterprof.errors import Unavailable, convert_os_error

WORD_BYTES = 4
FLIT_BYTES = 8
_CLASSES = range(8)  # traffic classes of a Slingshot card


class CounterFiles(NamedTuple):
    """The files that are summed for one signal: those of the first existing group."""

    groups: tuple[tuple[str, ...], ...]
    factor: int = 1


# Value at which each counter saturates; data and packets have 64 bits in the extended set.
SATURATION_VALUES = {
    "symbol_error": 0xFFFF,
    "link_error_recovery": 0xFF,
    "link_downed": 0xFF,
    "port_rcv_errors": 0xFFFF,
    "port_xmit_discards": 0xFFFF,
    "port_xmit_wait": 0xFFFFFFFF,
    "port_rcv_data": 0xFFFFFFFF,
    "port_xmit_data": 0xFFFFFFFF,
}


def _expand_traffic_classes(*stems: str) -> tuple[str, ...]:
    return tuple(f"{stem}_{number}" for stem in stems for number in _CLASSES)


RECEIVED_BYTES = CounterFiles(
    (
        ("rx_roce_only_bytes",),
        ("rx_bytes",),
        ("ip4InOctets", "ip6InOctets"),
        ("rx_rdma_ucast_bytes", "rx_rdma_mcast_bytes"),
        ("hni_sts_rx_ok_octets",),
    )
)
SENT_BYTES = CounterFiles(
    (
        ("tx_roce_only_bytes",),
        ("tx_bytes",),
        ("ip4OutOctets", "ip6OutOctets"),
        ("tx_rdma_ucast_bytes", "tx_rdma_mcast_bytes"),
        ("hni_sts_tx_ok_octets",),
    )
)
RECEIVED_WORDS = CounterFiles((("port_rcv_data",),), WORD_BYTES)
SENT_WORDS = CounterFiles((("port_xmit_data",),), WORD_BYTES)
XMIT_WAIT = CounterFiles((("port_xmit_wait",), ("TxWait",)))
CNP_RECEIVED = CounterFiles(
    (
        ("rp_cnp_handled", "rp_cnp_ignored"),
        ("rx_cnp_pkts",),
        ("cnpHandled", "cnpIgnored"),
        ("rx_rdma_cnp_pkts",),
        ("DcRcvBcn",),
    )
)
CNP_SENT = CounterFiles(
    (("np_cnp_sent",), ("np_cnp_pkts",), ("tx_cnp_pkts",), ("cnpSent",), ("tx_rdma_cnp_pkts",))
)
ECN_MARKED = CounterFiles(
    (
        ("np_ecn_marked_roce_packets",),
        ("rx_ecn_marked_pkts",),
        ("RxECNMrkd",),
        ("DcRcvFcn",),
        _expand_traffic_classes("ixe_tc_req_ecn_pkts", "ixe_tc_rsp_ecn_pkts"),
    )
)
OUT_OF_SEQUENCE = CounterFiles(
    (
        ("out_of_sequence",),
        ("oos_drop_count",),
        ("out_of_seq_request",),
        ("rq_num_oos",),
        ("Rcvd Out of order packets",),
    )
)
RETRANSMITS = CounterFiles(
    (
        ("packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err", "roce_adp_retrans"),
        ("seq_err_naks_rcvd", "to_retransmits"),
        ("sq_num_oos", "sq_num_to"),
        ("RetransSegs",),
        ("tcpRetransSegs",),
        ("retrans_pkts",),
        ("pct_spt_timeouts", "pct_sct_timeouts"),
    )
)
OUT_OF_BUFFER = CounterFiles(
    (("out_of_buffer",), ("rx_out_of_buffer",), ("rq_num_rnr",), ("RNR sent",))
)
NOT_READY = CounterFiles(
    (("rnr_nak_retry_err",), ("rnr_naks_rcvd",), ("sq_num_rnr",), ("RNR received",))
)
LINK_DOWNED = CounterFiles((("link_downed",),))
LINK_RECOVERIES = CounterFiles((("link_error_recovery",),))
SYMBOL_ERRORS = CounterFiles((("symbol_error",), ("hni_pcs_uncorrected_cw",)))
RECEIVE_ERRORS = CounterFiles((("port_rcv_errors",),))
DISCARDS = CounterFiles(
    (
        (
            "port_xmit_discards",
            "rx_roce_discards",
            "tx_roce_discards",
            "rx_drops",
            "ip4InDiscards",
            "ip6InDiscards",
            *_expand_traffic_classes("hni_discard_cntr"),
        ),
    )
)


class Dialect(NamedTuple):
    """Deviations of a driver from the specification."""

    factors: dict[str, int]
    """Bytes per count by file, where it is not the source's factor."""
    empty: frozenset[str]
    """Files that exist but are always 0, because the driver does not fill them."""


STANDARD = Dialect({}, frozenset())
OMNI_PATH = Dialect(
    # mad.c, pma_get_ib_portcounters_ext: flits of eight octets go out as they are counted.
    {"port_rcv_data": FLIT_BYTES, "port_xmit_data": FLIT_BYTES},
    # pma_get_ib_portcounters: "N/A for OPA", and nothing for the ticks of waiting.
    frozenset({"symbol_error", "port_xmit_wait"}),
)


DOWN, ACTIVE = 1, 4
MAX_PORTS = 64
_RATE = re.compile(rb"([\d.]+) Gb/sec(?: \((\d+)X)?")
_BYTES_PER_GIGABIT = 125_000_000
_NOT_COUNTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_GONE_ERRNOS = (errno.ENODEV, errno.ESTALE)
# the driver's own names, and those that udev's rules derive from them
_OPA_NAMES = ("hfi1_", "opap")


class Link(NamedTuple):
    """Link state of a port."""

    state: int | Unavailable
    """1 DOWN, 2 INIT, 3 ARMED, 4 ACTIVE, 5 ACTIVE_DEFER."""
    bytes_per_second: int | Unavailable
    lanes: int | Unavailable


def list_ports(roots: Roots) -> list[tuple[str, str]]:
    """Return (device, port) of every port, sorted.

    Raises: Unavailable without any device.
    """
    folder = roots.sys / "class/infiniband"
    try:
        devices = sorted(os.listdir(folder))
    except OSError as error:
        raise convert_os_error(error, str(folder)) from None
    ports: list[tuple[str, str]] = []
    for device in devices:
        try:
            numbers = sorted(
                os.listdir(folder / device / "ports"), key=lambda name: (len(name), name)
            )
        except OSError:
            continue
        ports += [(device, number) for number in numbers]
    return ports[:MAX_PORTS]


class PortCounters:
    """The counter files of one port, each opened once; a missing counter has a reason.

    The set of files does not change while the port exists.
    """

    def __init__(
        self,
        name: str,
        places: Sequence[str],
        descriptors: DescriptorBudget,
        dialect: Dialect = STANDARD,
    ) -> None:
        """Find the counter files.

        places: folders of files; the first folder that has a file of a name is used.
        """
        self.name = name
        self._descriptors = descriptors
        self._dialect = dialect
        self._paths: dict[str, str] = {}
        for folder in places:
            for file in _list_entries(folder):
                if file not in dialect.empty:
                    self._paths.setdefault(file, f"{folder}/{file}")
        self._files: dict[str, TaskFile] = {}
        self._chosen: dict[CounterFiles, tuple[str, ...]] = {}
        # files that contained a number: without one there is no sum
        self._counted: set[str] = set()
        self._settled: dict[tuple[CounterFiles, ...], tuple[CounterFiles]] = {}

    def value(self, *sources: CounterFiles) -> int | Unavailable:
        """Return the sum of the first source that yields a number, or the reason why none does.

        A source that yielded a number is used from then on: another counter would not continue its
        value.
        """
        reason: Unavailable | None = None
        for source in self._settled.get(sources, sources):
            value = self._sum(source)
            if not isinstance(value, Unavailable):
                self._settled[sources] = (source,)
                return value
            if reason is None or reason.kind == "absent":
                reason = value
            if reason.kind != "absent":
                break  # it is counted but unknown now
        assert reason is not None
        return reason

    def link(self) -> Link:
        """Return state, speed and width of the link; implemented by subclasses.

        Raises: NotImplementedError in this base class.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    @staticmethod
    def parse(text: bytes) -> int:
        """Parse the number in a counter's file.

        Raises: ValueError for other content.
        """
        return int(text)

    def _sum(self, source: CounterFiles) -> int | Unavailable:
        names = self._chosen.get(source)
        if names is None:
            existing = (tuple(n for n in group if n in self._paths) for group in source.groups)
            names = self._chosen[source] = next(filter(None, existing), ())
        total, counted = 0, False
        why = Unavailable("absent", "the driver has no such counter", "")
        for name in names:
            value = self._number(name)
            if not isinstance(value, Unavailable):
                total += value * self._dialect.factors.get(name, source.factor)
                counted = True
                self._counted.add(name)
            elif value.kind != "absent" or name in self._counted:
                return value  # one part is unknown, so the sum is too
            else:
                why = value
        return total if counted else why

    def _number(self, name: str) -> int | Unavailable:
        try:
            text = self._read_file(name)
        except OSError as error:
            if error.errno in _NOT_COUNTED:
                return Unavailable("absent", "the driver has no such counter", "")
            return convert_os_error(error, self._paths[name])
        try:
            value = self.parse(text)
        except ValueError:  # "N/A (no PMA)"
            return Unavailable("absent", f"{self.name} has no {name}", "")
        if value < 0:
            return Unavailable("failed", f"{name} of {self.name} is {value}: not a valid count", "")
        if value == SATURATION_VALUES.get(name):
            message = f"{name} of {self.name} is saturated at {value} and counts no further"
            return Unavailable("failed", message, "reset it with perfquery -R")
        return value

    def _read_file(self, name: str) -> bytes:
        file = self._files.get(name)
        if file is not None:
            try:
                return file.read()
            except OSError as error:
                if error.errno not in _GONE_ERRNOS:
                    raise
            file.close()  # the device was replaced under its name: its files are new ones
            del self._files[name]
        file = self._files[name] = TaskFile(self._paths[name], self._descriptors)
        return file.read()


class InfinibandPort(PortCounters):
    """The files of one port: counters that are read often, and the link, which is read rarely."""

    def __init__(
        self, roots: Roots, device: str, number: str, descriptors: DescriptorBudget
    ) -> None:
        """Open the existing files."""
        top = f"{roots.sys}/class/infiniband/{device}"
        self._folder = f"{top}/ports/{number}"
        places = [f"{self._folder}/{kind}" for kind in ("counters", "hw_counters")]
        if len(list(_list_entries(f"{top}/ports"))) == 1:
            # the device's counters are the port's; with two ports they belong to neither
            places.append(f"{top}/hw_counters")
        dialect = OMNI_PATH if _is_omni_path(top, device) else STANDARD
        super().__init__(f"{device}/{number}", places, descriptors, dialect)

    def link(self) -> Link:
        """Return state, speed and width; the speed of a link that is down is meaningless."""
        try:
            state = int(self._read_link_file("state").split(b":", 1)[0])
        except OSError as error:
            why = convert_os_error(error, f"{self._folder}/state")
            return Link(why, why, why)
        except ValueError:
            why = Unavailable("failed", f"{self._folder}/state: not understood", "")
            return Link(why, why, why)
        if state != ACTIVE:
            down = Unavailable("absent", f"the link of {self.name} is not up", "")
            return Link(state, down, down)
        try:
            return Link(state, *parse_rate(self._read_link_file("rate")))
        except (OSError, ValueError):
            why = Unavailable("absent", f"the driver does not report the rate of {self.name}", "")
            return Link(state, why, why)

    def _read_link_file(self, name: str) -> bytes:
        with open(f"{self._folder}/{name}", "rb") as file:
            return file.read()


def parse_rate(text: bytes) -> tuple[int, int | Unavailable]:
    """Parse bytes per second and lanes from a line like "200 Gb/sec (4X HDR)".

    Raises: ValueError for another format.
    """
    match = _RATE.match(text)
    if match is None:
        raise ValueError(text)
    lanes = int(match[2]) if match[2] else Unavailable("absent", "the driver reports no width", "")
    return round(float(match[1]) * _BYTES_PER_GIGABIT), lanes


def _is_omni_path(top: str, device: str) -> bool:
    try:
        return os.path.basename(os.readlink(f"{top}/device/driver")) == "hfi1"
    except OSError:
        return device.startswith(_OPA_NAMES)


def _list_entries(folder: str) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()


MAX_SLINGSHOT_CARDS = 16
CXI_PORT = "1"
_BYTES_PER_MEGABIT = 125_000
_LANES = Unavailable("absent", "the driver reports no width", "")


def list_slingshot_cards(roots: Roots) -> list[str]:
    """Return the Slingshot cards, sorted, or else their interfaces; [] without any."""
    names = _list_names(roots.sys / "class/cxi")
    if not names:
        net = roots.sys / "class/net"
        names = [nic for nic in _list_names(net) if nic.startswith("hsn")]
        names = [nic for nic in names if os.path.isdir(net / nic / "device/telemetry")]
    return sorted(names, key=lambda name: (len(name), name))[:MAX_SLINGSHOT_CARDS]


def get_device_folder(roots: Roots, card: str) -> Path:
    """Return the device folder of a card."""
    kind = "net" if card.startswith("hsn") else "cxi"
    return roots.sys / "class" / kind / card / "device"


def _list_names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


class CxiPort(PortCounters):
    """The telemetry of one Slingshot card."""

    def __init__(self, roots: Roots, card: str, descriptors: DescriptorBudget) -> None:
        """Open the existing files."""
        self._device = str(get_device_folder(roots, card))
        super().__init__(f"{card}/{CXI_PORT}", [f"{self._device}/telemetry"], descriptors)

    @staticmethod
    def parse(text: bytes) -> int:
        """Parse the number before the wall-clock time.

        Raises: ValueError for other content.
        """
        return int(text.partition(b"@")[0])

    def link(self) -> Link:
        """Return state and speed; the speed of a link that is down is meaningless."""
        try:
            state = ACTIVE if self._read_property("link") else DOWN
        except OSError as error:
            why = convert_os_error(error, f"{self._device}/properties/link")
            return Link(why, why, why)
        except ValueError:
            why = Unavailable("failed", f"{self._device}/properties/link: not understood", "")
            return Link(why, why, why)
        if state == DOWN:
            down = Unavailable("absent", f"the link of {self.name} is not up", "")
            return Link(state, down, down)
        try:
            megabits = self._read_property("speed")
        except (OSError, ValueError):
            megabits = 0
        if megabits <= 0:
            why = Unavailable("absent", f"the driver does not report the rate of {self.name}", "")
            return Link(state, why, _LANES)
        return Link(state, megabits * _BYTES_PER_MEGABIT, _LANES)

    def _read_property(self, name: str) -> int:
        with open(f"{self._device}/properties/{name}", "rb") as file:
            return int(file.read())
