"""Integrals over readings: of time shares, and of counters in the firmware's own cycles.

Time that was not measured is not counted. After a gap an integral of shares decreases, which every
reader of counters interprets as "not measured in between", and restarts.
"""

from __future__ import annotations

LONGEST_HOLD_NS = 2_500_000_000
"""Longest time in ns for which an instantaneous share represents the time before it."""
EXACT_HOLD_NS = 600_000_000_000
"""Longest time in ns for a share that the hardware accumulated since the last reading."""
_START_NS = 1_000_000_000
_WORD = 1 << 32


class ShareIntegral:
    """Nanoseconds accumulated from shares (0 to 1) of the time between two readings."""

    def __init__(self) -> None:
        self.total_ns = _START_NS
        self._begin_ns = _START_NS
        self._last_ns: int | None = None

    def add(self, share: float, now_ns: int, holds_ns: int = LONGEST_HOLD_NS) -> int:
        """Add a share for the time since the last reading and return the total.

        now_ns, holds_ns and the result are in ns; a longer time than holds_ns restarts the
        integral.
        """
        last_ns, self._last_ns = self._last_ns, now_ns
        if last_ns is not None and not 0 <= now_ns - last_ns <= holds_ns:
            self.restart()
        elif last_ns is not None:
            self.total_ns += round(min(max(share, 0.0), 1.0) * (now_ns - last_ns))
        return self.total_ns

    def restart(self) -> None:
        """Restart below every earlier total, which marks the counter as reset."""
        self._begin_ns -= 1
        self.total_ns = self._begin_ns

    def invalidate(self) -> None:
        """Mark the time since the last reading as unknown; the next reading restarts it."""
        if self._last_ns is not None:
            self._last_ns = None
            self.restart()


class CycleShare:
    """The active share of the firmware's cycles, from 32-bit sums that wrap.

    The unit of the activity sum of the compute dies is undocumented: percent, or one per active
    cycle. A share above 1.05 proves percent. One per active cycle is assumed after three
    consecutive readings in which the percentage of the same table agrees while the device is busy.
    """

    _TOLERANCE = 1.05
    _MIN_PERCENT, _MAX_DEVIATION_PERCENT, _MIN_AGREEMENTS = 20, 25, 3

    def __init__(self, unit: float = 0.0) -> None:
        self.unit = unit
        """Increase of the sum in a cycle of full activity; 0 = not known yet."""
        self.unchanged = False
        """True when the last reading was of the same table as the one before it."""
        self._last: tuple[int, int] | None = None
        self._agreed = 0

    def share(
        self, total: int, cycles: int, percent: int | None = None, bits: int = 32
    ) -> float | None:
        """Return the share (0 to 1) since the last reading; None when it is unknown.

        An increase of more than half of the sum's range means that the sums were reset.
        """
        last, self._last = self._last, (total, cycles)
        self.unchanged = last is not None and last[1] == cycles
        if last is None:
            return None
        rise, passed = (total - last[0]) % (1 << bits), (cycles - last[1]) % _WORD
        if not passed or passed > _WORD // 2 or rise > (1 << bits) // 2:
            return None
        rate = rise / passed
        if percent is not None:
            self._learn(rate, percent)
        if not self.unit or rate > self.unit * self._TOLERANCE:
            return None
        return min(rate / self.unit, 1.0)

    def _learn(self, rate: float, percent: int) -> None:
        if rate > self._TOLERANCE:
            self.unit = 100.0
        elif not self.unit and percent >= self._MIN_PERCENT:
            agrees = abs(100 * rate - percent) <= self._MAX_DEVIATION_PERCENT
            self._agreed = self._agreed + 1 if agrees else 0
            if self._agreed >= self._MIN_AGREEMENTS:
                self.unit = 1.0
