"""The sentences that every output for people shares: verdict, warnings, culprits, evidence.

All foreign strings leave here through `safe_text`. Rounding happens here and nowhere earlier.
"""

from __future__ import annotations

from clusterprof.findings import (
    UNATTRIBUTED,
    Blind,
    Culprit,
    Evidence,
    Finding,
    RankLedger,
    Report,
)
from clusterprof.renderers.text_safety import safe_text
from clusterprof.units import human

_HOUR_NS = 3600 * 10**9
# below this share a first cause is not worth a reader's day
_HARDLY_RATIO = 0.01
# a larger share of the recorded time outside steps is worth a sentence of the verdict
_WORTH_SAYING_RATIO = 0.05
_SMALLEST_COST = 0.01  # of any currency: less would read "0.00"
_UNMEASURED_RATIO = 0.01  # less is in the ledger, and no cause for alarm
_MOST_IMBALANCES = 3
_MOST_NAMES = 12

LEGEND = (
    "sure: how certain the cause is, not how large. A marker and counter agree, B one direct"
    " signal, C correlation only, D prior. fixing wins: device time won back by fixing only this."
)


def gpu_time(ns: int) -> str:
    """Write device time in GPU-seconds, -minutes or -hours, whichever suits."""
    seconds = ns / 1e9
    for unit, size, from_seconds in (("hours", 3600, 5400), ("minutes", 60, 90), ("seconds", 1, 0)):
        if seconds >= from_seconds:
            value = seconds / size
            digits = 0 if value >= 100 else 1 if value >= 10 or unit != "seconds" else 2
            return f"{value:,.{digits}f} GPU-{unit}"
    raise AssertionError("unreachable: device time is never negative")


def share(part_ns: int, whole_ns: int) -> str:
    """Write a part as a percentage of a whole; nothing of nothing is nothing."""
    return human(part_ns / whole_ns if whole_ns else 0.0, "ratio")


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
    """Say in one or two sentences how much was lost."""
    gpu = "emulated GPU time" if report.emulated else "GPU time"
    if not report.ranks:
        return f"No training process was recorded: nothing can be said about {gpu}."
    if report.in_step_ns == 0:
        seen = "its" if len(report.ranks) == 1 else "their"
        return f"No steps were seen: what the job did with {seen} {gpu} cannot be judged."
    lost, whole = gpu_time(report.lost_ns), gpu_time(report.in_step_ns)
    if lost.split()[1] == whole.split()[1]:
        lost = lost.split()[0]
    ratio = share(report.lost_ns, report.in_step_ns)
    at_most = "At most " if bounded(report) else ""
    return f"{at_most}{ratio} of {gpu} inside steps was lost: {lost} of {whole}."


def chief_cause(report: Report) -> str:
    """Name the first cause, or say that there is none worth naming."""
    findings = in_step(report)
    if not report.ranks or report.in_step_ns == 0:
        return ""
    if report.lost_ns <= _HARDLY_RATIO * report.in_step_ns:
        return "Nothing to mend here: the accelerators were kept busy."
    if not findings or findings[0].lost_ns < report.unattributed_ns:
        return "Most of the loss is without sufficient evidence: see Unattributed and Not seen."
    first = findings[0]
    part = share(first.lost_ns, report.lost_ns)
    where = f", first on {_culprit(first.culprits[0])}" if first.culprits else ""
    return f"Chiefly {safe_text(first.cause.id, 60)}: {part} of the loss{where}."


def money(report: Report, price_per_hour: float | None, currency: str) -> str:
    """Say what the loss cost, "" when no price is known or the GPUs are not real."""
    if price_per_hour is None or report.emulated or not report.lost_ns:
        return ""
    cost = report.lost_ns / _HOUR_NS * price_per_hour
    if cost < _SMALLEST_COST:
        return ""
    about = "at most" if bounded(report) else "about"
    unit = safe_text(currency, 12)
    return f"That is {about} {cost:,.2f} {unit} at {price_per_hour:,.2f} {unit} per GPU-hour."


def outside(report: Report) -> str:
    """Say how much device time lay outside steps, "" when it was little."""
    if report.outside_ns <= _WORTH_SAYING_RATIO * report.window_ns:
        return ""
    causes = sorted(report.outside_buckets, key=lambda bucket: -bucket[1])[:2]
    named = ", ".join(f"{safe_text(cause, 60)} {human(ns, 'ns')}" for cause, ns in causes)
    part = share(report.outside_ns, report.window_ns)
    return f"Outside steps passed {part} of the recorded device time: {named}."


