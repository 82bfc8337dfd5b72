"""GPM, the performance counters that NVML can read on Hopper and newer GPUs.

Two samples of the counters give one value: its mean over the time between them.
Readings are gapless, so sums of mean times duration are exact. NVIDIA's manual requires
more than 100 ms between two samples, because the driver does not refresh them more
often. Percentages refer to time, to the multiprocessors or to the theoretical maximum;
PCIe and NVLink are in MiB per second.
https://docs.nvidia.com/deploy/nvml-api/group__nvmlGpmFunctions.html

Busy time, summed from the driver's samples or from means of GPM.

Links and memory of a GPU: NVLink traffic and errors, remapped rows, retired pages.

Errors of NVLinks, by generation of the GPU. The sum over all links is read every 10 s, and the
counters of each link only when the sum has grown:

    up to Ampere   sums: fields …_TOTAL   of a link: fields …_L0 to …_L11
    Hopper         sums: fields …_TOTAL   of a link: fields NVLINK_ERROR_DL_*, scope = link
    Blackwell      fields NVLINK_COUNT_*: scope = link, or all links

https://docs.nvidia.com/deploy/nvml-api/change-log.html (525: Hopper, 565: Blackwell); DCGM,
DcgmCMUtils.cpp, NvmlFieldRequiresNvLinkAggregate: which fields have a value of all links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from clusterprof.agent.collectors.gpu.nvml_errors import FATAL_CODES, explain_code
from clusterprof.errors import Unavailable

Value = int | float | Unavailable

GRAPHICS, SM, OCCUPANCY, TENSOR, DRAM = 1, 2, 3, 5, 10
PCIE_TRANSMIT, PCIE_RECEIVE = 20, 21
NVLINK_RECEIVE, NVLINK_TRANSMIT = 60, 61
"""Metric identifiers of nvml.h; pynvml before 12.535 has no names for them."""

MIN_INTERVAL_NS = 100_000_000
_TRIAL_READINGS = 5
_MAX_GAP_NS = 10_000_000_000
_MIB = 1 << 20
_MAX_PERCENT = 101.0  # allows for rounding; a larger value is not a valid share
_RATE_METRICS = frozenset({PCIE_TRANSMIT, PCIE_RECEIVE, NVLINK_RECEIVE, NVLINK_TRANSMIT})
GPM_OFF = Unavailable("absent", "GPM is disabled", "set sampling.gpm in the profile to true", True)
GPM_BUDGET_NS = 5_000_000
"""Limit of the time of one reading, measured when the device is opened."""
GPM_TOO_SLOW = Unavailable(
    "absent",
    "one reading of GPM takes longer than its budget of 5 ms here",
    "set sampling.gpm in the profile to true to read it anyway",
    by_user=True,
)
GPM_UNSUPPORTED = Unavailable("absent", "GPM needs a Hopper GPU or a newer one")


_QUIET_NS = 1_000_000_000
_MAX_SAMPLE_AGE_NS = 30_000_000_000
"""A driver keeps samples for some 20 s; an older or a future time stamp is of another clock."""
_CLOCK_TOLERANCE_NS = 2_000_000
_MAX_LAG_NS = 2_000_000_000
"""A sample covers up to a second and is handed over up to that much later."""


class BusyIntegral:
    """Busy time summed from the driver's sample buffer, or from snapshots where it has none.

    A buffer sample (timestamp, percent) covers the time since the previous sample. The
    buffer of an idle GPU may be empty, which is neither an error nor zero: after a second
    without samples the snapshot's share applies to the elapsed time.
    """

    def __init__(self) -> None:
        self.total_ns = 0
        self.until_ns: int | None = None
        """Time on the recording's clock up to which `total_ns` counts; None = no sample yet."""
        self.last_us = 0
        """Driver timestamp in µs up to which time is counted; 0 = no sample yet."""
        self._read_ns: int | None = None
        """When samples or a snapshot were last counted, ns."""

    def add(
        self,
        samples: Sequence[tuple[int, int]],
        percent: int | None,
        now_ns: int,
        driver_now_ns: int,
        has_buffer: bool = True,
    ) -> None:
        """Add (timestamp µs, percent) samples, or the current `percent` when there are none.

        now_ns: time of the reading on the recording's clock. driver_now_ns: the same instant
        on the clock of the timestamps, which is the time of day.
        """
        newest_us = max((t_us for t_us, _ in samples), default=0)
        if self._read_ns is None:  # time before the first reading is not counted
            self._read_ns = now_ns
            self.last_us = newest_us
            if newest_us:
                self._advance(now_ns, driver_now_ns)
            return
        elapsed_ns = now_ns - self._read_ns
        counted_ns = self._read_ns if self.until_ns is None else self.until_ns
        is_new_clock = False
        if samples and not self._follows(newest_us, elapsed_ns):
            ended_ns = _locate(newest_us, now_ns, driver_now_ns)
            is_new_clock = ended_ns is None  # nothing says where its timestamps go on
            self.last_us = newest_us - ((ended_ns or counted_ns) - counted_ns) // 1000
        new_samples = sorted(sample for sample in samples if sample[0] > self.last_us)
        if new_samples:
            for t_us, value in new_samples:
                self.total_ns += (t_us - self.last_us) * 1000 * value // 100
                self.last_us = t_us
            self._read_ns = now_ns
            self._advance(now_ns, driver_now_ns)
        elif (elapsed_ns >= _QUIET_NS or not has_buffer) and percent is not None:
            self.total_ns += elapsed_ns * percent // 100
            self.until_ns = counted_ns + elapsed_ns
            self._read_ns = now_ns
            if self.last_us and not is_new_clock:
                self.last_us += elapsed_ns // 1000
            if self.last_us * 1000 > driver_now_ns + _CLOCK_TOLERANCE_NS:
                self.last_us = 0  # the clock went back: the driver has nothing newer for long

    def add_mean(self, share: float, elapsed_ns: int, now_ns: int, driver_now_ns: int) -> None:
        """Add a mean that ends now, for the time not counted yet; samples may follow it.

        Samples may have counted a part of it, or end a little before it. After a time that
        neither covers the sum begins again.
        """
        uncounted_ns = elapsed_ns if self.until_ns is None else now_ns - self.until_ns
        if uncounted_ns > elapsed_ns + _MAX_LAG_NS:
            self.restart()
            uncounted_ns = elapsed_ns
        self.total_ns += round(share * uncounted_ns)
        self.until_ns = self._read_ns = now_ns
        self.last_us = driver_now_ns // 1000

    def restart(self) -> None:
        """Count from 0 again: the time since the last value was not measured."""
        self.total_ns = 0

    def _follows(self, newest_us: int, elapsed_ns: int) -> bool:
        """Return whether the newest timestamp can follow the last one: no clock has jumped."""
        period_ns = (newest_us - self.last_us) * 1000
        return bool(self.last_us) and -_MAX_SAMPLE_AGE_NS <= period_ns <= elapsed_ns + _QUIET_NS

    def _advance(self, now_ns: int, driver_now_ns: int) -> None:
        """Set `until_ns` to the newest timestamp if that can be of the time of day."""
        ended_ns = _locate(self.last_us, now_ns, driver_now_ns)
        until_ns = now_ns if ended_ns is None else ended_ns
        self.until_ns = until_ns if self.until_ns is None else max(until_ns, self.until_ns)


