"""What network cards count for themselves: pause frames, marks of congestion, drops at the port.

Columns: of every interface with a device behind it, those of these signals its driver counts, as
`ethtool -S` names them; drivers known by their names are mlx5, mlx4, bnxt_en, ice, i40e, ixgbe,
ionic, sfc, ena, gve and virtio_net. Pause frames are told by direction: "<nic> rx" were received,
so the card had to stop sending; "<nic> tx" were sent, so this machine took in data too slowly. What
a driver counts for all priorities and again for each is counted once; those of one priority are
told again as "<nic> rx 3".

    mlx5          rx_prio3_pause, rx_discards_phy, rx_out_of_buffer, rx_ecn_mark, rx_prio3_marked
    bnxt_en       rx_pfc_ena_frames_pri3, rx_stat_discard, rx_total_ring_discards
    ice, i40e     rx_priority_3_xoff.nic, rx_dropped.nic
    ena           bw_in_allowance_exceeded, …: what the size of the instance allows
    gve           rx_no_buffers_posted[0]
    virtio_net    rx_hw_ratelimit_packets, rx_hw_drop_overruns, where the host tells them

Reading takes the network stack's lock and asks the card's firmware, so a thread reads every 2 s,
and less often when it takes more than 10 ms; a value carries the time at which it was read.

## Source

The ioctl SIOCETHTOOL with ETHTOOL_GSTATS (`ethtool -S`); names are those of the drivers
(docs.kernel.org/networking/statistics and device_drivers/ethernet).

## Privilege

None; the interface has to be in the recorder's network namespace.

## Cost

A thread asks every 2 s, and less often where an answer takes more than 10 ms; it waits for the
card's firmware and takes the network stack's lock meanwhile.

## Where it is blind

Drivers with other names than those known here, and virtual cards: they count none of it. Which
connection was paused is not told.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.linux.aside import Aside
from clusterprof.linux.ethtool import Statistics, cards
from clusterprof.signals import Signal

_US = 1000
_INT64 = 1 << 63
_OUT_OF_RANGE = Unavailable("failed", "the driver's counter does not fit 63 bits", "")


class _Rule(NamedTuple):
    """One signal and how the statistics it is made of are called."""

    signal: Signal
    direction: str
    parts: re.Pattern[str]
    """Added up."""
    whole: re.Pattern[str] | None = None
    """Several names for one count, of which the largest is taken and added."""
    factor: int = 1
    spare: re.Pattern[str] | None = None
    """Added up where there is nothing of `parts`: what is counted by queue only."""


def _pause(direction: str) -> _Rule:
    d = direction
    parts = (
        rf"{d}_prio\d_pause|{d}_pause_frames|{d}_pfc_frames|{d}_pause|port_{d}_pause"
        rf"|(port\.)?link_xoff_{d}(\.nic)?|(port\.)?{d}_priority_\d_xoff(\.nic)?"
        rf"|{d}_flow_control_xoff|{d}_pb_\d+_pxoff|frames_{d}_pause|frames_{d}_pripause"
        rf"|{d}_pause_prio_\d"
    )
    whole = rf"{d}_pause_ctrl_phy|{d}_global_pause"
    return _Rule(signals.NET_PAUSE_FRAMES, d, re.compile(parts), re.compile(whole))


def _paused(direction: str) -> _Rule:
    d = direction
    parts = (
        rf"{d}_prio\d_pause_duration|{d}_global_pause_duration|{d}_pause_duration"
        rf"|pfc_pri\d_{d}_duration_us|{d}_pause_duration_prio_\d"
    )
    return _Rule(signals.NET_PAUSED, d, re.compile(parts), factor=_US)


RULES: tuple[_Rule, ...] = (
    _pause("rx"),
    _pause("tx"),
    _paused("rx"),
    _paused("tx"),
    _Rule(signals.NET_ECN_MARKED, "", re.compile(r"rx_ecn_mark|rx_prio\d_marked")),
    _Rule(signals.NET_CNP, "", re.compile(r"rx_cnp_pkts|rp_cnp_handled")),
    _Rule(
        signals.NET_DISCARDS_PHY,
        "",
        re.compile(
            r"[rt]x_discards_phy|[rt]x_stat_discard|(port\.)?rx_dropped\.nic|port\.rx_dropped"
            r"|(port\.)?tx_dropped_link_down(\.nic)?"
        ),
    ),
    _Rule(
        signals.NET_OUT_OF_BUFFER,
        "",
        re.compile(
            r"rx_out_of_buffer|rx_total_(ring|oom)_discards|rx_no_buffer_count|rx_hw_drop_overruns"
            r"|rx_no_buffers_posted\[\d+\]|port_rx_nodesc_drops"
        ),
        spare=re.compile(r"queue_\d+_rx_empty_rx_ring|rx\d+_hw_drop_overruns"),
    ),
    _Rule(
        signals.NET_SHAPED,
        "",
        re.compile(r"(bw_in|bw_out|pps)_allowance_exceeded|[rt]x_hw_ratelimit_packets"),
        spare=re.compile(r"[rt]x\d+_hw_ratelimit_packets"),
    ),
)

# The priority is what stands in for a digit: mlx5, mlx4, bnxt_en, ice and i40e, ixgbe.
_PRIORITIES = {
    d: re.compile(
        rf"{d}_prio(\d)_pause|{d}_pause_prio_(\d)|{d}_pfc_ena_frames_pri(\d)"
        rf"|(?:port\.)?{d}_priority_(\d)_xoff(?:\.nic)?|{d}_pb_(\d)_pxoff"
    )
    for d in ("rx", "tx")
}


class Column(NamedTuple):
    """One column of one card: which of its statistics make it."""

    signal: Signal
    device: str
    parts: tuple[int, ...]
    whole: tuple[int, ...]
    factor: int

    def value(self, numbers: dict[int, int]) -> Value:
        """Return the value, from the statistics by their index."""
        total = sum(numbers[index] for index in self.parts)
        total += max((numbers[index] for index in self.whole), default=0)
        total *= self.factor
        return total if total < _INT64 else _OUT_OF_RANGE


def columns_of(nic: str, names: Sequence[str]) -> list[Column]:
    """Return the columns that a card with these statistics has."""
    columns = []
    for rule in RULES:
        parts = _matching(rule.parts, names) or _matching(rule.spare, names)
        whole = _matching(rule.whole, names)
        if parts or whole:
            device = f"{nic} {rule.direction}".rstrip()
            columns.append(Column(rule.signal, device, parts, whole, rule.factor))
    return columns + _priorities(nic, names)


def _matching(pattern: re.Pattern[str] | None, names: Sequence[str]) -> tuple[int, ...]:
    if pattern is None:
        return ()
    return tuple(i for i, name in enumerate(names) if pattern.fullmatch(name))


def _priorities(nic: str, names: Sequence[str]) -> list[Column]:
    """Return the columns of priorities; cards tell those that pause frames are used for."""
    found: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        for direction, pattern in _PRIORITIES.items():
            match = pattern.fullmatch(name)
            if match:
                number = next(group for group in match.groups() if group)
                found.setdefault(f"{nic} {direction} {number}", []).append(index)
    signal = signals.NET_PRIORITY_PAUSE_FRAMES
    return [Column(signal, device, tuple(found[device]), (), 1) for device in sorted(found)]


class _Card(NamedTuple):
    nic: str
    statistics: int
    """How many its driver has."""
    indices: tuple[int, ...]
    columns: tuple[Column, ...]


class EthtoolCollector:
    """Pause frames, congestion marks and drops that network cards count for themselves."""

    name: ClassVar[str] = "ethtool"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 2_000_000_000

    def __init__(
        self,
        context: Context,
        clock: Callable[[], int] = time.monotonic_ns,
        statistics: Callable[[], Any] = Statistics,
        **waits: Any,
    ) -> None:
        self._roots = context.roots
        self._make = statistics
        self.sampled_ns = 0
        """When the values that `sample()` returned were read."""
        self._aside = Aside(self._read, clock, **waits)
        self._cards: list[_Card] | None = None
        self._first: tuple[int, list[Value]] | None = None

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Ask every card for the names of what it counts, and once for the values."""
        self._cards = None
        self._nics = cards(self._roots)
        self._listed = _listed(self._roots)
        self._first = self._aside.first()
        assert self._cards is not None
        columns = [column for card in self._cards for column in card.columns]
        if not columns:
            self.close()
            message = "no network card here counts pauses, marks of congestion or drops of its port"
            raise Unavailable("absent", message, "")
        return [(column.signal, column.device) for column in columns]

    def sample(self) -> Sequence[Value]:
        """Return what has been read since the last call; raises NothingNew when nothing has."""
        taken = self._first or self._aside.take()
        self._first = None
        if taken is None:
            raise NothingNew
        self.sampled_ns, values = taken
        return values

    def close(self) -> None:
        """Let the thread end."""
        self._aside.close()

    def _read(self) -> list[Value]:
        """Read every card, in the thread; the first time also what it counts."""
        if _listed(self._roots) != self._listed:
            raise DevicesChanged
        statistics = self._make()
        try:
            if self._cards is None:
                self._cards = [_card(statistics, nic) for nic in self._nics]
            values: list[Value] = []
            for card in self._cards:
                values += _values(statistics, card)
            return values
        finally:
            statistics.close()


def _card(statistics: Any, nic: str) -> _Card:
    try:
        names = statistics.names(nic)
    except Unavailable:
        return _Card(nic, 0, (), ())
    columns = tuple(columns_of(nic, names))
    indices = {index for column in columns for index in (*column.parts, *column.whole)}
    return _Card(nic, len(names), tuple(sorted(indices)), columns)


def _values(statistics: Any, card: _Card) -> list[Value]:
    if not card.columns:
        return []
    try:
        numbers = statistics.values(card.nic, card.indices, card.statistics)
    except Unavailable as why:
        return [why] * len(card.columns)
    if numbers is None:
        raise DevicesChanged  # queues were added or taken away, and the names with them
    by_index = dict(zip(card.indices, numbers))
    return [column.value(by_index) for column in card.columns]


def _listed(roots: Any) -> list[str]:
    try:
        return sorted(os.listdir(roots.sys / "class/net"))
    except OSError:
        return []
