"""What to record or check if a cause is too uncertain to recommend a change.

Used instead of the recommendations for a family of causes, and for a cause below the confidence
limit from which it is named.

And what to switch off first: modes for debugging that were on in the job.
"""

from __future__ import annotations

from clusterprof.analysis.advice.base import (
    ExclusionRule,
    FilledRecommendation,
    Recommendation,
    format_line_in_function,
    mark_command,
)
from clusterprof.analysis.advice.code_lines import find_dominant_line
from clusterprof.analysis.advice.context import AdviceContext
from clusterprof.analysis.advice.rules import NO_AWAITED_WORK
from clusterprof.analysis.attribution.confidence import MIN_SCORE_TO_NAME
from clusterprof.probe import layout
from clusterprof.units import format_quantity

_MIN_LOSS_NS = 2_000_000_000
"""Lost time, ns; a smaller loss rests on a handful of samples."""


def _explain_uncertainty(context: AdviceContext) -> str:
    if context.is_family:
        return "only the family of the cause could be determined"
    if context.is_brief:
        return "too little was seen to judge the job"
    sure = format_quantity(context.finding.confidence_ratio, "ratio")
    return f"the cause is only {sure} certain, and counts as certain from {MIN_SCORE_TO_NAME:.0%}"


def _fill_probe(context: AdviceContext) -> FilledRecommendation:
    return FilledRecommendation(
        f"{mark_command('clusterprof record --inject auto -- COMMAND')};"
        f" {mark_command('clusterprof doctor')} says"
        " whether the probe can be loaded",
        (_explain_uncertainty(context), "the probe was not loaded in any process of the job"),
    )


def _fill_missing_counters(context: AdviceContext) -> FilledRecommendation:
    remedies = [f"{signal}: {remedy}" for signal, remedy in context.coverage_gaps]
    missing = [f"the recording has no {name}" for name in context.missing_signals]
    change = "; ".join(remedies[:3]) or "clusterprof doctor shows how to enable what is missing"
    return FilledRecommendation(change, (_explain_uncertainty(context), *missing[:3]))


def _fill_longer_recording(context: AdviceContext) -> FilledRecommendation:
    steps = context.setup.steps
    count = max(200, 4 * steps)
    return FilledRecommendation(
        f"record {count:,} steps or more (now {steps:,}), then"
        f" {mark_command('clusterprof analyze RUN')}",
        (
            _explain_uncertainty(context),
            f"{format_quantity(context.finding.lost_ns, 'ns')} of loss is only a few samples",
        ),
    )


def _fill_manual_check(context: AdviceContext) -> FilledRecommendation:
    if context.is_family:
        how = "lists the possible causes; explain of each shows how to verify it by hand"
    else:
        how = "shows how to verify it by hand on a running job"
    return FilledRecommendation(
        f"{mark_command(f'clusterprof explain {context.cause}')} {how}",
        (_explain_uncertainty(context),),
    )


def _fill_own_code(context: AdviceContext) -> FilledRecommendation:
    path = find_dominant_line(context)
    line = "the line" if path is None else format_line_in_function(path.location)
    return FilledRecommendation(
        "the training thread computed there while the GPU had no work: make it faster, do it less"
        " often, or let a DataLoader worker or another process do it while the GPU works",
        (_explain_uncertainty(context),),
        what=f"Move {line} off the training thread",
    )


def _fill_awaited_work(context: AdviceContext) -> FilledRecommendation:
    name = context.resource or "it"
    dump = mark_command("py-spy dump --pid PID")
    return FilledRecommendation(
        f"{dump} of {name} shows what it does; it was the only one active in these waits, but"
        " nothing else connects it with the training process",
        (_explain_uncertainty(context),),
    )


