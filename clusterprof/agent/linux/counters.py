"""Integrals made of readings: of shares of time, and of counters of the firmware's own cycles.

What was not read is not counted: after a gap an integral of shares falls, which every reader of
counters takes for "not measured in between", and begins anew.
"""

from __future__ import annotations

LONGEST_HOLD_NS = 2_500_000_000
"""A share of an instant speaks for the time since the one before it, and no longer than this."""
EXACT_HOLD_NS = 600_000_000_000
"""What the hardware has summed up since speaks for longer."""
_BEGIN_NS = 1_000_000_000
_WORD = 1 << 32


class ShareIntegral:
    """Nanoseconds summed from shares, 0 to 1, of the time between two readings."""

    def __init__(self) -> None:
        self.total_ns = _BEGIN_NS
        self._begin_ns = _BEGIN_NS
        self._last_ns: int | None = None

    def add(self, share: float, now_ns: int, holds_ns: int = LONGEST_HOLD_NS) -> int:
        """Count a share for the time since the last reading, and return the total."""
        last_ns, self._last_ns = self._last_ns, now_ns
        if last_ns is not None and not 0 <= now_ns - last_ns <= holds_ns:
            self.gap()
        elif last_ns is not None:
            self.total_ns += round(min(max(share, 0.0), 1.0) * (now_ns - last_ns))
        return self.total_ns

    def gap(self) -> None:
        """Begin anew, below every total there has been."""
        self._begin_ns -= 1
        self.total_ns = self._begin_ns

    def lose(self) -> None:
        """Note that nothing is known since the last reading; the next one begins anew."""
        if self._last_ns is not None:
            self._last_ns = None
            self.gap()


class CycleShare:
    """Which share of the firmware's cycles something held, from sums of 32 bits that wrap.

    The unit of the sum of the compute dies' activity is told nowhere: percent, or one per cycle in
    which they worked. A share above 1.05 proves percent; one per cycle is taken for it when three
    times in a row the percentage of the same table agrees while the device works.
    """

    _TOLERANCE = 1.05
    _CLEAR_PERCENT, _NEAR_PERCENT, _CLEAR_TIMES = 20, 25, 3

    def __init__(self, unit: float = 0.0) -> None:
        self.unit = unit
        """What the sum rises by in a cycle of full activity; 0 = not known yet."""
        self.unchanged = False
        """The last reading was of the same table as the one before it."""
        self._last: tuple[int, int] | None = None
        self._agreed = 0

    def share(self, total: int, cycles: int, percent: int | None = None, bits: int = 32,
              ) -> float | None:  # fmt: skip
        """Return the share since the last reading; None when nothing is known of it.

        A rise of more than half of what the sums can hold means that they have begun anew.
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
        elif not self.unit and percent >= self._CLEAR_PERCENT:
            agrees = abs(100 * rate - percent) <= self._NEAR_PERCENT
            self._agreed = self._agreed + 1 if agrees else 0
            if self._agreed >= self._CLEAR_TIMES:
                self.unit = 1.0
