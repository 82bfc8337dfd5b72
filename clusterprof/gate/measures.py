"""The numbers rules may name: metrics of the report, of its worth, and what is derived from them.

step.p90_ns, step.mean_ns          any percentile of the steps of all ranks
gpu.busy_ratio.p10                 over 20 equal stretches of the run: nine tenths were higher
stall.storage_ratio.max            the worst of these stretches
lost.ratio.rank_max                the worst rank
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Sequence

from clusterprof.errors import UsageError
from clusterprof.findings import UNATTRIBUTED, Metric, RankLedger, Report
from clusterprof.gate.columns import columns_of, quantile_ns
from clusterprof.units import SUFFIXES, unit_of

STRETCHES = 20
_STEP = re.compile(r"step\.(mean|p(\d{1,2}(?:\.\d+)?))(?:_ns)?", re.ASCII)
_PART = re.compile(r"(.+)\.(p\d{1,2}|min|max|rank_max|rank_min)", re.ASCII)
_LEAVES = {"network": "net-", "synchronization": "sync-"}
"""How the ids of a family's leaves begin, where that is not the family."""
_NO_BLOCKS = "the report has no blocks of steps: no steps were marked, or an older version made it"
_NO_WORTH = "it was not worked out: set facts.gpu_price_per_hour in a profile"
_NO_RANK = "no rank has a time inside steps"