def _locate(t_us: int, now_ns: int, driver_now_ns: int) -> int | None:
    """Return a timestamp on the recording's clock; None if it cannot be of the time of day."""
    age_ns = driver_now_ns - t_us * 1000
    is_plausible = -_CLOCK_TOLERANCE_NS <= age_ns <= _MAX_SAMPLE_AGE_NS
    return now_ns - max(age_ns, 0) if is_plausible else None


class Gpm:
    """The counters of one GPU or MIG instance; used by one thread. Call `begin()` first."""

    def __init__(
        self,
        nvml: Any,
        take_sample: Callable[[Any], Any],
        metrics: tuple[int, ...],
        clock: Callable[[], int],
        pause: Callable[[float], None],
    ) -> None:
        """Set up the counters.

        take_sample: reads the counters into a sample.
        """
        self._nvml, self._take, self._metrics = nvml, take_sample, metrics
        self._clock, self._pause = clock, pause
        self._samples: list[Any] = []
        self.taken_ns = 0
        """When the last reading ended, ns."""
        self._request: Any = None
        self.elapsed_ns = 0
        """Time between the two samples of the last reading."""
        self.is_gapless = False
        """True when the last reading began where the one before it ended."""

    def begin(self) -> None:
        """Take the sample at which the first mean begins; raise what NVML raises."""
        if self._request is None:
            self._prepare()
        self._take(self._samples[0])
        self.taken_ns = self._clock()

    def read(self) -> dict[int, Value]:
        """Return the mean of each metric since the last reading: ratios, and bytes per second.

        Waits if the start is less than 100 ms ago. Raises what NVML raises; the next reading
        then also covers the time of the failure, unless that was longer than 10 s.
        """
        self.is_gapless = self._clock() - self.taken_ns <= _MAX_GAP_NS
        if not self.is_gapless:
            self.begin()
        self.wait_until_ready()
        now_ns = self.request_means()
        self._samples.reverse()  # the end of this reading is the start of the next one
        self.elapsed_ns, self.taken_ns = now_ns - self.taken_ns, now_ns
        return {
            metric: _convert_metric(metric, self._request.metrics[index])
            for index, metric in enumerate(self._metrics)
        }

    def wait_until_ready(self) -> None:
        """Wait until NVML's least interval since the first sample is over."""
        wait_ns = MIN_INTERVAL_NS - (self._clock() - self.taken_ns)
        if wait_ns > 0:
            self._pause(wait_ns / 1e9)

    def request_means(self) -> int:
        """Take the second sample and have NVML compute the means; returns when it was taken, ns."""
        self._take(self._samples[1])
        now_ns = self._clock()
        self._request.sample1, self._request.sample2 = self._samples
        self._nvml.nvmlGpmMetricsGet(self._request)
        return now_ns

    def _prepare(self) -> None:
        self._samples = [self._nvml.nvmlGpmSampleAlloc() for _ in range(2)]
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self._metrics)
        for index, metric in enumerate(self._metrics):
            request.metrics[index].metricId = metric
        self._request = request


