"""Trend of the loss over the run in words, from the time bins that are drawn as bars.

    ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁    steady      hardly more in one bin than in another
    ▁▁▁▁▂▂▃▃▄▄▅▅▆▆▇▇    rising      a line explains it best; falling: downwards
    ▁▁▁▁▁▆▆▆▆▆▆▆▆▆▆▆    from        one step up; until: one step down
    ▁▁▁▁▁▁▁▆▆▆▆▁▁▁▁▁    between     one segment of more loss; apart: one of less
    ▁▁▆▁▁▁▆▁▁▁▆▁▁▁▆▁    bursts      none of these

The lost share of the time in steps is computed for at most 24 time bins. Bins with less
than a quarter of the time in steps of the fullest (start-up, the end) are ignored. Loss
is steady where nine of ten bins lie within one bar of each other: an eighth of the
time, or half of the total lost share where that is less, but at least a twentieth.
Otherwise the trend that explains most of the variance is reported, if it explains half
of it.

Utilization and loss over the run, as a line of small bars and in words.

busy   ▇▇▇▇▇▇▅▁▁▂▆▇▇▇▇▇▇      share of the time inside steps, over all ranks
lost            ▂▆▆▅
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.report.history import WAITING_FOR_RANKS
from clusterprof.report.model import Report
from clusterprof.units import format_quantity
from clusterprof.util.ranges import format_number_list

BARS = "▁▂▃▄▅▆▇█"
_NO_STEP_MARK = "·"  # no time inside steps
_NEGLIGIBLE_RATIO = 0.005  # a smaller ratio is drawn as a blank
_WORST_BIN_FACTOR = 1.5
"""The worst bin is named if its lost ratio is this many times that of the whole run …"""
_WORST_BIN_MARGIN = 0.05
"""… and exceeds it by at least this ratio."""
_SHORT_NS, _VERY_SHORT_NS = 2_000_000_000, 100_000_000
"""Runs that end before these times have their times written in ms, and in tenths of ms."""
_CAUSE_LABELS = {WAITING_FOR_RANKS: "waiting for other ranks"}


@dataclass(frozen=True, slots=True)
class TimeBin:
    """A time bin of the run, over all ranks."""

    start_ns: int
    end_ns: int
    in_step_ns: int
    lost_ns: int
    causes: tuple[tuple[str, int], ...]
    """(cause, lost ns), largest first, without causes of zero."""

    @property
    def lost_ratio(self) -> float | None:
        """None where no time was inside steps."""
        return self.lost_ns / self.in_step_ns if self.in_step_ns else None


def split_run(report: Report, max_bins: int, without: Collection[int] = ()) -> list[TimeBin]:
    """Split the run into at most `max_bins` equal time bins; [] without a history.

    without: places of ranks that are not counted.
    """
    history = report.history
    if history is None or not history.bin_count or max_bins < 1:
        return []
    bins_per_part = -(-history.bin_count // max_bins)
    out = []
    for low in range(0, history.bin_count, bins_per_part):
        high = min(low + bins_per_part, history.bin_count)
        sums: dict[str, int] = {}
        ranks = [rank for rank in history.ranks if rank.rank not in without]
        for rank in ranks:
            for cause, ns in rank.lost:
                if lost_ns := sum(ns[low:high]):
                    sums[cause] = sums.get(cause, 0) + lost_ns
        in_step = sum(sum(rank.in_step_ns[low:high]) for rank in ranks)
        begin, end = (history.begin_ns + bin_index * history.bin_ns for bin_index in (low, high))
        causes = tuple(sorted(sums.items(), key=lambda line: (-line[1], line[0])))
        out.append(TimeBin(begin, end, in_step, sum(sums.values()), causes))
    return out


def draw_sparklines(bins: Sequence[TimeBin]) -> tuple[str, str]:
    """Draw the bars of busy time and of lost time, one character per time bin."""
    lost = [time_bin.lost_ratio for time_bin in bins]
    busy = [None if ratio is None else 1.0 - ratio for ratio in lost]
    return _draw_bars(busy), _draw_bars(lost)


def _draw_bars(ratios: Sequence[float | None]) -> str:
    return "".join(
        _NO_STEP_MARK
        if ratio is None
        else " "
        if ratio < _NEGLIGIBLE_RATIO
        else BARS[min(int(ratio * len(BARS)), len(BARS) - 1)]
        for ratio in ratios
    )


def find_worst_bin(bins: Sequence[TimeBin]) -> TimeBin | None:
    """Find the bin with the largest lost ratio, if it stands out from the run; None otherwise.

    Bins with less than half the in-step time of the fullest bin (the ends of a run) do not
    count.
    """
    in_step = sum(time_bin.in_step_ns for time_bin in bins)
    mean_ratio = sum(time_bin.lost_ns for time_bin in bins) / in_step if in_step else 0.0
    usual = max((time_bin.in_step_ns for time_bin in bins), default=0) / 2
    full_bins = [time_bin for time_bin in bins if time_bin.in_step_ns > usual]
    worst = max(full_bins, key=lambda time_bin: time_bin.lost_ratio or 0.0, default=None)
    if worst is None or (worst.lost_ratio or 0.0) < max(
        _WORST_BIN_FACTOR * mean_ratio, mean_ratio + _WORST_BIN_MARGIN
    ):
        return None
    return worst


def describe_bins(report: Report, max_bins: int = 12) -> list[str]:
    """Describe in words how the loss changed over the run; [] without a history."""
    bins = split_run(report, max_bins)
    if not bins:
        why = report.history.why_missing if report.history is not None else ""
        return [f"not known: {escape_text(why, 300)}"] if why else []
    return [describe_bin(time_bin, bins[-1].end_ns) for time_bin in bins]


def describe_bin(time_bin: TimeBin, last_ns: int, with_cause: bool = True) -> str:
    """Describe a time bin of a run that ends at `last_ns`: time, loss and main cause."""
    when = (
        f"{format_time_in_run(time_bin.start_ns, last_ns)} to"
        f" {format_time_in_run(time_bin.end_ns, last_ns)}"
    )
    ratio = time_bin.lost_ratio
    if ratio is None:
        return f"{when}: outside steps"
    chief = (
        f", mainly {get_cause_label(time_bin.causes[0][0])}"
        if with_cause and time_bin.causes and ratio >= 0.01
        else ""
    )
    return f"{when}: {format_quantity(ratio, 'ratio')} lost{chief}"


def get_cause_label(cause: str) -> str:
    """Get the display name of a cause in the history."""
    return _CAUSE_LABELS.get(cause, escape_text(cause, 60))


def format_time_in_run(ns: int, end_ns: int) -> str:
    """Format a run time (ns) of a run that ends at `end_ns`; short runs in ms."""
    if end_ns >= _SHORT_NS:
        return format_clock_time(ns)
    return f"{ns / 1e6:.{1 if end_ns < _VERY_SHORT_NS else 0}f} ms"


def format_clock_time(ns: int) -> str:
    """Format a run time (ns): 12.3 s, 4:05, 1:02:09."""
    tenths = round(ns / 1e8)
    if tenths < 1200:
        return f"{tenths / 10:.1f} s"
    seconds = round(ns / 1e9)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


MAX_BINS, MIN_BINS = 24, 8
STEADY_RATIO, MIN_SPREAD_RATIO = 0.125, 0.05
MIN_EXPLAINED_RATIO = 0.5
_OUTLIER_RATIO = 0.05  # of the bins on either side; a single odd bin beyond it is ignored
_SIMPLICITY_MARGIN = 0.1  # a segment has more parameters, so it must explain this much more
Kind = Literal["steady", "rising", "falling", "from", "until", "between", "apart", "bursts"]


@dataclass(frozen=True, slots=True)
class Trend:
    """When how much time was lost."""

    kind: Kind
    start_ns: int
    """Run time at which the segment that `kind` describes begins."""
    end_ns: int
    level_ratio: float
    """Lost share of the time in steps in that segment.

    For bursts in the worst bin; for rising and falling at the end.
    """
    rest_ratio: float
    """Lost share in the rest; for bursts in the median bin, for rising at the beginning."""
    run_end_ns: int
    """Run time at which the run ends."""
    ended: str = ""
    """Ranks that ended before the others, and when; the trend then describes the others only."""


def detect_trend(report: Report) -> Trend | None:
    """Detect the trend of the loss; None without a history or if the run is too short."""
    bins = split_run(report, MAX_BINS, _list_ended_ranks(report))
    fullest = max((time_bin.in_step_ns for time_bin in bins), default=0)
    known_bins = [
        time_bin for time_bin in bins if time_bin.in_step_ns and 4 * time_bin.in_step_ns >= fullest
    ]
    if len(known_bins) < MIN_BINS:
        return None
    return replace(_fit_trend(known_bins), ended=describe_ended_ranks(report))


def describe_ended_ranks(report: Report) -> str:
    """Describe which ranks ended before the others, and when; "" if none did."""
    history = report.history
    if history is None or not history.ended:
        return ""
    last_ns = history.begin_ns + history.bin_count * history.bin_ns
    first_ns = min(ns for _, ns in history.ended)
    named = [report.ranks[index].rank for index, _ in history.ended]
    count = len(named)
    if all(rank is not None for rank in named):
        names = (
            f"rank{'' if count == 1 else 's'}"
            f" {format_number_list([r for r in named if r is not None])}"
        )
    else:
        names = "1 rank" if count == 1 else f"{count:,} ranks"
    when = format_time_in_run(first_ns, last_ns)
    return f"{names} ended at {when}" if count == 1 else f"{names} ended, the first at {when}"


def _fit_trend(bins: Sequence[TimeBin]) -> Trend:
    ratios = [time_bin.lost_ns / time_bin.in_step_ns for time_bin in bins]
    last_ns = bins[-1].end_ns
    mean_ratio = _compute_lost_ratio(bins)
    ordered = sorted(ratios)
    outer = int(_OUTLIER_RATIO * len(bins))
    spread = ordered[len(bins) - 1 - outer] - ordered[outer]
    start, end = bins[0].start_ns, last_ns
    if spread < max(MIN_SPREAD_RATIO, min(STEADY_RATIO, mean_ratio / 2)):
        return Trend("steady", start, end, mean_ratio, mean_ratio, last_ns)
    mean = sum(ratios) / len(ratios)
    total = sum((ratio - mean) ** 2 for ratio in ratios)
    slope, line = _fit_line(ratios, mean, total)
    (low, high), box = _find_level_segment(ratios, mean, total, False)
    (left, right), step = _find_level_segment(ratios, mean, total, True)
    fit = max(line, step)
    if box >= fit + _SIMPLICITY_MARGIN and box >= MIN_EXPLAINED_RATIO:
        return _build_two_level_trend(bins, low, high, "between", "apart")
    if fit < MIN_EXPLAINED_RATIO:
        middle = ordered[(len(ordered) - 1) // 2]
        return Trend("bursts", start, end, ordered[-1], middle, last_ns)
    if line >= step:
        third = max(len(bins) // 3, 1)
        kind: Kind = "rising" if slope > 0 else "falling"
        return Trend(
            kind,
            start,
            end,
            _compute_lost_ratio(bins[-third:]),
            _compute_lost_ratio(bins[:third]),
            last_ns,
        )
    if left == 0:  # described by the segment at the end of the run, whichever lost more
        left, right = right, len(bins)
    return _build_two_level_trend(bins, left, right, "from", "until")


def _build_two_level_trend(
    bins: Sequence[TimeBin], low: int, high: int, kind_above: Kind, kind_below: Kind
) -> Trend:
    """Build a trend from a segment that lost more or less than the time around it."""
    inside, outside = (
        _compute_lost_ratio(bins[low:high]),
        _compute_lost_ratio([*bins[:low], *bins[high:]]),
    )
    start, end, last_ns = bins[low].start_ns, bins[high - 1].end_ns, bins[-1].end_ns
    if inside >= outside:
        return Trend(kind_above, start, end, inside, outside, last_ns)
    if kind_below == "until":
        return Trend(kind_below, bins[0].start_ns, start, outside, inside, last_ns)
    return Trend(kind_below, start, end, inside, outside, last_ns)


def _compute_lost_ratio(bins: Sequence[TimeBin]) -> float:
    in_step = sum(time_bin.in_step_ns for time_bin in bins)
    return sum(time_bin.lost_ns for time_bin in bins) / in_step if in_step else 0.0


def _fit_line(ratios: Sequence[float], mean: float, total: float) -> tuple[float, float]:
    """Fit a straight line; return its slope and the share of the variance it explains."""
    middle = (len(ratios) - 1) / 2
    width = sum((index - middle) ** 2 for index in range(len(ratios)))
    slope = sum((index - middle) * (ratio - mean) for index, ratio in enumerate(ratios)) / width
    return slope, slope * slope * width / total


def _find_level_segment(
    ratios: Sequence[float], mean: float, total: float, at_an_end: bool
) -> tuple[tuple[int, int], float]:
    """Find the segment whose own level explains most.

    Return its bins (low, high) and the share of the variance that it explains.
    """
    sums = [0.0]
    for ratio in ratios:
        sums.append(sums[-1] + ratio - mean)
    n = len(ratios)
    best_explained, segment = -1.0, (0, n)
    for low in range(n):
        for high in range(low + 1, n + 1):
            ends = (low == 0) + (high == n)
            if ends == 2 or (ends == 1) != at_an_end:
                continue
            inside, size = sums[high] - sums[low], high - low
            explained = inside**2 / size + inside**2 / (n - size)
            if explained > best_explained:
                best_explained, segment = explained, (low, high)
    return segment, best_explained / total


def describe_trend(course: Trend) -> str:
    """Describe the trend in one sentence."""
    text = _describe_loss_trend(course)
    return f"{course.ended}; other ranks: {text}" if course.ended else text


def _describe_loss_trend(course: Trend) -> str:
    level, other_level = (
        format_quantity(course.level_ratio, "ratio"),
        format_quantity(course.rest_ratio, "ratio"),
    )
    if course.kind == "steady":
        return "steady"
    if course.kind in ("rising", "falling"):
        return f"{course.kind}: {other_level} lost at the beginning, {level} at the end"
    if course.kind == "bursts":
        return f"in bursts: up to {level} lost, {other_level} in the median"
    return f"{_summarize_loss_trend(course)}: {level} lost, otherwise {other_level}"


def summarize_trend(course: Trend) -> str:
    """Summarize the trend in a few words; if ranks ended early, report that instead."""
    return course.ended or _summarize_loss_trend(course)


def _summarize_loss_trend(course: Trend) -> str:
    start, end = (
        format_time_in_run(ns, course.run_end_ns) for ns in (course.start_ns, course.end_ns)
    )
    return {
        "from": f"from {start} on",
        "until": f"until {end}",
        "between": f"from {start} to {end}",
        "apart": f"all but {start} to {end}",
        "bursts": "in bursts",
    }.get(course.kind, course.kind)


def list_bar_captions(report: Report, bins: Sequence[TimeBin]) -> list[str]:
    """List captions for the bars of time bins, longest first; the first that fits is used."""
    trend = detect_trend(report)
    ended = _list_ended_ranks(report)
    odd = find_worst_bin(split_run(report, len(bins), ended) if ended else bins)
    stands_out = [] if odd is None else _describe_worst_bin(odd, bins[-1].end_ns)
    if trend is None:
        return [text for text in (describe_ended_ranks(report), *stands_out) if text]
    short = summarize_trend(trend)
    if trend.kind in ("steady", "bursts") and not trend.ended:
        return [*(f"{short}; {text}" for text in stands_out), describe_trend(trend), short]
    return [describe_trend(trend), short]


def _describe_worst_bin(worst: TimeBin, last_ns: int) -> list[str]:
    """Describe a bin with its main cause and without, for less room."""
    return [f"worst: {describe_bin(worst, last_ns, with_cause)}" for with_cause in (True, False)]


def _list_ended_ranks(report: Report) -> set[int]:
    """List the places of the ranks that ended while others continued."""
    return {index for index, _ in report.history.ended} if report.history is not None else set()
