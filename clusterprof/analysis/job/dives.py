"""Compare the profiler windows of two ranks (`record --dive`): operators and kernels that differ.

    rank 1   3 steps   aten::cumsum  14.2 ms per step in 40 calls
    rank 0   3 steps   aten::cumsum   0.0 ms per step in  0 calls      rank 1 spends 14.2 ms more

Of an operator the self time counts: its own time without the operators it calls, on all threads. Of
a kernel, copy or fill it is the time on the device. Operations with other ranks are left out: a
healthy rank spends the more time in them the later the other one is. What no operator covers is
Python, or a wait.

A trace was written by a process of the job and is not trusted: sizes are bounded, and what cannot
be read has a reason.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.errors import Unavailable
from clusterprof.units import format_quantity

FOLDER = "dives"
BEGUN, FINISHED = "dive-begun", "dive-finished"
MAX_TRACE_BYTES = 64 << 20
"""Most bytes of a trace, uncompressed; the recorder keeps no larger one."""
MIN_STEP_SHARE, MIN_RATIO = 0.02, 1.1
"""Excess over the step, and time over that of the other rank: less is not named."""
MAX_NAMED = 5
_MAX_NOTES = 6
_MAX_NAME_CHARACTERS = 80
_OPERATORS = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_OPERATION_NAMES = (
    "nccl",
    "gloo:",
    "c10d::",
    "record_param_comms",
    "rccl",
    "DistributedDataParallel",
)
OUTSIDE = "outside of all operators"
"""Name of the time that no operator covers: Python, or a wait."""
_KINDS = {"operator": "", "kernel": "kernel "}


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0


class _Document(msgspec.Struct, gc=False):
    traceEvents: list[_Event]  # noqa: N815 - the key of the file


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank spent on an operator or a kernel, per step."""

    ns: float
    calls: float


@dataclass(frozen=True, slots=True)
class OperatorDifference:
    """An operator or a kernel on which one rank spends more than the other, per step."""

    kind: str
    """`operator` or `kernel`."""
    name: str
    late: Activity
    healthy: Activity

    @property
    def excess_ns(self) -> float:
        """Time that the late rank spends more, ns per step."""
        return self.late.ns - self.healthy.ns


Profile = Mapping[tuple[str, str], Activity]
_NONE = Activity(0.0, 0.0)


