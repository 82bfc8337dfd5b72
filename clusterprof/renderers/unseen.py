"""What could not be seen, and lost time that has no cause: a sentence for each reason."""

from __future__ import annotations

from clusterprof.findings import Blind, Report
from clusterprof.renderers.text_safety import safe_text

_MOST_NAMES = 12


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
    "blocked-unknown": "the loading thread was blocked on something unseen (sleep, lock, pipe)",
    "hand-over": "the batch was ready, and on its way from the worker to the main process",
    "evaluation": "the job evaluated its model",
    "peers": "in operations with other ranks, too many or too few of them to be laid side by side",
    "peers-unknown": "waiting for a rank that was late for a reason unseen",
    "asleep": "the main thread slept inside a step: waiting for ranks, or on something unseen",
    "sending": "the main thread slept while its node sent: waiting for ranks, or for data",
    "spinning": "a kernel ran and computed nothing: waiting for ranks nobody marked",
    "jitter": "waiting for each other in turn, for work that varies from step to step",
    "gap": "samples are missing",
    "low-confidence": "the evidence was too weak for a cause",
}


def reason(code: str) -> str:
    """Word the reason why lost time has no cause."""
    return _REASONS.get(code) or safe_text(code, 400)
