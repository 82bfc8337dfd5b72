"""Check the preconditions of a verdict: steps, coverage, damage, dropped spans and missing
ranks.

It also checks whether two runs may be compared at all, and names the fields in which they differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clusterprof.errors import UsageError
from clusterprof.gate.rules import Policy
from clusterprof.report.model import Report, RunFingerprint
from clusterprof.units import format_quantity
from clusterprof.util.ranges import format_host_list


def check_preconditions(report: Report, policy: Policy) -> tuple[str, ...]:
    """List why a verdict on this recording would be unreliable; empty when all preconditions
    hold.
    """
    problems: list[str] = []
    if report.too_little_seen:
        problems.append(f"too little was seen: {report.too_little_seen}")
    steps = report.fewest_steps
    if steps < policy.min_steps:
        problems.append(
            f"steps: {steps:,} on the rank with the fewest, {policy.min_steps:,} needed"
            " (record for longer, or lower --min-steps)"
        )
    covered = [rank.coverage_ratio for rank in report.ranks]
    lowest = [ranks.lowest_coverage_ratio for ranks in report.unlisted]
    covered += [math.nan if ratio is None else ratio for ratio in lowest]
    # checked for each rank: min() lets NaN slip past a comparison
    if not covered or not all(ratio >= policy.min_coverage_ratio for ratio in covered):
        coverage = min(covered, default=0.0)
        problems.append(
            f"coverage: samples cover {format_quantity(coverage, 'ratio')} of the time on the"
            f" worst rank, {format_quantity(policy.min_coverage_ratio, 'ratio')} needed (see"
            " --min-coverage)"
        )
    damaged = sum(node.damaged_bytes for node in report.nodes)
    if damaged > policy.max_damaged_bytes:
        problems.append(
            f"damage: {format_quantity(damaged, 'bytes')} of the recording could not be read,"
            f" {format_quantity(policy.max_damaged_bytes, 'bytes')} allowed"
        )
    altered = [node.name for node in report.nodes if node.altered_segments]
    if altered:
        names = format_host_list(altered)
        problems.append(f"origin: the recording of {names} was changed after it was closed")
    dropped = sum(node.dropped_spans for node in report.nodes)
    if dropped > policy.max_dropped_spans:
        problems.append(f"losses: {dropped:,} spans dropped, {policy.max_dropped_spans:,} allowed")
    missing = _check_recorded_ranks(report, policy)
    if missing:
        problems.append(missing)
    return tuple(problems)


def _check_recorded_ranks(report: Report, policy: Policy) -> str:
    world = report.job.world_size if report.job is not None else None
    if not world:
        return ""
    recorded = report.rank_count  # over all jobs and incarnations, like the world size
    if recorded >= policy.min_ranks_ratio * world:
        return ""
    return (
        f"ranks: {recorded:,} of the job's {world:,} were recorded,"
        f" {format_quantity(policy.min_ranks_ratio, 'ratio')} needed (give the folders of all"
        f" its nodes)"
    )


COMPARED_FIELDS = {
    "facts": "what is known of the runs at all",
    "order": "the baseline was recorded before the candidate",
    "emulated": "emulated or real accelerators",
    "gpu-model": "models of the accelerators, and how many of each",
    "nodes": "machines",
    "world-size": "ranks of the job",
    "batch-size": "samples of a rank and step",
    "tokens": "tokens of a rank and step",
    "measured-by": "where lost time was measured",
    "length": "steps of the run: neither is twice as long as the other",
}
"""Fields that `--allow-unlike` accepts. A run that is its own baseline is never allowed."""
_MAX_BATCH_SIZE_DIFFERENCE = 0.01
_MAX_TOKENS_DIFFERENCE = 0.1  # padding changes the number of tokens
_MAX_LENGTH_FACTOR = 2


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One field in which two runs differ."""

    field: str
    """A key of `COMPARED_FIELDS`, "recording", or the name of a field that only causes a
    warning.
    """
    text: str
    """Description of the difference, for a reader."""
    blocks_verdict: bool
    """True if the difference rules out a verdict; False if it is only reported."""


def validate_allowed_fields(fields: Sequence[str]) -> tuple[str, ...]:
    """Return the field names of `--allow-unlike` if all of them are known.

    Raises: UsageError for an unknown field.
    """
    for field in fields:
        if field not in COMPARED_FIELDS:
            raise UsageError(
                f"--allow-unlike {field!r} is not a compared field",
                f"fields are {', '.join(COMPARED_FIELDS)}",
            )
    return tuple(fields)