def read_profile(path: Path, steps: int, length_ns: int) -> Profile:
    """Read what a rank spent per step, by kind and name.

    steps: whole steps in the window. length_ns: of the window.

    Raises: Unavailable("failed") when the file cannot be read or is no trace.
    """
    try:
        with path.open("rb") as file:
            unpacker = zlib.decompressobj(wbits=31)
            data = unpacker.decompress(file.read(MAX_TRACE_BYTES), MAX_TRACE_BYTES)
        if not unpacker.eof:
            raise ValueError("it is too large, or cut off")
        events = msgspec.json.decode(data, type=_Document, strict=False).traceEvents
    except (OSError, ValueError, zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise Unavailable("failed", f"{path.name}: {str(error)[:160]}") from error
    return summarize_events(events, steps, length_ns)


def summarize_events(events: Iterable[_Event], steps: int, length_ns: int) -> Profile:
    """Sum the self time of operators and the time of kernels, per step."""
    sums: dict[tuple[str, str], list[float]] = {}
    threads: dict[tuple[Any, Any], list[_Event]] = {}
    for event in events:
        if event.ph != "X" or not 0 <= event.dur < 1e12:
            continue
        if event.cat in _OPERATORS:
            threads.setdefault((event.pid, event.tid), []).append(event)
        elif event.cat in _KERNELS:
            _add_time(sums, "kernel", event.name, event.dur)
    covered: list[tuple[float, float]] = []
    for operators in threads.values():
        _add_self_times(operators, sums)
        covered += [(event.ts, event.ts + event.dur) for event in operators]
    out = {key: Activity(us * 1e3 / steps, calls / steps) for key, (us, calls) in sums.items()}
    outside_ns = max(0.0, length_ns - _measure_union(covered) * 1e3)
    out["operator", OUTSIDE] = Activity(outside_ns / steps, 0.0)
    return out


def _add_self_times(events: list[_Event], sums: dict[tuple[str, str], list[float]]) -> None:
    """Add the self times of the operators of a thread; an operator calls those that lie within."""
    stack: list[tuple[_Event, list[float]]] = []
    for event in sorted(events, key=lambda event: (event.ts, -event.dur)):
        while stack and event.ts >= stack[-1][0].ts + stack[-1][0].dur:
            _close_operator(*stack.pop(), sums)
        if stack:
            outer = stack[-1]
            outer[1][0] += min(event.dur, outer[0].ts + outer[0].dur - event.ts)
        stack.append((event, [0.0]))
    while stack:
        _close_operator(*stack.pop(), sums)


def _close_operator(
    event: _Event, inner_us: list[float], sums: dict[tuple[str, str], list[float]]
) -> None:
    _add_time(sums, "operator", event.name, max(0.0, event.dur - inner_us[0]))


def _add_time(sums: dict[tuple[str, str], list[float]], kind: str, name: str, us: float) -> None:
    entry = sums.setdefault((kind, name), [0.0, 0.0])
    entry[0] += us
    entry[1] += 1


def _measure_union(spans: Iterable[tuple[float, float]]) -> float:
    total = reached = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def compare_profiles(late: Profile, healthy: Profile, step_ns: float) -> list[OperatorDifference]:
    """Find what the late rank spends clearly more on, the largest difference first.

    step_ns: length of its steps.
    """
    differences = [
        OperatorDifference(*key, activity, healthy.get(key, _NONE))
        for key, activity in late.items()
        if not is_operation(key[1])
    ]
    clear = [
        difference
        for difference in differences
        if difference.excess_ns >= MIN_STEP_SHARE * step_ns
        and difference.late.ns >= MIN_RATIO * difference.healthy.ns
    ]
    return sorted(clear, key=lambda difference: (-difference.excess_ns, difference.name))


def is_operation(name: str) -> bool:
    """Return whether a name is that of an operation with other ranks."""
    return any(part in name for part in _OPERATION_NAMES)


def describe_dives(folders: Sequence[Path], nodes: Sequence[NodeResult]) -> tuple[str, ...]:
    """Describe the dives in the recordings of all nodes; () if there are none.

    folders: of the nodes, in their order.
    """
    notes: list[str] = []
    for folder, node in zip(folders, nodes):
        start_ns = int(node.loaded.header.started.get("monotonic_ns", 0))
        finished = [event for event in node.loaded.events if event.kind == FINISHED]
        begun = [event for event in node.loaded.events if event.kind == BEGUN]
        for event in finished:
            notes += _describe_dive(folder, event.attributes, event.t_ns, start_ns)
        if len(begun) > len(finished):
            notes.append(
                f"profiler windows on {node.facts.name}: the recording ended before they did"
            )
    return tuple(notes[:_MAX_NOTES])


def _describe_dive(
    folder: Path, dive: Mapping[str, Any], finished_ns: int, start_ns: int
) -> list[str]:
    """Describe a dive in a note.

    finished_ns: time of its event, for a window that never began. start_ns: of the recording.
    """
    try:
        late, healthy = dive["windows"]
        at_ns = int(late.get("begun_ns") or finished_ns) - start_ns
        names = f"rank {int(late['rank'])}", f"rank {int(healthy['rank'])}"
        head = f"profiler window {format_quantity(at_ns, 'ns')} into the run of {names[0]}"
        work_times = [format_quantity(int(dive[key]), "ns") for key in ("own_ns", "healthy_own_ns")]
        why = f"it had worked {work_times[0]} per step by itself, {names[1]} {work_times[1]}"
        missing = [
            f"none of {name}: {window['reason'] or 'no trace was kept'!s}"
            for name, window in zip(names, (late, healthy))
            if not window["file"]
        ]
        if missing:
            return [f"{head} ({why}): {'; '.join(missing)}"]
        profiles = [_read_window(folder, window) for window in (late, healthy)]
        step_ns = _get_length_ns(late) / int(late["steps"])
        return [f"{head} ({why}): {_describe_differences(profiles, step_ns, names)}"]
    except Unavailable as error:
        return [f"a profiler window could not be read: {error.message}"]
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return ["a profiler window could not be read: its event is damaged"]


def _read_window(folder: Path, window: Mapping[str, Any]) -> Profile:
    path = folder / FOLDER / Path(str(window["file"])).name
    return read_profile(path, int(window["steps"]), _get_length_ns(window))


def _get_length_ns(window: Mapping[str, Any]) -> int:
    return int(window["ended_ns"]) - int(window["begun_ns"])


def _describe_differences(
    profiles: Sequence[Profile], step_ns: float, names: tuple[str, str]
) -> str:
    differences = compare_profiles(profiles[0], profiles[1], step_ns)
    if not differences:
        return f"no operator or kernel took clearly longer than in {names[1]}"
    parts = [
        f"{_KINDS[item.kind]}{item.name[:_MAX_NAME_CHARACTERS]}"
        f" {format_quantity(round(item.late.ns), 'ns')}{_format_calls(item.late)}"
        f" ({_format_other(item.healthy)})"
        for item in differences[:MAX_NAMED]
    ]
    return (
        f"of a step of {format_quantity(round(step_ns), 'ns')} it spent more than {names[1]} in "
        + ", ".join(parts)
    )


def _format_calls(activity: Activity) -> str:
    return f" in {activity.calls:.4g} calls" if activity.calls else ""


def _format_other(activity: Activity) -> str:
    if not activity.calls and not activity.ns:
        return "there: not called"
    return f"there: {format_quantity(round(activity.ns), 'ns')}{_format_calls(activity)}"