def find(name: str, report: Report, text: str) -> Metric:
    """Return the metric a rule names, in full or without its unit; UsageError for an unknown one.

    `text` is the rule, for the message.
    """
    metrics = [*report.metrics, *_of_worth(report)]
    found = _named(name, metrics)
    if isinstance(found, Metric):
        return found
    step = _STEP.fullmatch(name)
    if step is not None:
        return _of_steps(step, report)
    part = _PART.fullmatch(name)
    whole = _named(part[1], metrics) if part is not None else None
    if part is not None and isinstance(whole, Metric):
        return _of_part(whole, part[2], report, text)
    known = {metric.name: _stem(metric.name) for metric in metrics}
    close = found or difflib.get_close_matches(name, [*known, *known.values()], 3, 0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise UsageError(
        f"the rule {text!r}: there is no metric {name!r}{hint}",
        f"known are {', '.join(sorted(known)) or 'none in this report'}",
    )


def hidden_of(metric: Metric, report: Report) -> float:
    """Return by how much the truth may lie above a metric: what is unattributed may be this too."""
    if not metric.name.startswith("stall.") or not report.in_step_ns:
        return 0.0
    part = _PART.fullmatch(metric.name)
    if part is None:
        return report.unattributed_ns / report.in_step_ns
    if part[2].startswith("rank_"):
        return max((_of_rank("unattributed.ratio", one) or 0.0 for one in report.ranks), default=0)
    assert report.steps is not None  # there would be no such metric
    return max(_stretches(report.steps.of_causes({UNATTRIBUTED}), report.steps.in_step_ns))


def _named(name: str, metrics: Sequence[Metric]) -> Metric | list[str]:
    """Return the metric of a name or stem; else the names that share the stem."""
    by_name = {metric.name: metric for metric in metrics}
    if name in by_name:
        return by_name[name]
    meant = [full for full in by_name if _stem(full) == name]
    return by_name[meant[0]] if len(meant) == 1 else meant


def _stem(name: str) -> str:
    """Return a name without its unit: "lost" for "lost.ratio" and for "lost_ratio"."""
    for suffix, _ in SUFFIXES:
        for ending in (suffix, suffix.replace("_", ".", 1)):
            if name.endswith(ending):
                return name.removesuffix(ending)
    return name


def _of_steps(match: re.Match[str], report: Report) -> Metric:
    name = f"step.{match[1]}_ns"
    if report.steps is None or not sum(report.steps.steps):
        return Metric(name, None, "ns", _NO_BLOCKS)
    if match[1] == "mean":
        return Metric(name, sum(report.steps.step_ns) / sum(report.steps.steps), "ns")
    return Metric(name, quantile_ns(report.steps, float(match[2]) / 100), "ns")


def _of_part(metric: Metric, part: str, report: Report, text: str) -> Metric:
    name = f"{metric.name}.{part}"

    def unknown(why: str) -> Metric:
        return Metric(name, None, metric.unit, why)

    if metric.value is None:
        return unknown(metric.why_missing)
    if part.startswith("rank_"):
        found = [ratio for one in report.ranks if (ratio := _of_rank(metric.name, one)) is not None]
        if not found and any(rank.in_step_ns > 0 for rank in report.ranks):
            raise UsageError(f"the rule {text!r}: {metric.name} is not known of single ranks")
        value = (max if part == "rank_max" else min)(found) if found else None
        return Metric(name, value, metric.unit, "" if found else _NO_RANK, metric.bound)
    if report.steps is None:
        return unknown(_NO_BLOCKS)
    columns = columns_of(metric.name, report.steps)
    if columns is None:
        raise UsageError(f"the rule {text!r}: {metric.name} is not known of parts of a run")
    values = sorted(_stretches(*columns))
    if len(values) < STRETCHES:
        return unknown(f"fewer than {STRETCHES} stretches of steps were seen")
    share = {"min": 0.0, "max": 1.0}.get(part, float(part[1:]) / 100 if part[1:].isdigit() else 0)
    at = max(0, math.ceil(share * len(values)) - 1)
    return Metric(name, values[at], metric.unit, "", metric.bound)


def _stretches(numerator: Sequence[int], denominator: Sequence[int]) -> list[float]:
    """The ratio in each of `STRETCHES` runs of blocks that are equally many."""
    edges = [round(at * len(numerator) / STRETCHES) for at in range(STRETCHES + 1)]
    sums = [
        (sum(numerator[low:high]), sum(denominator[low:high]))
        for low, high in itertools.pairwise(edges)
    ]
    return [part / whole for part, whole in sums if whole > 0]


def _of_rank(name: str, rank: RankLedger) -> float | None:
    if rank.in_step_ns <= 0:
        return None
    if name in ("lost.ratio", "productive.ratio"):
        ns = rank.lost_ns if name == "lost.ratio" else rank.productive_ns
        return ns / rank.in_step_ns
    match = re.fullmatch(r"(?:stall\.(.+)_ratio|(unattributed)\.ratio)", name)
    if match is None:
        return None
    cause = match[1] or match[2]
    leaves = _LEAVES.get(cause, f"{cause}-")
    ns = sum(ns for id_, ns in rank.buckets if id_ == cause or id_.startswith(leaves))
    return ns / rank.in_step_ns


def _of_worth(report: Report) -> list[Metric]:
    """What lost time is worth, under names of its own, where the report has no metric for it."""
    worth = report.worth
    money = worth.currency if worth is not None else "money"
    rows: list[tuple[str, float | None, str]] = [
        ("cost.lost", worth.lost_cost if worth else None, money),
        ("cost.per_million_tokens", worth.cost_per_million_tokens if worth else None, money),
        ("tokens_per_second", worth.tokens_per_second if worth else None, "tokens/s"),
        ("samples_per_second", worth.samples_per_second if worth else None, "samples/s"),
    ]
    why = dict.fromkeys((name for name, _, _ in rows), _NO_WORTH if worth is None else "")
    for name, value, told in worth.yardsticks if worth is not None else ():
        rows.append((name, value, _unit(name)))
        why[name] = told
    there = {metric.name for metric in report.metrics}
    return [
        Metric(name, value, unit, (why[name] or "it is not known") if value is None else "")
        for name, value, unit in rows
        if name not in there
    ]


def _unit(name: str) -> str:
    try:
        return unit_of(name.replace(".", "_"))
    except ValueError:
        return "number"
