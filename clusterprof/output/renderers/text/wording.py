"""The sentences that every output for people shares: verdict, warnings, culprits, evidence.

All foreign strings leave here through `safe_text`. Rounding happens here and nowhere earlier.
"""

from __future__ import annotations

from clusterprof.findings import UNATTRIBUTED, Finding, RankLedger, Report
from clusterprof.renderers import whose
from clusterprof.renderers.text_safety import safe_text
from clusterprof.underfill import imbalances as fill_imbalances
from clusterprof.units import human

_HOUR_NS = 3600 * 10**9
# below this share a first cause is not worth a reader's day
_HARDLY_RATIO = 0.01
# a larger share of the recorded time outside steps is worth a sentence of the verdict
_WORTH_SAYING_RATIO = 0.05
_SMALLEST_COST = 0.01  # of any currency: less would read "0.00"
_UNMEASURED_RATIO = 0.01  # less is in the ledger, and no cause for alarm
_MOST_IMBALANCES = 3
_SMALLEST_LIKE = 0.01  # of a unit that does not suit

NOTHING_TO_MEND = "Nothing to mend here: the accelerators were kept busy."
_NOT_KNOWN = (
    "No device was measured, and no wait of the host was seen: nothing is known of how busy the"
    " accelerators were."
)
WITHOUT_EVIDENCE = "Most of the loss is without sufficient evidence: see Unattributed and Not seen."
LEGEND = (
    "sure: how certain the cause is, not how large. fixing wins: device time won back by fixing"
    " only this."
)


def gpu_time(ns: int, like: str = "") -> str:
    """Write device time in GPU-seconds, -minutes or -hours, whichever suits, or `like` another."""
    seconds = ns / 1e9
    for unit, size, from_seconds in (("hours", 3600, 5400), ("minutes", 60, 90), ("seconds", 1, 0)):
        value = seconds / size
        if seconds >= from_seconds or (like == f"GPU-{unit}" and value >= _SMALLEST_LIKE):
            few = unit == "seconds" or like
            digits = 0 if value >= 100 else 1 if value >= 10 or not few else 2
            return f"{value:,.{digits}f} GPU-{unit}"
    raise AssertionError("unreachable: device time is never negative")


def share(part_ns: int, whole_ns: int) -> str:
    """Write a part as a percentage of a whole; nothing of nothing is nothing."""
    return human(part_ns / whole_ns if whole_ns else 0.0, "ratio")


def measured(rank: RankLedger) -> bool:
    """True where lost time of a rank was looked for: no loss of what nobody measured is no zero."""
    return bool(rank.device) or rank.lost_ns > 0


def rank_share(rank: RankLedger) -> str:
    """Write the lost part of a rank's time in steps; "-" where it was not measured."""
    return share(rank.lost_ns, rank.in_step_ns) if measured(rank) else "-"


def bounded(report: Report) -> bool:
    """True when lost time of any rank is known only as "at most"."""
    return any(rank.source == "host-spans" and rank.lost_ns for rank in report.ranks) or any(
        finding.upper_bound for finding in report.findings
    )


def summed(report: Report) -> dict[str, int]:
    """Return the in-step buckets of all ranks together, by cause, unattributed among them."""
    sums: dict[str, int] = {UNATTRIBUTED: 0}
    for rank in report.ranks:
        for cause, ns in rank.buckets:
            sums[cause] = sums.get(cause, 0) + ns
    return sums


def small_causes(report: Report) -> list[tuple[str, int]]:
    """Return causes that are in the ledger and too small for a finding, largest first."""
    found = {finding.cause.id for finding in in_step(report)} | {UNATTRIBUTED}
    small = [(cause, ns) for cause, ns in summed(report).items() if ns and cause not in found]
    return sorted(small, key=lambda bucket: (-bucket[1], bucket[0]))


def verdict(report: Report) -> str:
    """Say what cost most, how much and whose it was; of one rank what it lost."""
    if not report.ranks:
        return f"No training process was recorded: nothing can be said about {_gpu(report)}."
    if report.in_step_ns == 0:
        theirs = "its" if len(report.ranks) == 1 else "their"
        why = "No steps were seen"
        if any(rank.steps for rank in report.ranks):
            why = "Nobody measured a device inside the steps"
        return f"{why}: what the job did with {theirs} {_gpu(report)} cannot be judged."
    if not _leads_with_cause(report):
        return total(report)
    first = in_step(report)[0]
    part, whole = _part_of(first.lost_ns, report.in_step_ns, report)
    at_most = "at most " if first.upper_bound else ""
    ratio = share(first.lost_ns, report.in_step_ns)
    name = safe_text(first.cause.id, 60)
    much = f"{at_most}{part} of {whole} ({ratio})"
    return f"{title(first)} ({name}). That cost most: {much}, {whose.blame(first)}."


