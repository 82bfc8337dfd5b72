"""Python functions of a trace: what the host was doing in them, and the stacks of its threads.

    train.py(30): main                           train.py:30 main
    <built-in method item of Tensor object>      <built-in> Tensor.item
    nn.Module: Linear_0                          <nn.Module> Linear_0

The line of a function is its first one: the profiler does not write which line was running.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import numpy as np

from clusterprof.analysis.importers.core.base import Account
from clusterprof.analysis.importers.core.host_activity import NO_HOST_WORK, HostWork, overlay_work
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.stacks import (
    BUILT_IN_FILE,
    MAX_SAMPLES,
    MODULE_FILE,
    ImportedStacks,
    add_stack_samples,
    build_stretches,
    draw_samples,
)
from clusterprof.analysis.importers.kineto import classify
from clusterprof.analysis.importers.kineto.device_gaps import DeviceWork, RuntimeCalls
from clusterprof.analysis.importers.kineto.event_columns import Int
from clusterprof.analysis.importers.kineto.host_functions import (
    find_enclosing_work,
    find_innermost_functions,
)
from clusterprof.analysis.importers.kineto.host_spans import (
    HostTimeline,
    Marks,
    ProfilerSteps,
    find_main_thread,
)

MAX_THREADS = 16
"""Number of threads of a process whose stacks are kept."""
_MODULE = "nn.Module: "
_FUNCTION = re.compile(r"(.+)\((\d{1,9})\): (.+)", re.DOTALL)
_METHOD_OF_OBJECT = re.compile(r"<built-in method (\S+) of (\S+) object")
_METHOD_OF_TYPE = re.compile(r"<(?:method|slot wrapper|method-wrapper) '(\S+)' of '(\S+)' ?object")
_BUILT_IN = re.compile(r"<built-in (?:function|method) (\S+?)>")


def parse_function_name(name: str) -> tuple[str, int, str]:
    """Parse the name of a function into file, first line (0 = not known) and function."""
    if match := _FUNCTION.fullmatch(name):
        return match[1], int(match[2]), match[3]
    if name.startswith(_MODULE):
        return MODULE_FILE, 0, name[len(_MODULE) :]
    if match := _METHOD_OF_OBJECT.match(name) or _METHOD_OF_TYPE.match(name):
        owner = match[2].rpartition(".")[2]
        return BUILT_IN_FILE, 0, match[1] if owner == "type" else f"{owner}.{match[1]}"
    if match := _BUILT_IN.match(name):
        return BUILT_IN_FILE, 0, match[1]
    return BUILT_IN_FILE, 0, name.strip("<>") or name


def add_function_stacks(
    node: NodeTables,
    pid: int,
    functions: Marks,
    names: Sequence[str],
    host_side: HostTimeline,
    steps: ProfilerSteps,
    account: Account,
) -> None:
    """Add the stacks of the thread of the steps, and of threads that load data.

    functions: the calls of the process; their numbers are rows of `names`, -1 if unknown.
    """
    # Operators and annotated ranges are no Python functions.
    is_function = functions.kind >= classify.TORCH_FUNCTION
    is_function &= functions.kind != classify.ANNOTATED_RANGE
    numbers, inverse = np.unique(functions.number[is_function], return_inverse=True)
    if not numbers.size:
        return
    table = ImportedStacks()
    places = [
        table.add_place(*parse_function_name(names[number])) if number >= 0 else -1
        for number in numbers.tolist()
    ]
    place = np.array(places, np.int64)[inverse]
    start, end, thread = (
        functions.start[is_function],
        functions.end[is_function],
        functions.thread[is_function],
    )
    threads = _list_threads(
        thread, functions.kind[is_function], end - start, find_main_thread(host_side)
    )
    window = int(steps.start[0]), int(steps.end[-1])
    samples = []
    for number in threads:
        on_thread = thread == number
        stretches = build_stretches(
            table, start[on_thread], end[on_thread], place[on_thread], window
        )
        samples.append(draw_samples(stretches, MAX_SAMPLES // len(threads)))
    account.read["samples of stacks"] += add_stack_samples(node, pid, table, samples)


def _list_threads(thread: Int, kind: Int, length_ns: Int, main: int) -> list[int]:
    """List the threads with stacks: that of the steps, then those that load data.

    Profiles of JAX have the steps on a thread of their own: then it is the thread with most time.
    """
    if not (thread == main).any():
        main = int(np.bincount(thread, length_ns).argmax())
    loads = np.isin(kind, (classify.DATA_FUNCTION, classify.READ_FUNCTION)) & (thread != main)
    return [main, *np.unique(thread[loads]).tolist()][:MAX_THREADS]


def find_functions(
    host_side: HostTimeline,
    functions: Marks,
    calls: RuntimeCalls,
    work: DeviceWork,
    operators: Collection[int],
) -> HostWork:
    """Find the functions of the thread of the steps, and of the one that launched the work.

    A profile of JAX lists calls on threads of their own: then it is the thread in a function at the
    launches, and the rest is the longest thread's. operators: threads with operators.
    """
    main = find_main_thread(host_side)
    launched = work.call[work.call >= 0]
    known = {main, *np.unique(calls.thread[launched]).tolist()}
    if not known.isdisjoint(operators) or np.isin(functions.thread, list(known)).any():
        return _select_innermost(functions, main)
    threads = {
        thread: _select_innermost(functions, thread)
        for thread in np.unique(functions.thread).tolist()
    }
    launching = find_enclosing_work(threads.values(), calls.start[launched])
    longest = max(
        threads.values(), key=lambda work: int((work.end - work.start).sum()), default=NO_HOST_WORK
    )
    return overlay_work(launching, longest)


def _select_innermost(functions: Marks, thread: int) -> HostWork:
    """Select the calls of one thread, and find in which of them it was at each instant.

    Built-in functions of no known purpose are left out: the functions around them have one.
    """
    left_out = (classify.BUILT_IN_FUNCTION, classify.ANNOTATED_RANGE)
    is_own = (functions.thread == thread) & ~np.isin(functions.kind, left_out)
    return find_innermost_functions(
        functions.start[is_own],
        functions.end[is_own],
        functions.kind[is_own],
        functions.number[is_own],
    )


def find_annotated_ranges(host_side: HostTimeline, functions: Marks) -> HostWork:
    """Find in which range that the program marked itself the thread of the steps was."""
    selected = functions.kind == classify.ANNOTATED_RANGE
    selected &= functions.thread == find_main_thread(host_side)
    return find_innermost_functions(
        functions.start[selected],
        functions.end[selected],
        functions.kind[selected],
        functions.number[selected],
    )