NOT_OWN_CODE = ExclusionRule(
    "not-own-code",
    "no line of the training thread takes half of the time, or it did not compute there",
    lambda s: (
        s.cause not in ("cpu", "eval")
        or find_dominant_line(s) is None
        or not s.value("thread.on_cpu_ratio")
    ),
)
PROBE_PRESENT = ExclusionRule(
    "probe-there", "the probe was loaded in the processes of the job", lambda s: s.has_probe
)
NOTHING_MISSING = ExclusionRule(
    "nothing-missing",
    "nothing that the family needs is known to be missing",
    lambda s: not s.missing_signals and not s.coverage_gaps,
)
LONG_ENOUGH = ExclusionRule(
    "long-enough",
    "the loss is two seconds or more",
    lambda s: s.finding.lost_ns >= _MIN_LOSS_NS and not s.is_brief,
)

MORE_STEPS_DO_NOT_HELP = ExclusionRule(
    "not-by-steps",
    "more steps would not show it: other ranks are missing, or it lies outside the steps",
    lambda s: s.cause == "sync-unknown-peer" or s.finding.outside_steps,
)
RANKS_PRESENT = ExclusionRule(
    "ranks-present",
    "the cause is not a wait for ranks that were not recorded",
    lambda s: s.cause != "sync-unknown-peer",
)

DIAGNOSES = (
    Recommendation(
        "give-other-ranks",
        (),
        "Give the traces or recordings of the other ranks of the job as well",
        "clusterprof analyze with the files of all ranks",
        FilledRecommendation(
            f"{mark_command('clusterprof analyze RANK0 RANK1 ...')} with the files of all ranks of"
            " the same steps: whom a rank waited for shows only in the others"
        ),
        diagnose=True,
        expected_change="sync-unknown-peer becomes a cause of a rank",
        unless=(RANKS_PRESENT,),
        addressee="job",
        effort="look",
    ),
    Recommendation(
        "move-off-training-thread",
        (),
        "Move the line that computes off the training thread",
        "a DataLoader worker, or another process",
        _fill_own_code,
        evidence_names=("thread.on_cpu_ratio",),
        expected_change="the time between launches falls",
        worse="its result arrives a step later",
        unless=(NOT_OWN_CODE,),
        addressee="job",
        effort="code",
    ),
    Recommendation(
        "look-at-awaited-work",
        (),
        "Look at the process for which the step seems to wait",
        "py-spy dump of it, while the device idles",
        _fill_awaited_work,
        evidence_names=("awaited.waiting_ratio",),
        diagnose=True,
        expected_change="the manual check agrees",
        unless=(NO_AWAITED_WORK,),
        addressee="job",
        effort="look",
    ),
    Recommendation(
        "record-with-probe",
        (),
        "Record with the probe to learn the cause",
        "clusterprof record --inject auto",
        _fill_probe,
        diagnose=True,
        expected_change="the cause itself is named",
        unless=(PROBE_PRESENT,),
        worse="a probe in the process: its cost is in docs/accuracy.md",
        addressee="job",
        effort="look",
    ),
    Recommendation(
        "record-what-is-missing",
        (),
        "Record what is missing to learn the cause",
        "what clusterprof doctor lists as missing",
        _fill_missing_counters,
        diagnose=True,
        expected_change="the cause itself is named",
        unless=(NOTHING_MISSING,),
        addressee="job",
        effort="look",
    ),
    Recommendation(
        "record-longer",
        (),
        "Record longer to be sure of the cause",
        "more steps",
        _fill_longer_recording,
        diagnose=True,
        expected_change="the cause is more certain, or gone",
        unless=(LONG_ENOUGH, MORE_STEPS_DO_NOT_HELP),
        addressee="job",
        effort="setting",
    ),
    Recommendation(
        "verify-by-hand",
        (),
        "Check the cause by hand before changing anything",
        "clusterprof explain CAUSE",
        _fill_manual_check,
        diagnose=True,
        expected_change="the manual check agrees",
        addressee="job",
        effort="look",
    ),
)


def _fill_check_of_cause(context: AdviceContext) -> FilledRecommendation:
    check = context.finding.cause.manual_check
    command = mark_command(f"clusterprof explain {context.cause}")
    return FilledRecommendation(check or f"{command} describes how it is decided")


