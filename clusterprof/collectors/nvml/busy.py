"""An integral of busy time out of the driver's samples."""

from __future__ import annotations

from collections.abc import Sequence

_QUIET_NS = 1_000_000_000


class BusyIntegral:
    """Busy time summed from the driver's sample buffer, or from snapshots where it has none.

    A buffer sample (timestamp, percent) speaks for the time since the sample before it. The
    buffer of an idle GPU may be empty, which is neither an error nor zero: after a second
    without samples the snapshot's share counts for the time that has passed.
    """

    def __init__(self) -> None:
        self.total_ns = 0
        self.last_us = 0
        """Timestamp of the driver up to which time is counted; 0 = nothing seen yet."""
        self._until_ns: int | None = None

    def add(
        self,
        samples: Sequence[tuple[int, int]],
        percent: int | None,
        now_ns: int,
        has_buffer: bool = True,
    ) -> None:
        """Count (timestamp µs, percent) samples, or `percent` of now when there are none."""
        if self._until_ns is None:  # what was before us is not ours
            self._until_ns = now_ns
            self.last_us = max((t_us for t_us, _ in samples), default=0)
            return
        elapsed_ns = now_ns - self._until_ns
        if samples:
            for t_us, value in sorted(samples):
                if t_us > self.last_us:
                    if self.last_us:
                        self.total_ns += (t_us - self.last_us) * value * 10  # µs × percent
                    self.last_us = t_us
            self._until_ns = now_ns
        elif (elapsed_ns >= _QUIET_NS or not has_buffer) and percent is not None:
            self.total_ns += elapsed_ns * percent // 100
            if self.last_us:
                self.last_us += elapsed_ns // 1000
            self._until_ns = now_ns
