"""Why an AMD device runs below its clock, and for how long, out of its firmware's table.

v1.6 and later count for how many of the firmware's cycles each limiter held: heat of the package,
of voltage regulators or of memory, the power limit, and PROCHOT, the board's own alarm
(drivers/gpu/drm/amd/pm/swsmu/smu13/smu_v13_0_6_ppt.c). v1.3 has the limiters of the instant as a
mask (`indep_throttle_status`, bits of pm/swsmu/inc/amdgpu_smu.h). The other versions have a field
for it that the driver leaves empty: they tell nothing.
"""

from __future__ import annotations

from clusterprof.errors import Unavailable
from clusterprof.linux.gpu_metrics import Metrics
from clusterprof.linux.integral import EXACT_HOLD_NS, CycleShare, ShareIntegral

POWER, HARDWARE, THERMAL, HOT = 0x4, 0x8, 0x20, 0x40
"""NVML's mask: power cap, slowdown by hardware, slowdown by heat, heat alarm of hardware."""
_THROTTLERS = (
    (range(0, 24), POWER),  # package power, currents
    (range(32, 44), THERMAL),
    (range(44, 46), HOT),  # alarm of the voltage regulators
    (range(46, 48), HARDWARE),  # PROCHOT
    (range(56, 57), POWER),
)
_THERMALS = ("socket_thermal", "vr_thermal", "memory_thermal")
_BITS, _HEAT_NS, _POWER_NS = (
    "gpu.throttle_bits",
    "gpu.thermal_violation_ns_total",
    "gpu.power_violation_ns_total",
)
_SECOND = Unavailable("absent", "known from the second sample on")


class Slowdown:
    """Reasons and times of one card, from one table to the next."""

    def __init__(self) -> None:
        self._sums = {name: CycleShare(1.0) for name in ("prochot", "power", *_THERMALS)}
        self._heat, self._power = ShareIntegral(), ShareIntegral()
        self._last: dict[str, int | Unavailable] = {}

    def values(self, table: Metrics | Unavailable, now_ns: int) -> dict[str, int | Unavailable]:
        """Return the reasons as NVML's mask and both times, or why they are not known."""
        absent = not_told(table)
        told: dict[str, int | Unavailable] = dict.fromkeys((_BITS, _HEAT_NS, _POWER_NS), absent)
        if isinstance(table, Unavailable):
            return told
        if "throttle" in table.values:
            return {**told, _BITS: throttle_mask(table.values["throttle"])}
        cycles = table.values.get("cycles")
        if cycles is None or not self._sums.keys() <= table.values.keys():
            return told
        shares = {n: sums.share(table.values[n], cycles) for n, sums in self._sums.items()}
        if not self._sums["power"].unchanged or not self._last:
            self._last = self._held(shares, now_ns)
        return self._last

    def _held(self, shares: dict[str, float | None], now_ns: int) -> dict[str, int | Unavailable]:
        known = {name: share for name, share in shares.items() if share is not None}
        if known.keys() != shares.keys():
            for integral in (self._heat, self._power):
                integral.lose()
                integral.add(0.0, now_ns)
            return {_BITS: _SECOND, _HEAT_NS: _SECOND, _POWER_NS: _SECOND}
        heat = max(known[name] for name in _THERMALS)
        return {
            _BITS: POWER * (known["power"] > 0)
            | THERMAL * (heat > 0)
            | HARDWARE * (known["prochot"] > 0),
            _HEAT_NS: self._heat.add(heat, now_ns, EXACT_HOLD_NS),
            _POWER_NS: self._power.add(known["power"], now_ns, EXACT_HOLD_NS),
        }


def throttle_mask(status: int) -> int:
    """Return NVML's mask of the driver's `indep_throttle_status`."""
    mask = 0
    for bits, reason in _THROTTLERS:
        if any(status >> bit & 1 for bit in bits):
            mask |= reason
    return mask


def not_told(table: Metrics | Unavailable) -> Unavailable:
    """Say why a field is missing: there is no table, or its version does not fill it."""
    if isinstance(table, Unavailable):
        return table
    return Unavailable("absent", f"the firmware's table v{table.version} does not tell it")