def warnings(report: Report) -> list[str]:
    """Return what a reader must know before believing any number, loudest first."""
    lines = [safe_text(note, 400) for note in report.notes if note.startswith("progress stopped")]
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


def scope(report: Report) -> str:
    """Say what was recorded: nodes, ranks, steps, time."""
    steps = max((rank.steps for rank in report.ranks), default=0)
    longest = max((node.duration_ns for node in report.nodes), default=0)
    return ", ".join(
        (
            _count(len({(one.name, one.boot_id or one.key) for one in report.nodes}), "node"),
            _count(len(report.ranks), "rank"),
            _count(steps, "step"),
            f"{human(longest, 'ns')} recorded",
        )
    )


def in_step(report: Report) -> list[Finding]:
    """Return the findings whose time lies inside steps, in the report's order."""
    return [finding for finding in report.findings if not finding.outside_steps]


def title(finding: Finding) -> str:
    return safe_text(finding.cause.title)


def lost(finding: Finding, at_most: str = "at most ") -> str:
    """Write the device time of a finding; a bound says so."""
    return (at_most if finding.upper_bound else "") + human(finding.lost_ns, "ns")


def certainty(finding: Finding) -> str:
    return f"{100 * finding.confidence_ratio:.0f} % {finding.grade}"


def recoverable(finding: Finding, unknown: str) -> str:
    if finding.recoverable_ns is None:
        return unknown
    return human(finding.recoverable_ns, "ns")


def culprits(finding: Finding, most: int) -> str:
    """Name whose cause it was, the first `most` of them."""
    named = [_culprit(culprit) for culprit in finding.culprits[:most]]
    more = len(finding.culprits) - most
    return ", ".join(named) + (f" and {more:,} more" if more > 0 else "")


def _culprit(culprit: Culprit) -> str:
    rank = "" if culprit.rank is None else f" rank {culprit.rank}"
    resource = f" ({safe_text(culprit.resource, 60)})" if culprit.resource else ""
    return f"{safe_text(culprit.node, 60)}{rank}{resource}"


def evidence(item: Evidence, with_note: bool = True) -> str:
    """Write one number a reader can check, and what it says."""
    note = f" ({safe_text(item.note)})" if item.note and with_note else ""
    return f"{safe_text(item.name, 60)} {human(item.value, item.unit)}{note}"


def blinds(report: Report) -> list[str]:
    """Say what could not be seen and what would let us see it; one line per reason.

    What this machine simply has not (no quota, no NFS) shares the last line: it hides nothing.
    """
    by_reason: dict[tuple[str, str, str], list[str]] = {}
    for item in report.blinds:
        if not _is_not_there(item):
            reason = (item.kind, item.message, item.remedy)
            by_reason.setdefault(reason, []).append(safe_text(item.what, 80))
    lines = [_blind(names, *reason) for reason, names in by_reason.items()]
    not_there = [
        f"{safe_text(item.what, 80)} ({safe_text(item.message, 200)})"
        for item in report.blinds
        if _is_not_there(item)
    ]
    return [*lines, f"Not there: {'; '.join(not_there)}."] if not_there else lines


def blind_count(report: Report) -> int:
    """Count what could not be seen, without what is not there."""
    return len(blinds(report)) - any(_is_not_there(item) for item in report.blinds)


def _is_not_there(item: Blind) -> bool:
    return item.kind == "absent" and not item.remedy


def _blind(names: list[str], kind: str, message: str, remedy: str) -> str:
    what = ", ".join(names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        what += f" and {len(names) - _MOST_NAMES:,} more"
    then = f" Remedy: {safe_text(remedy, 400)}." if remedy else ""
    return f"{what}, {safe_text(kind, 20)}: {safe_text(message, 400).rstrip('.')}.{then}"


_REASONS = {
    "no-signal": "no sign of what the host did",
    "blocked-unknown": "the loading thread was blocked on something unseen (sleep, lock, socket)",
    "hand-over": "the batch was ready, and on its way from the worker to the main process",
    "evaluation": "the job evaluated its model",
    "peers": "in operations with other ranks, too many or too few of them to be laid side by side",
    "peers-unknown": "waiting for a rank that was late for a reason unseen",
    "gap": "samples are missing",
    "low-confidence": "the evidence was too weak for a cause",
}


def reason(code: str) -> str:
    """Word the reason why lost time has no cause."""
    return _REASONS.get(code) or safe_text(code, 400)


def rank_name(rank: RankLedger) -> str:
    """Name a rank in a heading: its number, else its process."""
    return f"pid {rank.pid}" if rank.rank is None else f"rank {rank.rank}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