def chief_cause(report: Report) -> str:
    """Say what stands beside the verdict: the first cause, or the total, or that there is none."""
    if not report.ranks or report.in_step_ns == 0:
        return ""
    if _leads_with_cause(report):
        return f"In all {total(report, begin=False)}"
    if not worth_mending(report):
        return nothing_lost(report)
    first = chief(report)
    if first is None:
        return WITHOUT_EVIDENCE
    part = share(first.lost_ns, report.lost_ns)
    where = f", first on {whose.culprit(first.culprits[0])}" if first.culprits else ""
    return f"Chiefly {safe_text(first.cause.id, 60)}: {part} of the loss{where}."


def nothing_lost(report: Report) -> str:
    """Say that hardly anything was lost, or that nobody looked at a device."""
    measured = any(rank.device for rank in report.ranks)
    return NOTHING_TO_MEND if measured or report.lost_ns else _NOT_KNOWN


def worth_mending(report: Report) -> bool:
    """True when more than a hundredth of the time inside steps was lost."""
    return report.lost_ns > _HARDLY_RATIO * report.in_step_ns


def chief(report: Report) -> Finding | None:
    """Return the first cause; None when more was lost without a cause."""
    findings = in_step(report)
    return findings[0] if findings and findings[0].lost_ns >= report.unattributed_ns else None


def _leads_with_cause(report: Report) -> bool:
    """True when one cause of several ranks' loss is worth the first sentence."""
    return len(report.ranks) > 1 and worth_mending(report) and chief(report) is not None


def total(report: Report, begin: bool = True, was_lost: str = " was lost") -> str:
    """Say how much of the time inside steps was lost, or that nobody could measure it."""
    if not any(measured(rank) for rank in report.ranks):
        return (
            f"{'Not' if begin else 'not'} measured: no accelerator was, nor any wait of the host."
        )
    part, whole = _part_of(report.lost_ns, report.in_step_ns, None)
    ratio = share(report.lost_ns, report.in_step_ns)
    at_most = "at most " if bounded(report) else ""
    at_most = at_most.capitalize() if begin else at_most
    return f"{at_most}{ratio} of {_gpu(report)} inside steps{was_lost}: {part} of {whole}."


def _gpu(report: Report) -> str:
    return "emulated GPU time" if report.emulated else "GPU time"


def _part_of(part_ns: int, whole_ns: int, several: Report | None) -> tuple[str, str]:
    """Write two amounts of device time; the unit once when it is the same."""
    whole = gpu_time(whole_ns)
    part = gpu_time(part_ns, whole.split()[1] if several else "")
    if part.split()[1] != whole.split()[1]:
        part = gpu_time(part_ns, whole.split()[1])
    if part.split()[1] == whole.split()[1]:
        part = part.split()[0]
    emulated = several is not None and several.emulated
    return part, whole.replace(" GPU", " emulated GPU") if emulated else whole


def money(report: Report, price_per_hour: float | None, currency: str) -> str:
    """Say what the loss cost, "" when no price is known or the GPUs are not real.

    The report's own worth counts; the price given is for a report that comes without.
    """
    cost = None
    if report.worth is not None:
        price_per_hour, currency = report.worth.price_per_gpu_hour, report.worth.currency
        cost = report.worth.lost_cost
    elif price_per_hour is not None and not report.emulated:
        cost = report.lost_ns / _HOUR_NS * price_per_hour
    if cost is None or price_per_hour is None or cost < _SMALLEST_COST:
        return ""
    about = "at most" if bounded(report) else "about"
    unit = safe_text(currency, 12)
    return f"That is {about} {cost:,.2f} {unit} at {price_per_hour:,.2f} {unit} per GPU-hour."


def outside(report: Report) -> str:
    """Say how much device time lay outside steps, "" when it was little."""
    if report.part or report.outside_ns <= _WORTH_SAYING_RATIO * report.window_ns:
        return ""
    causes = sorted(report.outside_buckets, key=lambda bucket: -bucket[1])[:2]
    named = ", ".join(f"{safe_text(cause, 60)} {human(ns, 'ns')}" for cause, ns in causes)
    part = share(report.outside_ns, report.window_ns)
    return f"Outside steps passed {part} of the recorded device time: {named}."