def time_readings(
    counters: Gpm, call: Callable[[str, Callable[[], int]], int | None], clock: Callable[[], int]
) -> Gpm | Unavailable:
    """Time whole readings; returns the counters, or that they are too slow.

    The least of several counts, because the CPU is shared. One that fails has no time.
    call: makes a call of this name; None when it fails.
    """
    counters.wait_until_ready()
    times_ns = []
    for _ in range(_TRIAL_READINGS):
        began_ns = clock()
        if call("GpmMetricsGet", counters.request_means) is not None:
            times_ns.append(clock() - began_ns)
    return GPM_TOO_SLOW if min(times_ns, default=0) > GPM_BUDGET_NS else counters


def _convert_metric(metric: int, result: Any) -> Value:
    """Return a ratio or bytes per second, or why there is none."""
    if result.nvmlReturn:
        return explain_code(int(result.nvmlReturn))
    value = float(result.value)
    limit = math.inf if metric in _RATE_METRICS else _MAX_PERCENT
    if not 0.0 <= value <= limit:  # also rejects NaN
        return Unavailable("failed", f"NVML: impossible value {value:g}")
    return value * _MIB if metric in _RATE_METRICS else min(value / 100, 1.0)


_ALL_LINKS = 0xFFFFFFFF
"""Value of nvml.h that selects all links instead of one."""
_KIB = 1024
_VALUE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
NO_LINKS = Unavailable("absent", "the GPU has no NVLink")
_MAX_LINKS = 64
_NOT_SUPPORTED, _INVALID = 3, 2
REPLAYS, RECOVERIES = "gpu.nvlink_replays_total", "gpu.nvlink_recoveries_total"
CRC_ERRORS, SYMBOL_ERRORS = "gpu.nvlink_crc_errors_total", "gpu.nvlink_symbol_errors_total"
EFFECTIVE_ERRORS = "gpu.nvlink_effective_errors_total"
ERROR_SIGNALS = (REPLAYS, RECOVERIES, CRC_ERRORS)
"""Signals of `read_nvlink_errors`."""
_HOPPER_FIELDS = ((REPLAYS, 161), (RECOVERIES, 162), (CRC_ERRORS, 163))
_BLACKWELL_FIELDS = ((RECOVERIES, 215), (SYMBOL_ERRORS, 221), (EFFECTIVE_ERRORS, 219))
"""(signal, field) of nvml.h, with a link as its scope; older bindings have no names for them."""
_EFFECTIVE_RATE = 220
COUNT_SIGNALS = tuple(signal for signal, _ in _BLACKWELL_FIELDS)
"""Signals of `read_nvlink_counts`."""
_NUMBERED_FIELDS = (
    (REPLAYS, 46, 108),
    (RECOVERIES, 53, 114),
    (CRC_ERRORS, 32, 96),
    (CRC_ERRORS, 39, 102),
)
"""(signal, field of link 0, field of link 6): NVML has fields of twelve links."""
_NUMBERED_LINKS, _SECOND_SIX = 12, 6
_REMOTE_KINDS = {0: "a GPU", 1: "a CPU", 2: "a switch"}
_LinkCounts = dict[tuple[int, str], int]


