"""Name links that degrade before they fail: PCIe and NVLink of GPUs, ports of InfiniBand.

    replays a minute    0 0 0 1 0 2 1 3 9 14 22 31
                                        |-- more than NVIDIA's limit of 8: named
                        |-- 1 --|   |--- 76 ---|   first and last quarter: they rise

No time is attributed to such a link. Errors are counted from one reading to the next, in minutes
since the first; a counter that steps back, or that could not be read, adds nothing. A state counts
as changed if its best reading of the last minutes is worse than the best of the whole recording: a
link that saves power while its GPU is idle comes back.

NVML's sums count the errors of all NVLinks of a GPU, and they decide what is named. Events of the
recorder say of which links the errors are, and which links went down:

    sum over all links      21 .. 21 .. 25          4 replays in one minute: named
    event nvlink-errors                  link 3: 4     the note says NVLink 3

Sources of the limits: NVIDIA DCGM, dcgm_gpu_hardware_limits.h (8 PCIe replays a minute, 1 error of
an NVLink, 100 CRC errors a second) and DcgmHealthWatch.cpp (an effective bit error rate of 1e-12,
symbol errors); infiniband-diags, ibqueryerrors(8), error_thresholds (10).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterprof import signals
from clusterprof.analysis.timeline import series
from clusterprof.analysis.timeline.model import Chunk, Series
from clusterprof.trace.schema import Event

MINUTE_NS = 60_000_000_000
LAST_MINUTES = 5
"""Minutes at the end of a recording whose best reading of a state counts as its last."""
MIN_RISING_COUNT = 10
"""Errors in the last quarter of a recording from which on a rise is named below the limit."""
RISE_FACTOR = 2
"""Times as many errors in the last quarter of a recording as in its first."""
MAX_EFFECTIVE_RATE = 1e-12
"""Errors per bit of an NVLink from which on it is named."""
_MAX_NAMED_LINKS = 3
_MIN_TREND_MINUTES = 8
_QUARTER = 4
_RESEAT = "reseat or replace the card, its riser or the cable before it fails"


@dataclass(frozen=True, slots=True)
class ErrorCounter:
    """A counter of errors of a link, and how many are too many."""

    link: str
    """With the device in its place."""
    what: str
    limit: int
    """Most errors within `minutes` that are no trouble."""
    minutes: int
    source: str


_NVIDIA, _IBTOOLS = "NVIDIA's limit", "the limit of ibqueryerrors"
COUNTERS: Mapping[str, ErrorCounter] = {
    signals.GPU_PCIE_REPLAYS.name: ErrorCounter(
        "the PCIe link of {}", "packets sent again", 8, 1, _NVIDIA
    ),
    signals.GPU_NVLINK_REPLAYS.name: ErrorCounter(
        "an NVLink of {}", "packets sent again", 0, 1, _NVIDIA
    ),
    signals.GPU_NVLINK_RECOVERIES.name: ErrorCounter(
        "an NVLink of {}", "times trained again", 0, 1, _NVIDIA
    ),
    signals.GPU_NVLINK_CRC.name: ErrorCounter(
        "an NVLink of {}", "damaged flits and data", 6000, 1, _NVIDIA
    ),
    signals.GPU_NVLINK_SYMBOL_ERRORS.name: ErrorCounter(
        "an NVLink of {}", "symbol errors", 0, 1, _NVIDIA
    ),
    signals.RDMA_SYMBOL_ERRORS.name: ErrorCounter(
        "the link of port {}", "symbol errors", 10, 60, _IBTOOLS
    ),
    signals.RDMA_RECEIVE_ERRORS.name: ErrorCounter(
        "the link of port {}", "damaged packets received", 10, 60, _IBTOOLS
    ),
    signals.RDMA_LINK_RECOVERIES.name: ErrorCounter(
        "the link of port {}", "recoveries", 10, 60, _IBTOOLS
    ),
    signals.RDMA_LINK_DOWNED.name: ErrorCounter(
        "the link of port {}", "times down", 0, 60, _IBTOOLS
    ),
}


@dataclass(frozen=True, slots=True)
class LinkState:
    """A link property for which larger is better, such as width or speed."""

    link: str
    value: str
    """With the number in its place."""
    best: str
    """Key of the device's entry in the header that says what is possible; "" = none."""
    remedy: str = _RESEAT
    scale: float = 1.0
    """Factor from the signal's unit to that of `value`."""

    def format_value(self, value: float) -> str:
        """Format a value of the signal."""
        return self.value.format(self.scale * value)