FOLLOW_MANUAL_CHECK = Recommendation(
    "follow-manual-check",
    (),
    "Verify the cause by hand, and see what it depends on",
    "clusterprof explain CAUSE",
    _fill_check_of_cause,
    diagnose=True,
    expected_change="the manual check agrees",
    effort="look",
)
"""Given for a cause that is certain and has no recommendation of its own."""


_MIN_DEBUG_RATIO = 0.1
"""Part of the time in steps from which a mode for debugging is reported."""
_LATE_RANK = ("sync-slow-compute", "sync-imbalance")
_HOST_BOUND = ("launch-bound", "eval-host", "cpu-gil", "cpu-preprocess", *_LATE_RANK)
_DEBUG_MODES = (
    (
        layout.TORCH_PROFILER,
        _HOST_BOUND,
        "PyTorch's profiler",
        "record a few steps only: "
        + mark_command("schedule=torch.profiler.schedule(wait=50, warmup=2, active=5, repeat=1)"),
    ),
    (
        layout.ANOMALY_DETECTION,
        ("launch-bound", "h2d-sync", *_LATE_RANK),
        "anomaly detection",
        mark_command("torch.autograd.set_detect_anomaly(False)"),
    ),
    (
        layout.LINE_TRACING,
        _HOST_BOUND,
        "the debugger or coverage tool that follows every call",
        f"{mark_command('sys.settrace(None)')}, or run the job without it",
    ),
    (
        layout.PYTHON_PROFILER,
        _HOST_BOUND,
        "the profiler that follows every Python call",
        f"{mark_command('sys.setprofile(None)')}, or run the job without it",
    ),
    (
        layout.BLOCKING_LAUNCHES,
        ("launch-bound", "h2d-sync", *_LATE_RANK),
        "launches that wait for their kernel",
        mark_command("unset CUDA_LAUNCH_BLOCKING HIP_LAUNCH_BLOCKING AMD_SERIALIZE_KERNEL"),
    ),
    (
        layout.COLLECTIVE_CHECKS,
        ("launch-bound", "net-transfer", *_LATE_RANK),
        "the check of every collective's arguments between ranks",
        mark_command("unset TORCH_DISTRIBUTED_DEBUG"),
    ),
)
"""Mode, causes that it can be behind, its name, how it is switched off."""


def _list_debug_modes(context: AdviceContext) -> list[tuple[float, str, str]]:
    """List the modes for debugging that can be behind a cause: part of time, name, how it ends."""
    ratios = context.setup.debug_mode_ratios
    return [
        (ratio, name, switch)
        for mode, causes, name, switch in _DEBUG_MODES
        if (ratio := ratios.get(mode, 0.0)) >= _MIN_DEBUG_RATIO and context.cause in causes
    ]


def _fill_debug_modes(context: AdviceContext) -> FilledRecommendation:
    modes = _list_debug_modes(context)
    names = " and ".join(
        f"{name} (on in {format_quantity(ratio, 'ratio')} of the time in steps)"
        for ratio, name, _ in modes
    )
    switches = "; ".join(switch for _, _, switch in modes)
    return FilledRecommendation(switches, what=f"Switch off {names}")


SWITCH_OFF_DEBUGGING = Recommendation(
    "switch-off-debugging",
    tuple(dict.fromkeys(cause for _, causes, _, _ in _DEBUG_MODES for cause in causes)),
    "Switch off what is only for debugging",
    "profilers, anomaly detection, debuggers, launches that block",
    _fill_debug_modes,
    expected_change="the time of a step falls",
    unless=(
        ExclusionRule(
            "no-debugging",
            "no such mode was on in a tenth of the time in steps",
            lambda s: not _list_debug_modes(s),
        ),
    ),
    effort="setting",
)

DEBUG_RECOMMENDATIONS = (SWITCH_OFF_DEBUGGING,)