def read_fields(nvml: Any, handle: Any, wanted: Sequence[tuple[int, int]]) -> list[Any]:
    """Return the values of (field, scope), each a number or `Unavailable`, with one call."""
    results = nvml.nvmlDeviceGetFieldValues(handle, list(wanted))
    return [
        explain_code(int(result.nvmlReturn)) if result.nvmlReturn else _get_number(result)
        for result in (results[index] for index in range(len(wanted)))
    ]


def read_nvlink_bytes(nvml: Any, handle: Any) -> tuple[Any, ...]:
    """Return data bytes received and sent on all NVLinks since the driver was loaded."""
    received = nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
    sent = nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
    counts = read_fields(nvml, handle, ((received, _ALL_LINKS), (sent, _ALL_LINKS)))
    return tuple(count if isinstance(count, Unavailable) else count * _KIB for count in counts)


def read_nvlink_errors(nvml: Any, handle: Any) -> tuple[Any, ...]:
    """Return replays, recoveries, and the sum of flit and data CRC errors, of all links."""
    replays, recoveries, flits, data = read_fields(
        nvml,
        handle,
        (
            (nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 0),
            (nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 0),
            (nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 0),
            (nvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, 0),
        ),
    )
    damaged = flits if isinstance(flits, Unavailable) else data
    if not isinstance(damaged, Unavailable):
        damaged = flits + data
    return (replays, recoveries, damaged)


def read_nvlink_counts(nvml: Any, handle: Any, links: int) -> tuple[Any, ...]:
    """Return recoveries, symbol errors and effective errors of all links, from Blackwell on.

    Where the driver has no value of all links, those of the links are added.
    """
    sums = read_fields(nvml, handle, [(field, _ALL_LINKS) for _, field in _BLACKWELL_FIELDS])
    if links and all(isinstance(value, Unavailable) for value in sums):
        counts = _sum_fields(nvml, handle, _list_blackwell_fields(links))
        names = {signal for _, signal in counts}
        return tuple(
            sum(count for (_, name), count in counts.items() if name == signal)
            if signal in names
            else reason
            for (signal, _), reason in zip(_BLACKWELL_FIELDS, sums)
        )
    return tuple(sums)