STATES: Mapping[str, LinkState] = {
    signals.GPU_PCIE_WIDTH.name: LinkState("the PCIe link of {}", "{:g} lanes", "pcie_width_max"),
    signals.GPU_PCIE_GENERATION.name: LinkState(
        "the PCIe link of {}",
        "generation {:g}",
        "pcie_generation_max",
        "check the slot's setting in the firmware, or reseat the card",
    ),
    signals.GPU_NVLINK_ACTIVE.name: LinkState("{}", "{:g} NVLinks up", ""),
    signals.RDMA_LINK_WIDTH.name: LinkState("the link of port {}", "{:g} lanes", ""),
    signals.RDMA_LINK_SPEED.name: LinkState(
        "the link of port {}", "{:g} Gb/s", "", scale=8 / 1_000_000_000
    ),
}
_FALLS_WHEN_IDLE = frozenset({signals.GPU_PCIE_GENERATION.name})
"""A GPU without work saves power: only its best reading counts."""


class NvLinks:
    """Which NVLinks of a node's GPUs had errors, are down, and what is at their other ends."""

    def __init__(self) -> None:
        self._errors: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
        """By (signal, device): errors by link."""
        self._rates: dict[tuple[str, int], float] = {}
        """By (device, link): the highest effective bit error rate."""
        self._down: dict[str, set[int]] = defaultdict(set)
        self._ends: dict[tuple[str, int], str] = {}

    def observe(self, event: Event) -> None:
        """Add the link states of an event; events are in order of time."""
        if event.kind not in ("nvlink-errors", "nvlink-states"):
            return
        attributes, device = event.attributes, str(event.attributes.get("device"))
        for link, signal, count in attributes.get("errors", ()):
            self._errors[signal, device][link] += count
        for link, rate in attributes.get("error_rates", ()):
            self._rates[device, link] = max(rate, self._rates.get((device, link), 0.0))
        self._down[device] |= set(attributes.get("down", ()))
        self._down[device] -= set(attributes.get("up", ()))
        for link, kind, address in attributes.get("remotes", ()):
            self._ends[device, link] = f" (to {kind}{' at ' if address else ''}{address})"

    def name_links(self, key: tuple[str, str]) -> tuple[str, str]:
        """Name the links that a counter's errors are of, and the share of the worst of several.

        key: (signal, device). Returns two texts, "" where nothing is known.
        """
        counts, device = self._errors.get(key, Counter()), key[1]
        ranked = sorted(counts, key=lambda link: (-counts[link], link))
        if len(ranked) <= 1:
            return (self._name_link(device, ranked[0]) if ranked else "", "")
        names = [str(link) for link in ranked[:_MAX_NAMED_LINKS]]
        unnamed = len(ranked) - len(names)
        last = f"{unnamed} more" if unnamed else names.pop()
        worst = f"{counts[ranked[0]]:,} of them on {self._name_link(device, ranked[0], '')}"
        return f"NVLinks {', '.join(names)} and {last} of {device}", f", {worst}"

    def name_down(self, key: tuple[str, str]) -> str:
        """Name the links that went down during the recording; "" where none is known.

        key: (signal, device); of other signals than the number of links that are up "".
        """
        links = sorted(self._down.get(key[1], ()))
        if key[0] != signals.GPU_NVLINK_ACTIVE.name or not links:
            return ""
        return f", without {', '.join(self._name_link(key[1], link, '') for link in links)}"

    def describe_rates(self) -> list[str]:
        """Describe each link whose bit error rate is above NVIDIA's limit."""
        return [
            f"{self._name_link(device, link)}: an effective bit error rate of {rate:g}"
            f" ({_NVIDIA} is {MAX_EFFECTIVE_RATE:g}): {_RESEAT}"
            for (device, link), rate in sorted(self._rates.items())
            if rate > MAX_EFFECTIVE_RATE
        ]

    def _name_link(self, device: str, link: int, owner: str = " of {}") -> str:
        return f"NVLink {link}{owner.format(device)}{self._ends.get((device, link), '')}"