def find_mismatches(
    ours: Report, theirs: Report, allow: Sequence[str] = ()
) -> tuple[Mismatch, ...]:
    """List the fields in which a run differs from its baseline, those that rule out a verdict
    first.

    A field in `allow` is reported but does not rule out a verdict.
    """
    a, b = ours.fingerprint, theirs.fingerprint
    if a is None or b is None:
        mismatches = [Mismatch("facts", "the report does not say what kind of run it was", True)]
    else:
        mismatches = [
            *_check_distinct_recordings(a, b),
            *_check_order(a, b),
            *_compare_facts(a, b),
            *_compare_versions(a, b),
        ]
    mismatches += _compare_values(
        "emulated", _describe_accelerators(ours), _describe_accelerators(theirs)
    )
    mismatches += _compare_lengths(ours, theirs)
    out = [
        Mismatch(
            mismatch.field, mismatch.text, mismatch.blocks_verdict and mismatch.field not in allow
        )
        for mismatch in mismatches
    ]
    return tuple(sorted(out, key=lambda mismatch: not mismatch.blocks_verdict))


def _check_distinct_recordings(a: RunFingerprint, b: RunFingerprint) -> list[Mismatch]:
    if a.recordings and set(a.recordings) & set(b.recordings):
        return [Mismatch("recording", "candidate and baseline are the same recording", True)]
    return []


def _check_order(a: RunFingerprint, b: RunFingerprint) -> list[Mismatch]:
    if a.started_at_ns is None or b.started_at_ns is None:
        return []
    ahead_s = (b.started_at_ns - a.started_at_ns) / 1e9
    if ahead_s <= 0:
        return []
    text = (
        f"the baseline was recorded {_format_duration(ahead_s)} after this run: are the two"
        f" swapped?"
    )
    return [Mismatch("order", text, True)]


def _compare_facts(a: RunFingerprint, b: RunFingerprint) -> list[Mismatch]:
    return [
        *_compare_values("gpu-model", _format_models(a), _format_models(b)),
        *_compare_values("nodes", a.nodes, b.nodes),
        *_compare_values("world-size", a.world_size, b.world_size),
        *_compare_sizes("batch-size", a.batch_size, b.batch_size, _MAX_BATCH_SIZE_DIFFERENCE),
        *_compare_sizes("tokens", a.tokens, b.tokens, _MAX_TOKENS_DIFFERENCE),
        *_compare_values("measured-by", " ".join(a.measured_by), " ".join(b.measured_by)),
    ]


def _compare_versions(a: RunFingerprint, b: RunFingerprint) -> list[Mismatch]:
    """Compare versions as a warning only: a new version is often what a gate is there to test."""
    versions = (
        ("frameworks", _format_versions(a.frameworks), _format_versions(b.frameworks)),
        ("driver", " ".join(a.drivers), " ".join(b.drivers)),
        ("recorder", " ".join(a.recorder), " ".join(b.recorder)),
        ("restarts", a.restarts, b.restarts),
    )
    mismatches = [
        mismatch
        for name, ours, theirs in versions
        for mismatch in _compare_values(name, ours, theirs)
    ]
    return [Mismatch(mismatch.field, mismatch.text, False) for mismatch in mismatches]


def _compare_values(field: str, ours: object, theirs: object) -> list[Mismatch]:
    if ours == theirs:
        return []
    return [
        Mismatch(
            field,
            f"{field}: {_format_value(theirs)} in the baseline, {_format_value(ours)} now",
            True,
        )
    ]


def _format_value(value: object) -> str:
    return "not known" if value is None or value == "" else f"{value}"


def _compare_sizes(
    field: str, ours: float | None, theirs: float | None, tolerance: float
) -> list[Mismatch]:
    if ours is not None and theirs is not None and abs(ours - theirs) <= tolerance * theirs:
        return []
    shown = [None if value is None else f"{value:,.4g}" for value in (ours, theirs)]
    return _compare_values(field, *shown)


def _compare_lengths(ours: Report, theirs: Report) -> list[Mismatch]:
    a, b = ours.fewest_steps, theirs.fewest_steps
    if max(a, b) <= _MAX_LENGTH_FACTOR * min(a, b):
        return []
    return [Mismatch("length", f"length: {b:,} steps in the baseline, {a:,} now", True)]


def _describe_accelerators(report: Report) -> str:
    return "emulated accelerators" if report.emulated else "real ones"


def _format_models(fingerprint: RunFingerprint) -> str:
    return ", ".join(f"{count} × {model}" for model, count in fingerprint.gpu_models)


def _format_versions(versions: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions)


def _format_duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