_FIRST_PAUSE_NS = 60_000_000_000
_MAX_PAUSE_NS = 960_000_000_000
"""Least time between two readings of all links: 1 minute at first, 16 after four of them. Links
that err all the time give some 90 events a day."""


class _Pace:
    """How often something may be done: twice as rarely each time, down to every 16 minutes."""

    def __init__(self) -> None:
        self._due_ns, self._pause_ns = 0, _FIRST_PAUSE_NS

    def take(self, now_ns: int) -> bool:
        """Return whether it may be done now, and count that it is."""
        if now_ns < self._due_ns:
            return False
        self._due_ns = now_ns + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, _MAX_PAUSE_NS)
        return True


class LinkWatch:
    """Finds which NVLinks of one GPU have errors or went down; used by one thread.

    The sums over all links are what is sampled. A reading of all links asks for 54 values on
    Hopper, so it is made once at first, and then when a sum has grown.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of links; 0 = not known."""
        self._up: list[bool] = []
        self._sums: tuple[Any, ...] | None = None
        self._counts: _LinkCounts = {}
        self._state_pace, self._error_pace = _Pace(), _Pace()

    def note_states(
        self, nvml: Any, handle: Any, up: list[bool], now_ns: int
    ) -> dict[str, Any] | None:
        """Return which links went down or came up since the last event; None = no event."""
        self.count = len(up)
        if len(self._up) != len(up):
            self._up = up
        changed = [link for link, was in enumerate(self._up) if was != up[link]]
        if not changed or not self._state_pace.take(now_ns):
            return None
        self._up = up
        down = [link for link in changed if not up[link]]
        return {
            "down": down,
            "up": [link for link in changed if up[link]],
            "remotes": read_remotes(nvml, handle, down),
        }

    def read_errors(
        self, nvml: Any, handle: Any, is_blackwell: bool, now_ns: int
    ) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
        """Return the errors of all links, and which links had how many since the last event.

        None = no event. Raises what NVML raises.
        """
        if is_blackwell:
            sums = read_nvlink_counts(nvml, handle, self.count)
        else:
            sums = read_nvlink_errors(nvml, handle)
        return sums, self._compare_links(nvml, handle, sums, is_blackwell, now_ns)

    def _compare_links(
        self, nvml: Any, handle: Any, sums: tuple[Any, ...], is_blackwell: bool, now_ns: int
    ) -> dict[str, Any] | None:
        is_first = self._sums is None
        if sums == self._sums or not self.count or (not is_first and not self._counts):
            return None  # or no counters of single links
        if not is_first and not self._error_pace.take(now_ns):
            return None
        before, self._sums = self._counts, sums
        try:
            # A link that is down has no counters; they go on when it is up again.
            counts = {**before, **read_link_counts(nvml, handle, self.count, is_blackwell)}
            grown = sorted(key for key, count in counts.items() if count > before.get(key, count))
            links = sorted({link for link, _ in grown})
            rates = read_effective_rates(nvml, handle, links) if is_blackwell and links else None
        except nvml.NVMLError as error:
            if error.value in FATAL_CODES:
                raise
            return None  # the sums are known all the same
        self._counts = counts
        if not grown:
            return None
        errors = [[*key, counts[key] - before[key]] for key in grown]
        event: dict[str, Any] = {"errors": errors, "remotes": read_remotes(nvml, handle, links)}
        return event if rates is None else {**event, "error_rates": rates}


def read_link_counts(nvml: Any, handle: Any, links: int, is_blackwell: bool) -> _LinkCounts:
    """Return the error counters of each link by (link, signal); empty where the GPU has none."""
    if is_blackwell:
        return _sum_fields(nvml, handle, _list_blackwell_fields(links))
    scoped = [(link, signal, f, link) for link in range(links) for signal, f in _HOPPER_FIELDS]
    numbered = [
        (link, signal, low + link if link < _SECOND_SIX else high + link - _SECOND_SIX, 0)
        for link in range(min(links, _NUMBERED_LINKS))
        for signal, low, high in _NUMBERED_FIELDS
    ]
    return _sum_fields(nvml, handle, scoped) or _sum_fields(nvml, handle, numbered)


