"""The yardsticks users know, each with its definition: goodput, POP, straggler slowdown, AU, rates.

ranks      productive   in steps      load balance  (80 + 100) / 2 / 100 = 0.9
0              80          200        communication efficiency    100 / 200 = 0.5
1             100          200        parallel efficiency                     0.45
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.partial import merge

Yardstick = tuple[str, float | None, str]
KNOWN_AT_LEAST_RATIO = 0.9
"""Of the steps: with fewer that say what they held no rate is given."""
GOODPUT = "productive over all recorded device time; start-up, restarts, checkpoints included"
BALANCE = "POP: mean over longest productive time of the ranks"
EFFICIENCY = "POP: longest productive time of a rank over the run time"
PARALLEL = "POP: load balance times communication efficiency"
SLOWDOWN = "OSDI 2025: step time over that of ranks that are all as fast as their mean"
AU = "MLPerf Storage: computing over running time without the first step; 0.9 passes most loads"
NO_STEPS = "no steps were seen"
NO_DEVICE = "no accelerator was measured inside steps"
ONE_RANK = "it takes at least two ranks"
NOT_COMPARED = "operations of ranks were not laid side by side"


@dataclass(frozen=True, slots=True)
class Rate:
    """How many of something the job takes in a second, or why that is not known."""

    per_second: float | None
    why: str = ""


def brought(books: Sequence[RankBooks], job_ns: int | None, what: str) -> Rate:
    """Return the rate of "samples" or "tokens" over all ranks that read them.

    Steps that do not say what they held count like the others, if they are few.
    """
    if not job_ns:
        return Rate(None, NO_STEPS)
    totals = merge(*(one.partial for one in books)).totals
    count, known = totals.get(what, 0), totals.get(f"{what}_steps", 0)
    steps = known + totals.get(f"{what}_unknown_steps", 0)
    if not known or not count:
        return Rate(None, f"the steps do not say how many {what} they held")
    if known < KNOWN_AT_LEAST_RATIO * steps:
        return Rate(None, f"only {known:,} of {steps:,} steps say how many {what} they held")
    return Rate(count * (steps / known) / (job_ns / 1e9))


def yardsticks_of(
    books: Sequence[RankBooks], job_ns: int | None = None, shared_out_ns: int | None = None
) -> tuple[Yardstick, ...]:
    """Return every yardstick, in a fixed order; the text is its definition, or why it has no
    value. `shared_out_ns`: how long the job of `job_ns` would take were its work shared out, as the
    replay says of ranks in several teams."""
    stepped = [one.ledger for one in books if one.ledger.in_step_ns]
    bounded = any(one.source == "host-spans" for one in stepped)
    window_ns = sum(one.ledger.window_ns for one in books)
    useful = [one.productive_ns for one in stepped]
    run_ns = max((one.in_step_ns + one.unmeasured_ns for one in stepped), default=0)
    why = NO_STEPS if not stepped else NO_DEVICE if bounded else ""
    goodput = None if why or not window_ns else sum(useful) / window_ns
    alone = why or (ONE_RANK if len(stepped) < 2 else "")
    balance = efficiency = parallel = None
    if not alone and max(useful) > 0:
        balance = sum(useful) / len(useful) / max(useful)
        efficiency = max(useful) / run_ns
        parallel = balance * efficiency
    slowdown, why_slow = _slowdown(books)
    if slowdown is not None and job_ns and shared_out_ns:
        slowdown = job_ns / shared_out_ns
    return (
        ("goodput", goodput, GOODPUT if goodput is not None else why or NO_STEPS),
        ("load balance", balance, BALANCE if balance is not None else alone or NO_STEPS),
        ("communication efficiency", efficiency, EFFICIENCY if efficiency else alone or NO_STEPS),
        ("parallel efficiency", parallel, PARALLEL if parallel else alone or NO_STEPS),
        ("straggler slowdown S", slowdown, SLOWDOWN if slowdown is not None else why_slow),
        _au(books, why),
    )


def _slowdown(books: Sequence[RankBooks]) -> tuple[float | None, str]:
    """Ranks that come when the mean does wait for nobody: what they wait now, in the mean, goes."""
    felt = [one for one in books if one.felt]
    if not felt:
        return None, ONE_RANK if len(books) < 2 else NOT_COMPARED
    in_step_ns = sum(one.ledger.in_step_ns for one in books)
    waited_ns = sum(
        ns for one in felt for id_, ns in one.felt.items()
        if id_ != "sync-bubble" and (id_ not in CAUSES or CAUSES[id_].family != "network")
    )  # fmt: skip
    if in_step_ns <= waited_ns:
        return None, NO_STEPS
    return in_step_ns / (in_step_ns - waited_ns), ""


def _au(books: Sequence[RankBooks], why: str) -> Yardstick:
    totals = merge(*(one.partial for one in books)).totals if books else {}
    rest = sum(one.ledger.in_step_ns for one in books) - totals.get("first_step", 0)
    lost = sum(one.ledger.lost_ns for one in books) - totals.get("first_step_lost", 0)
    if why or rest <= 0:
        return ("MLPerf Storage AU", None, why or "no step after the first was seen")
    return ("MLPerf Storage AU", (rest - lost) / rest, AU)
