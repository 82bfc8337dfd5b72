"""What the findings are worth, in sentences and as plain values: time, money, yardsticks.

Foreign strings pass `safe_text`; what is not known is left out of sentences and null in values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from clusterprof.findings import Report
from clusterprof.renderers.text_safety import safe_text
from clusterprof.units import human
from clusterprof.worth import CauseWorth, Worth

HEADING = "WORTH, with one cause fixed, and yardsticks"
_MOST_CAUSES = 6
_HARDLY_RATIO = 0.001  # of the job: less is not worth a line


def sentences(report: Report) -> list[str]:
    """Say what each cause costs and would win, rates and yardsticks; [] where nothing is known."""
    worth = report.worth
    if worth is None or not worth.job_ns:
        return []
    return [*_times(worth), *_rates(worth), *_yardsticks(worth)]


def money(amount: float, currency: str) -> str:
    """Write an amount of money with two decimals, small ones with three digits."""
    unit = safe_text(currency, 12)
    return f"{amount:,.2f} {unit}" if amount >= 0.1 or not amount else f"{amount:.3g} {unit}"


def time_won(ns: int, low_ns: int | None, high_ns: int | None, job_ns: int) -> str:
    """Write how much sooner a job would end, with its bounds."""
    share = human(ns / job_ns, "ratio")
    if low_ns is None or high_ns is None:
        return f"{human(ns, 'ns')} sooner ({share})"
    bounds = f"{human(low_ns, 'ns')} to {human(high_ns, 'ns')}"
    return f"{human(ns, 'ns')} sooner ({share}; 95 %: {bounds})"


def _times(worth: Worth) -> Iterator[str]:
    job_ns = worth.job_ns or 0
    steps = f"The steps took {human(job_ns, 'ns')}"
    shown = [one for one in worth.causes if not one.outside_steps][:_MOST_CAUSES]
    said = [one for one in shown if (one.saved_ns or 0) >= _HARDLY_RATIO * job_ns]
    if not any(one.saved_ns is not None for one in shown):
        why = next((one.why_missing for one in shown if one.why_missing), "")
        yield f"{steps}." + (
            f" What fixing wins cannot be said: {safe_text(why, 200)}." if why else ""
        )
        return
    if said:
        yield f"{steps}; without one cause, all else as it was, they would end"
    for one in said:
        yield _cause(one, worth)
    fixable = [one for one in said if one.cause != "net-transfer"]
    if worth.saved_ns is not None and len(fixable) > 1:
        won = time_won(worth.saved_ns, worth.saved_low_ns, worth.saved_high_ns, job_ns)
        yield f"all that can be fixed: {won}, which is no sum: causes hide behind each other"
    for one in shown:
        if one.saved_ns is None:
            yield f"{safe_text(one.cause, 60)}: cannot be said: {safe_text(one.why_missing, 200)}"


def _cause(one: CauseWorth, worth: Worth) -> str:
    won = time_won(one.saved_ns or 0, one.saved_low_ns, one.saved_high_ns, worth.job_ns or 1)
    line = f"{safe_text(one.cause, 60)}: {won}"
    if one.lost_cost is not None:
        line += f"; lost {money(one.lost_cost, worth.currency)}"
    if one.saved_cost is not None:
        line += f", fixing saves {money(one.saved_cost, worth.currency)}"
    return line


def _rates(worth: Worth) -> Iterator[str]:
    for name, now, fixed in (
        ("tokens", worth.tokens_per_second, worth.tokens_per_second_if_fixed),
        ("samples", worth.samples_per_second, worth.samples_per_second_if_fixed),
    ):
        if now is not None:
            then = f", {_rate(fixed)} with all fixed" if fixed is not None else ""
            yield f"{name} per second: {_rate(now)}{then} (summed over the ranks that read them)"
    cost, cheaper = worth.cost_per_million_tokens, worth.cost_per_million_tokens_if_fixed
    if cost is not None:
        then = f", {money(cheaper, worth.currency)} with all fixed" if cheaper is not None else ""
        yield f"a million tokens cost {money(cost, worth.currency)}{then}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _yardsticks(worth: Worth) -> Iterator[str]:
    known = [
        (safe_text(name, 60), value, text)
        for name, value, text in worth.yardsticks
        if value is not None
    ]
    for name, value, text in known:
        yield f"{name} {value:.3f}: {safe_text(text, 300)}"


def document(worth: Worth | None) -> dict[str, Any] | None:
    """Return all of it as plain values, in the order of the schema."""
    if worth is None:
        return None
    return {
        "job_ns": worth.job_ns,
        "gpus": worth.gpus,
        "price_per_gpu_hour": _number(worth.price_per_gpu_hour),
        "currency": safe_text(worth.currency, 60),
        "lost_cost": _number(worth.lost_cost),
        "why_no_cost": safe_text(worth.why_no_cost, 400),
        "upper_bound": worth.upper_bound,
        "saved_ns": worth.saved_ns,
        "saved_low_ns": worth.saved_low_ns,
        "saved_high_ns": worth.saved_high_ns,
        "causes": [
            {
                "cause": safe_text(one.cause, 200),
                "outside_steps": one.outside_steps,
                "lost_ns": one.lost_ns,
                "lost_cost": _number(one.lost_cost),
                "saved_ns": one.saved_ns,
                "saved_low_ns": one.saved_low_ns,
                "saved_high_ns": one.saved_high_ns,
                "saved_cost": _number(one.saved_cost),
                "why_missing": safe_text(one.why_missing, 400),
            }
            for one in worth.causes
        ],
        "tokens_per_second": _number(worth.tokens_per_second),
        "tokens_per_second_if_fixed": _number(worth.tokens_per_second_if_fixed),
        "why_no_tokens": safe_text(worth.why_no_tokens, 400),
        "samples_per_second": _number(worth.samples_per_second),
        "samples_per_second_if_fixed": _number(worth.samples_per_second_if_fixed),
        "why_no_samples": safe_text(worth.why_no_samples, 400),
        "cost_per_million_tokens": _number(worth.cost_per_million_tokens),
        "cost_per_million_tokens_if_fixed": _number(worth.cost_per_million_tokens_if_fixed),
        "yardsticks": [
            {"name": safe_text(name, 200), "value": _number(value), "text": safe_text(text, 600)}
            for name, value, text in worth.yardsticks
        ],
    }


def _number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity; a number that is none is not known."""
    return value if value is not None and math.isfinite(value) else None
