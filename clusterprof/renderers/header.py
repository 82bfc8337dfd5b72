"""The header of a job: how much of it was recorded, where, and whether clocks were aligned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clusterprof.findings import NodeFacts, Report
from clusterprof.hostlists import fold
from clusterprof.renderers.text_safety import safe_text
from clusterprof.units import human


def scope(report: Report) -> str:
    """Say what was recorded: nodes, ranks, accelerators, steps, time and coverage."""
    steps = max((rank.steps for rank in report.ranks), default=0)
    longest = max((node.duration_ns for node in report.nodes), default=0)
    parts = [count(_machines(report), _noun(report)), _ranks(report)]
    if report.job is not None and report.job.gpus:
        parts.append(count(report.job.gpus, "GPU"))
    parts += [count(steps, "step"), f"{human(longest, 'ns')} recorded"]
    if report.job is not None and report.job.coverage_ratio is not None:
        covered = human(report.job.coverage_ratio, "ratio")
        parts[-1] = f"{human(longest, 'ns')} ({covered} covered)"
    return ", ".join(parts)


def place(report: Report) -> str:
    """Name the nodes and say what is known of their clocks; "" for a node alone."""
    if len(report.nodes) < 2:
        return ""
    hosts = safe_text(fold(safe_text(node.name, 60) for node in report.nodes), 600)
    hosts += "" if any(node.named for node in report.nodes) else " (hosts not known)"
    return f"{hosts}; {clocks(report)}" if clocks(report) else hosts


def clocks(report: Report) -> str:
    """Say to within what the clocks of several nodes were aligned, or why they were not."""
    job = report.job
    if job is None or len(report.nodes) < 2:
        return ""
    if job.clock_bound_ns is None:
        why = f": {safe_text(job.clock_why)}" if job.clock_why else ""
        return f"clocks not aligned{why}"
    return f"clocks aligned within {human(job.clock_bound_ns, 'ns')}"


def count(number: int, noun: str) -> str:
    """Write a number with its noun: "1 node", "2 nodes"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _noun(report: Report) -> str:
    """Traces that name no host may be of one machine or of many."""
    named = any(node.named for node in report.nodes)
    return "node" if named or not report.nodes else "trace"


def _machines(report: Report) -> int:
    """How many there are: a machine may have been recorded more than once."""
    return len({(one.name, one.boot_id or one.key) for one in report.nodes})


def _ranks(report: Report) -> str:
    size = report.job.world_size if report.job is not None else None
    if size is None or size <= len(report.ranks):
        return count(len(report.ranks), "rank")
    return f"{len(report.ranks):,} of {count(size, 'rank')}"


def recordings(report: Report, alone: int, recorded: str = "") -> list[str]:
    """Say how well each node was recorded; of more than `alone` nodes those without a loss
    together."""
    if len(report.nodes) <= alone:
        return [_recording([node], recorded) for node in report.nodes]
    whole = [node for node in report.nodes if not node.damaged_bytes and not node.dropped_spans]
    torn = [node for node in report.nodes if node.damaged_bytes or node.dropped_spans]
    return [
        _recording(some, recorded)
        for some in ([whole] if whole else []) + [[node] for node in torn]
    ]


def _recording(nodes: Sequence[NodeFacts], recorded: str) -> str:
    names = safe_text(fold(safe_text(node.name) for node in nodes), 600)
    times = [human(node.duration_ns, "ns") for node in _ends(nodes, lambda n: n.duration_ns)]
    costs = [node for node in nodes if node.recorder_cpu_ratio is not None]
    percents = [
        f"{100 * (node.recorder_cpu_ratio or 0.0):.2f}"
        for node in _ends(costs, lambda n: n.recorder_cpu_ratio or 0.0)
    ]
    spent = f"{' to '.join(dict.fromkeys(percents))} % of one core" if percents else "unknown"
    damaged = sum(node.damaged_bytes for node in nodes)
    dropped = sum(node.dropped_spans for node in nodes)
    return (
        f"{names}: {' to '.join(dict.fromkeys(times))}{recorded}; recorder {spent};"
        f" unreadable {human(damaged, 'bytes')}; dropped spans {dropped:,}"
    )


def _ends(nodes: Sequence[NodeFacts], by: Callable[[NodeFacts], float]) -> list[NodeFacts]:
    """Return the nodes with the smallest and the largest number."""
    return [min(nodes, key=by), max(nodes, key=by)] if nodes else []