def read_effective_rates(nvml: Any, handle: Any, links: Sequence[int]) -> list[list[Any]]:
    """Return [link, errors per bit] of links whose bit error rate after correction is known.

    The value has the exponent in its lowest 8 bits and the mantissa in the 4 above: 0x30D is
    3e-13. Source: nvml.h, NVML_NVLINK_ERROR_COUNTER_BER_GET.
    """
    values = read_fields(nvml, handle, [(_EFFECTIVE_RATE, link) for link in links])
    return [
        [link, float(f"{int(value) >> 8 & 0xF}e-{int(value) & 0xFF}")]
        for link, value in zip(links, values)
        if not isinstance(value, Unavailable)
    ]


def read_remotes(nvml: Any, handle: Any, links: Iterable[int]) -> list[list[Any]]:
    """Return [link, kind and PCI address of its remote end] of links where NVML reports them.

    The address is "" where it is not known.
    """
    remotes = []
    for link in links:
        try:
            kind = _REMOTE_KINDS.get(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
            if kind is not None:
                remotes.append([link, kind, _read_remote_address(nvml, handle, link)])
        except (nvml.NVMLError, AttributeError) as error:
            if getattr(error, "value", 0) in FATAL_CODES:
                raise
    return remotes


def _read_remote_address(nvml: Any, handle: Any, link: int) -> str:
    try:
        address = nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
    except nvml.NVMLError as error:
        if error.value in FATAL_CODES:
            raise
        return ""
    text = address.decode("ascii", "replace") if isinstance(address, bytes) else str(address)
    # Of a switch that the node does not see the driver answers zeros or ones.
    return text if set(text) - set("0Ff:.") else ""


def _list_blackwell_fields(links: int) -> list[tuple[int, str, int, int]]:
    return [(link, signal, f, link) for link in range(links) for signal, f in _BLACKWELL_FIELDS]


def _sum_fields(nvml: Any, handle: Any, fields: Sequence[tuple[int, str, int, int]]) -> _LinkCounts:
    """Read (link, signal, field, scope) with one call; returns the sums by (link, signal)."""
    values = read_fields(nvml, handle, [(field, scope) for _, _, field, scope in fields])
    sums: _LinkCounts = {}
    for (link, signal, _, _), value in zip(fields, values):
        if not isinstance(value, Unavailable):
            sums[link, signal] = sums.get((link, signal), 0) + int(value)
    return sums


def read_nvlink_states(nvml: Any, handle: Any) -> list[bool]:
    """Return for each NVLink of the GPU whether it is up.

    Raises: Unavailable where the GPU has none.
    """
    states: list[bool] = []
    try:
        while len(states) < _MAX_LINKS:
            states.append(bool(nvml.nvmlDeviceGetNvLinkState(handle, len(states))))
    except nvml.NVMLError as error:
        if error.value in FATAL_CODES or error.value not in (_NOT_SUPPORTED, _INVALID):
            raise
    if not states:
        raise NO_LINKS.with_traceback(None)
    return states


def read_remapped_rows(nvml: Any, handle: Any) -> tuple[int, ...]:
    """Return rows remapped for corrected and uncorrected errors, and pending and failed flags."""
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return (corrected, uncorrected, int(bool(pending)), int(bool(failed)))


def read_retired_pages(nvml: Any, handle: Any) -> tuple[int, ...]:
    """Return pages retired for repeated single-bit or double-bit errors, and a pending flag."""
    causes = (
        nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    pages = sum(len(nvml.nvmlDeviceGetRetiredPages(handle, cause)) for cause in causes)
    return (pages, int(bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))))


def _get_number(result: Any) -> int | float:
    kind = int(result.valueType)
    if not 0 <= kind < len(_VALUE_FIELDS):
        raise ValueError(f"a value of unknown type {kind}")
    value: int | float = getattr(result.value, _VALUE_FIELDS[kind])
    return value