def warnings(report: Report) -> list[str]:
    """Return what a reader must know before believing any number, loudest first."""
    lines = [safe_text(note, 400) for note in report.notes if note.startswith("progress stopped")]
    if report.part:
        lines.append(f"ONLY A PART of the run: {safe_text(report.part)}.")
    if report.emulated:
        lines.append("EMULATED ACCELERATORS: no GPU was measured; device times are an emulator's.")
    unmeasured = [rank for rank in report.ranks if rank.source == "host-spans" and rank.lost_ns]
    if bounded(report):
        who = "" if len(unmeasured) == len(report.ranks) else f" for {len(unmeasured)} of the ranks"
        lines.append(
            f'UPPER BOUND: no device was measured{who}; losses marked "at most" may be smaller.'
        )
    if report.unmeasured_ns > _UNMEASURED_RATIO * report.window_ns:
        part = share(report.unmeasured_ns, report.window_ns)
        lines.append(f"NOT MEASURED: {part} of the device time, neither busy nor idle.")
    damaged = sum(node.damaged_bytes for node in report.nodes)
    dropped = sum(node.dropped_spans for node in report.nodes)
    if damaged or dropped:
        lines.append(
            f"DAMAGED: {human(damaged, 'bytes')} of the recording could not be read,"
            f" {dropped:,} spans were dropped; the rest was used."
        )
    for error in imbalances(report)[:_MOST_IMBALANCES]:
        lines.append(f"THE LEDGER DOES NOT BALANCE, please report it: {error}")
    return lines


def imbalances(report: Report) -> list[str]:
    """Recompute the law of the ledger from what is shown; [] when every sum holds to the ns."""
    buckets = summed(report)
    sums = [
        ("window", report.window_ns, report.unmeasured_ns + report.outside_ns + report.in_step_ns),
        ("in steps", report.in_step_ns, report.productive_ns + report.lost_ns),
        ("lost", report.lost_ns, sum(buckets.values())),
        ("unattributed of ranks", report.unattributed_ns, buckets[UNATTRIBUTED]),
        ("outside", report.outside_ns, sum(ns for _, ns in report.outside_buckets)),
        ("unattributed", report.unattributed_ns, sum(ns for _, ns in report.unattributed_reasons)),
        ("ranks", report.lost_ns, sum(rank.lost_ns for rank in report.ranks)),
    ]
    if any(rank.caused for rank in report.ranks):
        caused = sum(ns for rank in report.ranks for _, ns in rank.caused)
        sums.append(("caused", report.lost_ns, caused + sum(ns for _, ns in report.nobody)))
    sums += fill_imbalances(report.underfill)
    sums += [
        (f"{safe_text(f.cause.id, 60)} of ranks", f.lost_ns, buckets.get(f.cause.id, 0))
        for f in in_step(report)
    ]
    for rank in report.ranks:
        name = rank_name(rank)
        parts = rank.unmeasured_ns + rank.outside_ns + rank.in_step_ns
        sums += [
            (f"window of {name}", rank.window_ns, parts),
            (f"in steps of {name}", rank.in_step_ns, rank.productive_ns + rank.lost_ns),
            (f"lost of {name}", rank.lost_ns, sum(ns for _, ns in rank.buckets)),
            (f"outside of {name}", rank.outside_ns, sum(ns for _, ns in rank.outside_buckets)),
        ]
    return [f"{name} {a:,} ns is not {b:,} ns" for name, a, b in sums if a != b]


def in_step(report: Report) -> list[Finding]:
    """Return the findings whose time lies inside steps, in the report's order."""
    return [finding for finding in report.findings if not finding.outside_steps]


def title(finding: Finding) -> str:
    return safe_text(finding.cause.title)


def lost(finding: Finding, at_most: str = "at most ") -> str:
    """Write the device time of a finding; a bound says so."""
    return (at_most if finding.upper_bound else "") + human(finding.lost_ns, "ns")


def more_why(finding: Finding) -> str:
    """Say why fixing a finding wins more than was lost to it; "" where it does not."""
    why = safe_text(finding.more_why, 200)
    return f"more than was lost: {why}" if why else ""


def wins(finding: Finding) -> str:
    """Say what fixing a finding wins, and why that is more than was lost where it is."""
    more = more_why(finding)
    return recoverable(finding, "cannot be said") + (f", {more}" if more else "")


def recoverable(finding: Finding, unknown: str) -> str:
    if finding.recoverable_ns is None:
        return unknown
    return human(finding.recoverable_ns, "ns")


def rank_name(rank: RankLedger) -> str:
    """Name a rank in a heading: its number, else its process."""
    return f"pid {rank.pid}" if rank.rank is None else f"rank {rank.rank}"
