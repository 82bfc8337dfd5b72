"""Find what the host was doing in Python: at each instant, in which function, and what it is for.

A trace with stacks (`with_stack=True`) has an event for each call of a Python function. They nest:

    train.py(30): main          |------------------------------------------|
      data.py(9): preprocess       |---------------------|
        <built-in function open>      |----|
      torch/…: backward                                     |------|
    found                       o  d  r    d              o t      o
                                                                o other, d data, r read, t training

The innermost function decides. One that says nothing about its purpose (a helper, a library, an
operator) has that of the function around it; the name that is kept is that of the innermost
function outside of PyTorch, or of the operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.host_activity import NO_HOST_WORK, HostWork
from clusterprof.analysis.importers.core.stacks import find_innermost_calls, nest_calls
from clusterprof.analysis.importers.kineto import classify
from clusterprof.probe import layout

Int = NDArray[np.int64]
MIN_FUNCTION_NS = 100_000
"""Shortest call of a function that is kept, in ns; the function around it stands for it."""
MAX_DISPATCH_NS = 1_000_000
"""Longest time in ns that an operator needs to be dispatched, ten times the usual: one that takes
longer and launches nothing computes on the host.
"""
MAX_GATHERED_NAMES = 1 << 14
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{1,16}\b")
ACTIVITIES = {
    classify.LOADING_FUNCTION: layout.WARMING_UP,
    classify.DATA_FUNCTION: layout.PREPARING_DATA,
    classify.READ_FUNCTION: layout.READING_DATA,
    classify.SLEEP_FUNCTION: layout.SLEEPING,
    classify.LOCK_FUNCTION: layout.WAITING_FOR_LOCK,
    classify.LOG_FUNCTION: layout.OTHER_WORK,
    classify.FUNCTION: layout.OTHER_WORK,
    classify.OPERATOR: layout.RUNNING_MODEL,
    classify.TORCH_FUNCTION: layout.RUNNING_MODEL,
    classify.LIBRARY_FUNCTION: layout.RUNNING_MODEL,
    classify.BLOCKED_FUNCTION: layout.COMPUTING_ON_HOST,
    classify.ANNOTATED_RANGE: layout.COMPUTING_ON_HOST,  # only where nothing else is known
}
"""Kind of a function -> activity of the host in it; operators that launch are counted before."""
_MIN_ENCLOSED_RATIO = 0.9
_UNNAMED = (classify.TORCH_FUNCTION,)
_DATA = (classify.DATA_FUNCTION, classify.READ_FUNCTION)


_ACTIVITY = np.array([ACTIVITIES.get(kind, 0) for kind in range(max(ACTIVITIES) + 1)])


def number_names(numbers: dict[str, int], names: Iterable[str]) -> Iterator[int]:
    """Yield the number of each name, adding new ones to `numbers`; -1 where that is full.

    Names of built-in functions are kept without the address of their object.
    """
    for name in names:
        if " at 0x" in name:
            name = _ADDRESS.sub("", name)
        is_full = len(numbers) >= MAX_GATHERED_NAMES
        yield numbers.get(name, -1) if is_full else numbers.setdefault(name, len(numbers))


def find_innermost_functions(start: Int, end: Int, kind: Int, name: Int) -> HostWork:
    """Find in which function, and for what, one thread was at each instant outside of training.

    int64[n] each, in any order: start and end (ns), kind (`classify`) and row of the name of each
    call. Calls that do not nest by some ns, as rounding makes them, are trimmed to the outer one.
    """
    calls, order = nest_calls(start, end)
    kind, name, parent = kind[order], name[order], calls.parent
    for level in range(1, int(calls.depth.max(initial=0)) + 1):  # from the outside inwards
        rows = np.flatnonzero(calls.depth == level)
        outer = parent[rows]
        own_kind = kind[rows]
        kind[rows] = _select_kind(own_kind, kind[outer])
        nameless = np.isin(own_kind, _UNNAMED) | _is_built_in(own_kind)
        name[rows] = np.where(nameless & (name[outer] >= 0), name[outer], name[rows])
    edges, inside = find_innermost_calls(calls)
    activity = np.where(inside >= 0, _ACTIVITY[kind[inside]], 0) if inside.size else inside
    computing = (activity[:-1] == layout.RUNNING_MODEL) & (np.diff(edges) >= MAX_DISPATCH_NS)
    computing &= kind[inside[:-1]] == classify.OPERATOR
    activity[:-1][computing] = layout.COMPUTING_ON_HOST
    chosen = np.flatnonzero((np.diff(edges) > 0) & (activity[:-1] > 0))
    return HostWork(edges[chosen], edges[chosen + 1], activity[chosen], name[inside[chosen]])


def find_enclosing_work(threads: Iterable[HostWork], launches: Int) -> HostWork:
    """Find the thread that was in a function at the launches; empty if there is none.

    Of several, which run side by side, it is the one in the shortest functions: a thread is in
    short ones while it launches, and in long ones while it waits or prepares. launches: int64[n],
    ns.
    """
    best_work, best_score = NO_HOST_WORK, 0.0
    for work in threads:
        row = np.searchsorted(work.start, launches, side="right") - 1
        inside = row >= 0
        inside[inside] &= launches[inside] < work.end[row[inside]]
        if not inside.size or inside.mean() < _MIN_ENCLOSED_RATIO:
            continue
        score = float((1.0 / (work.end - work.start)[row[inside]]).sum())
        if score > best_score:
            best_work, best_score = work, score
    return best_work


def _is_built_in(kind: Int) -> np.ndarray:
    """Return whether a function may be a built-in one, whose caller is the better name: bool[n]."""
    built_in = (classify.READ_FUNCTION, classify.SLEEP_FUNCTION, classify.LOCK_FUNCTION)
    return np.isin(kind, built_in)


def _select_kind(own_kind: Int, outer: Int) -> Int:
    """Select the purpose of calls inside others, int64[n] each.

    Training inside of user code is training; anything inside of loading data, logging or the
    loading of kernels is that, except reading and sleeping. Reading anywhere else is other work.
    """
    in_data = np.isin(outer, _DATA)
    purposes = classify.LOG_FUNCTION, classify.LOADING_FUNCTION, classify.BLOCKED_FUNCTION
    has_purpose = in_data | np.isin(outer, purposes)
    vague = np.isin(own_kind, (classify.OPERATOR, classify.FUNCTION, classify.TORCH_FUNCTION))
    vague |= np.isin(own_kind, (classify.LOCK_FUNCTION, classify.LIBRARY_FUNCTION))
    in_training = (outer == classify.TORCH_FUNCTION) & (own_kind == classify.FUNCTION)
    kind = np.where((vague & has_purpose) | in_training, outer, own_kind)
    return np.where((own_kind == classify.READ_FUNCTION) & ~in_data, outer, kind)