class LinkTrends:
    """Counts errors and notes states of the links of one node, chunk by chunk."""

    def __init__(self) -> None:
        self._first_ns: int | None = None
        self._minutes = 0
        self._errors: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        self._states: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        self._devices: dict[str, Mapping[str, Any]] = {}
        self._nvlinks = NvLinks()

    def observe(self, chunk: Chunk) -> None:
        """Add the link readings of a chunk; chunks are in order of time."""
        if self._first_ns is None:
            self._first_ns = chunk.start_ns
        self._minutes = max(self._minutes, self._find_minute(chunk.end_ns - 1) + 1)
        for device in chunk.header.devices:
            self._devices[str(device.get("id"))] = device
        for key, readings in chunk.series.items():
            if key[0] in COUNTERS:
                self._count_errors(key, readings, chunk.start_ns)
            elif key[0] in STATES:
                self._note_states(key, readings)
        for event in chunk.events:
            self._nvlinks.observe(event)

    def describe_links(self) -> tuple[str, ...]:
        """Return a note on each link that shows errors or a worse state, by device."""
        errors = [self._describe_errors(key) for key in sorted(self._errors)]
        states = {key: self._describe_state(key) for key in sorted(self._states)}
        for name, device in self._states:
            if name == signals.RDMA_LINK_WIDTH.name and states[name, device]:
                states.pop((signals.RDMA_LINK_SPEED.name, device), None)  # lanes explain the rate
        notes = (*errors, *states.values(), *self._nvlinks.describe_rates())
        return tuple(note for note in notes if note)

    def _find_minute(self, t_ns: int) -> int:
        return max(t_ns - (self._first_ns or 0), 0) // MINUTE_NS

    def _count_errors(self, key: tuple[str, str], readings: Series, start_ns: int) -> None:
        growth, _ = series.compute_differences(readings.values)
        for row in np.flatnonzero((growth > 0) & (readings.t_ns[1:] > start_ns)).tolist():
            minute = self._find_minute(int(readings.t_ns[row + 1]))
            counts = self._errors[key]
            counts[minute] = counts.get(minute, 0) + int(growth[row])

    def _note_states(self, key: tuple[str, str], readings: Series) -> None:
        rows = np.flatnonzero(readings.values >= 0)
        if not rows.size:
            return
        minute = (readings.t_ns[rows] - (self._first_ns or 0)) // MINUTE_NS
        best_by_minute = self._states[key]
        for value in np.unique(minute).tolist():
            read = float(readings.values[rows][minute == value].max())
            best_by_minute[max(value, 0)] = max(best_by_minute.get(max(value, 0), read), read)

    def _describe_errors(self, key: tuple[str, str]) -> str:
        counter, counts = COUNTERS[key[0]], self._errors[key]
        windows: dict[int, int] = defaultdict(int)
        for minute, count in counts.items():
            windows[minute // counter.minutes] += count
        worst = max(windows.values())
        quarter = self._minutes // _QUARTER
        early = sum(count for minute, count in counts.items() if minute < quarter)
        late = sum(count for minute, count in counts.items() if minute >= self._minutes - quarter)
        is_long = self._minutes >= _MIN_TREND_MINUTES
        is_rising = is_long and late >= max(MIN_RISING_COUNT, RISE_FACTOR * early + 1)
        if worst <= counter.limit and not is_rising:
            return ""
        span = "minute" if counter.minutes == 1 else "hour"
        normal = f"{counter.source} is {counter.limit:,}" if counter.limit else "none is normal"
        link, share = self._nvlinks.name_links(key)
        text = f"{link or counter.link.format(key[1])}: {sum(counts.values()):,} {counter.what}"
        text += f"{share}, {worst:,} in one {span} ({normal})"
        if is_rising:
            text += f", rising from {early:,} in the first quarter of the time"
            text += f" to {late:,} in the last"
        return f"{text}: {_RESEAT}"

    def _describe_state(self, key: tuple[str, str]) -> str:
        state, by_minute = STATES[key[0]], self._states[key]
        best_value = max(by_minute.values())
        final = max(by_minute)
        last_value = max(
            value for minute, value in by_minute.items() if minute > final - LAST_MINUTES
        )
        link = state.link.format(key[1])
        if last_value < best_value and key[0] not in _FALLS_WHEN_IDLE:
            change = f"from {state.format_value(best_value)} to {state.format_value(last_value)}"
            down = self._nvlinks.name_down(key)
            return f"{link} fell {change}{down}: {state.remedy}"
        possible = self._devices.get(key[1], {}).get(state.best)
        if isinstance(possible, int) and best_value < possible:
            text = f"{state.format_value(best_value)} at most"
            return f"{link} has {text}, not {state.format_value(possible)}: {state.remedy}"
        return ""
