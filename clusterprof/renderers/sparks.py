"""Utilisation and loss over the run, as a line of small bars and as words.

busy   ▇▇▇▇▇▇▅▁▁▂▆▇▇▇▇▇▇      of the time inside steps, over all ranks
lost            ▂▆▆▅
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from clusterprof.findings import Report
from clusterprof.history import WAITING
from clusterprof.renderers.text_safety import safe_text
from clusterprof.units import human

BARS = "▁▂▃▄▅▆▇█"
_OUTSIDE = "·"  # no time inside steps
_HARDLY = 0.005  # less is no bar
_STANDS_OUT = 1.5
"""The worst part of the run is named when it lost so many times as much as the whole …"""
_AT_LEAST = 0.05
"""… and so much of its time more."""
_SHORT_NS, _VERY_SHORT_NS = 2_000_000_000, 100_000_000
"""Ends of runs whose times are written in ms, and in tenths of them."""
_WAITED = {WAITING: "waiting for other ranks"}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run, over all ranks."""

    start_ns: int
    end_ns: int
    in_step_ns: int
    lost_ns: int
    causes: tuple[tuple[str, int], ...]
    """Largest first, without those of nothing."""

    @property
    def lost_ratio(self) -> float | None:
        """None where no time was inside steps."""
        return self.lost_ns / self.in_step_ns if self.in_step_ns else None


def parts(report: Report, most: int, without: Collection[int] = ()) -> list[Part]:
    """Return the run in at most `most` equal parts; [] without a history.

    `without`: places of ranks that are not counted.
    """
    history = report.history
    if history is None or not history.stretches or most < 1:
        return []
    each = -(-history.stretches // most)
    out = []
    for low in range(0, history.stretches, each):
        high = min(low + each, history.stretches)
        sums: dict[str, int] = {}
        ranks = [rank for rank in history.ranks if rank.rank not in without]
        for rank in ranks:
            for cause, ns in rank.lost:
                if some := sum(ns[low:high]):
                    sums[cause] = sums.get(cause, 0) + some
        in_step = sum(sum(rank.in_step_ns[low:high]) for rank in ranks)
        begin, end = (history.begin_ns + at * history.stretch_ns for at in (low, high))
        causes = tuple(sorted(sums.items(), key=lambda line: (-line[1], line[0])))
        out.append(Part(begin, end, in_step, sum(sums.values()), causes))
    return out


def sparklines(some: Sequence[Part]) -> tuple[str, str]:
    """Return the bars of busy time and of lost time, one for each part."""
    lost = [one.lost_ratio for one in some]
    busy = [None if ratio is None else 1.0 - ratio for ratio in lost]
    return _bars(busy), _bars(lost)


def _bars(ratios: Sequence[float | None]) -> str:
    return "".join(
        _OUTSIDE
        if ratio is None
        else " "
        if ratio < _HARDLY
        else BARS[min(int(ratio * len(BARS)), len(BARS) - 1)]
        for ratio in ratios
    )


def worst(some: Sequence[Part]) -> Part | None:
    """Return the part that lost most of its time, where it stands out from the run.

    The ends of a run, with less than half the time in steps of the fullest part, do not.
    """
    in_step = sum(one.in_step_ns for one in some)
    whole = sum(one.lost_ns for one in some) / in_step if in_step else 0.0
    usual = max((one.in_step_ns for one in some), default=0) / 2
    known = [one for one in some if one.in_step_ns > usual]
    most = max(known, key=lambda one: one.lost_ratio or 0.0, default=None)
    if most is None or (most.lost_ratio or 0.0) < max(_STANDS_OUT * whole, whole + _AT_LEAST):
        return None
    return most


def sentences(report: Report, most: int = 12) -> list[str]:
    """Say in words how loss changed over the run; [] without a history."""
    some = parts(report, most)
    if not some:
        why = report.history.why_missing if report.history is not None else ""
        return [f"not known: {safe_text(why, 300)}"] if why else []
    return [told(one, some[-1].end_ns) for one in some]


def told(one: Part, last_ns: int) -> str:
    """Say when a part of a run that ends at `last_ns` was, what was lost in it and chiefly why."""
    when = f"{clock_of(one.start_ns, last_ns)} to {clock_of(one.end_ns, last_ns)}"
    ratio = one.lost_ratio
    if ratio is None:
        return f"{when}: outside steps"
    chief = f", chiefly {called(one.causes[0][0])}" if one.causes and ratio >= 0.01 else ""
    return f"{when}: {human(ratio, 'ratio')} lost{chief}"


def called(cause: str) -> str:
    """Return the name of a line of a history as a person reads it."""
    return _WAITED.get(cause, safe_text(cause, 60))


def clock_of(ns: int, end_ns: int) -> str:
    """Write a time of a run, or part of one, that ends at `end_ns`: a short one in ms."""
    if end_ns >= _SHORT_NS:
        return clock(ns)
    return f"{ns / 1e6:.{1 if end_ns < _VERY_SHORT_NS else 0}f} ms"


def clock(ns: int) -> str:
    """Write a time of the run: 12.3 s, 4:05, 1:02:09."""
    tenths = round(ns / 1e8)
    if tenths < 1200:
        return f"{tenths / 10:.1f} s"
    seconds = round(ns / 1e9)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
