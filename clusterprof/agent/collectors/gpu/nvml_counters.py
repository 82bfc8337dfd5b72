"""GPM, the performance counters that NVML can read on Hopper and newer GPUs.

Two samples of the counters make one value: its mean over the time between them, gapless from one
reading to the next, so that means times durations add up. NVIDIA's manual asks for more than
100 ms between two samples, for the driver refreshes them no oftener. Percentages are of the time,
of the multiprocessors or of the theoretical maximum; PCIe and NVLink are in MiB per second.
https://docs.nvidia.com/deploy/nvml-api/group__nvmlGpmFunctions.html
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from clusterprof.collectors.nvml.errors import reason_of
from clusterprof.errors import Unavailable

Value = int | float | Unavailable

GRAPHICS, SM, OCCUPANCY, TENSOR, DRAM = 1, 2, 3, 5, 10
PCIE_TRANSMIT, PCIE_RECEIVE = 20, 21
NVLINK_RECEIVE, NVLINK_TRANSMIT = 60, 61
"""Metric identifiers of nvml.h; pynvml before 12.535 has no names for them."""

LEAST_NS = 100_000_000
_STALE_NS = 10_000_000_000
_MIB = 1 << 20
_MOST_PERCENT = 101.0  # rounding; more is no share of anything
_RATES = frozenset({PCIE_TRANSMIT, PCIE_RECEIVE, NVLINK_RECEIVE, NVLINK_TRANSMIT})
OFF = Unavailable("absent", "GPM is not to be used", "set sampling.gpm in the profile to true")
UNSUPPORTED = Unavailable("absent", "GPM needs a Hopper GPU or a newer one")


class Gpm:
    """The counters of one GPU or MIG instance; used by one thread. `begin()` comes first."""

    def __init__(
        self,
        nvml: Any,
        take: Callable[[Any], Any],
        metrics: tuple[int, ...],
        clock: Callable[[], int],
        pause: Callable[[float], None],
    ) -> None:
        """`take` reads the counters into a sample."""
        self._nvml, self._take, self._metrics = nvml, take, metrics
        self._clock, self._pause = clock, pause
        self._samples: list[Any] = []
        self._taken_ns = 0
        self._request: Any = None
        self.elapsed_ns = 0
        """Time between the two samples of the last reading."""
        self.unbroken = False
        """The last reading began where the one before it ended."""

    def begin(self) -> None:
        """Take the sample at which the first mean begins; raises what NVML raises."""
        if self._request is None:
            self._prepare()
        self._take(self._samples[0])
        self._taken_ns = self._clock()

    def read(self) -> dict[int, Value]:
        """Return by metric its mean since the last reading: ratios, and bytes per second.

        Raises what NVML raises; the next one then covers the time of the failure, too, unless that
        was longer than 10 s. Waits where the beginning is not 100 ms ago.
        """
        self.unbroken = self._clock() - self._taken_ns <= _STALE_NS
        if not self.unbroken:
            self.begin()
        wait_ns = LEAST_NS - (self._clock() - self._taken_ns)
        if wait_ns > 0:
            self._pause(wait_ns / 1e9)
        self._take(self._samples[1])
        now_ns = self._clock()
        self._request.sample1, self._request.sample2 = self._samples
        self._nvml.nvmlGpmMetricsGet(self._request)
        self._samples.reverse()  # this reading's end is the next one's beginning
        self.elapsed_ns, self._taken_ns = now_ns - self._taken_ns, now_ns
        return {
            metric: _value(metric, self._request.metrics[at])
            for at, metric in enumerate(self._metrics)
        }

    def _prepare(self) -> None:
        self._samples = [self._nvml.nvmlGpmSampleAlloc() for _ in range(2)]
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self._metrics)
        for at, metric in enumerate(self._metrics):
            request.metrics[at].metricId = metric
        self._request = request


def _value(metric: int, found: Any) -> Value:
    """A ratio or bytes per second, or why there is none."""
    if found.nvmlReturn:
        return reason_of(int(found.nvmlReturn))
    value = float(found.value)
    most = math.inf if metric in _RATES else _MOST_PERCENT
    if not 0.0 <= value <= most:  # not a number, too
        return Unavailable("failed", f"NVML: impossible value {value:g}")
    return value * _MIB if metric in _RATES else min(value / 100, 1.0)
