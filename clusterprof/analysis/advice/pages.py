"""What each metric of a report, which a gate may test, is, and how to verify it by hand."""

from __future__ import annotations

from textwrap import fill

from clusterprof.attribution.families import CAUSES, FAMILIES
from clusterprof.remedies.by_hand import BY_HAND
from clusterprof.units import unit_of

_STEPS = "mark the steps yourself (time.monotonic() around each) and sort their lengths"

METRICS: dict[str, tuple[str, str]] = {
    "gpu.busy_ratio": (
        "Time in which at least one kernel was resident on the accelerators, over the time in steps"
        " that was measured. One kernel on one multiprocessor counts as busy, and so does spinning"
        " for a late rank.",
        "`nvidia-smi dmon -s u`: the mean of `sm` over the same minutes",
    ),
    "gpu.sm_active_ratio": (
        "Mean share of the multiprocessors that had work, of all time in steps, idle or not.",
        "`dcgmi dmon -e 1002` (`SMACT`): its mean over the same minutes",
    ),
    "underfill.ratio": (
        "Of the time with a kernel resident that was not lost: the part that multiprocessors stood"
        " empty (docs/underfill.md). None of it is idle time.",
        "`dcgmi dmon -e 1001,1002`: 1 - SMACT / GRACT",
    ),
    "lost.ratio": (
        "Device time inside steps that was lost (no kernel resident, spinning for others, slowed),"
        " over the time in steps.",
        "1 - `productive.ratio`; torch.profiler over some steps shows the same gaps",
    ),
    "productive.ratio": (
        "Device time inside steps that was not lost, over the time in steps.",
        "1 - `lost.ratio`",
    ),
    "au_ratio": (
        "MLPerf Storage's accelerator utilisation: productive time over the time in steps, the"
        " first step left out.",
        "time of the compute of a step without data loading, times steps, over the run's time",
    ),
    "unattributed.ratio": (
        "Lost time for which the evidence suffices for no cause, over the time in steps.",
        "the lines under *Unattributed* add up to it",
    ),
    "data_wait.ratio": (
        "Time of the host in waits for a batch, over the time in steps. A wait that the device's"
        " queue hides counts here and costs nothing: compare `stall.storage_ratio` and"
        " `stall.cpu_ratio`.",
        "time `next(iterator)` in the training loop",
    ),
    "coverage.ratio": (
        "Part of the ranks' recorded time for which the samples needed exist. Low coverage makes a"
        " gate say that it cannot tell.",
        "the *Not seen* section names what is missing",
    ),
    "step.count": ("Steps of all ranks together.", "count them in the job's log, times the ranks"),
    "step.p50_ns": ("Length of a step that half of the steps of all ranks do not exceed.", _STEPS),
    "step.p95_ns": ("Length of a step that 95 % of the steps do not exceed.", _STEPS),
    "step.p99_ns": ("Length of a step that 99 % of the steps do not exceed.", _STEPS),
    "recorder.cpu_ratio": (
        "CPU time of the recorder over the recorded time, on the node where it is most; 1 = one"
        " core.",
        "`pidstat -p RECORDER 10` while it records",
    ),
}
"""Name -> what it is, and how to verify it."""
_STALL, _RATIO = "stall.", "_ratio"


def metric_names() -> list[str]:
    """Return the names of all metrics that have a page."""
    stalls = (f"{_STALL}{id_}{_RATIO}" for id_ in CAUSES if not id_.startswith("fail"))
    return [*METRICS, *dict.fromkeys(stalls)]


def metric_page(written: str) -> str | None:
    """Return the page of a metric as Markdown; None when there is none of that name.

    The unit at the end of the name may be left out, as in a rule of the gate.
    """
    name = next((one for one in metric_names() if written in (one, _short(one))), None)
    if name is None:
        return None
    about, by_hand = METRICS[name] if name in METRICS else _stall(name)
    unit = unit_of(name.replace(".", "_"))
    limit = {"ns": "< 250 ms", "count": ">= 100"}.get(unit, "<= 10%" if _is_bad(name) else ">= 70%")
    tested = (
        f"A gate tests it: `clusterprof gate RUN --assert '{name} {limit}'`. Where it could not be"
        " measured the report says why, and the gate that it cannot tell."
    )
    parts = (
        f"# {name}: a metric of the report, in {unit}",
        fill(about, 100),
        fill(tested, 100),
        "## How to verify it by hand",
        fill(f"{by_hand[:1].upper()}{by_hand[1:]}.", 100),
    )
    return "\n\n".join(parts) + "\n"


def _is_bad(name: str) -> bool:
    return name.startswith((_STALL, "lost", "unattributed", "data_wait", "underfill", "recorder"))


def _short(name: str) -> str:
    for suffix in ("_ratio", "_ns"):
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def _stall(name: str) -> tuple[str, str]:
    id_ = name[len(_STALL) : -len(_RATIO)]
    cause = CAUSES[id_]
    title = cause.title[:1].lower() + cause.title[1:]
    if id_ in FAMILIES and id_ not in BY_HAND:
        about = f"Device time in steps lost to all causes of the family {id_} ({title}), over the"
        return (
            f"{about} time in steps.",
            f"`clusterprof explain {id_}` lists its causes, and each says how",
        )
    about = (
        f"Device time in steps lost to `{id_}` ({title}), over the time in steps. Part of it may"
        " lie in other ranks that waited for the one that had the cause."
    )
    return about, BY_HAND[id_].rstrip(".")
