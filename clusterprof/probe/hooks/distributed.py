"""torch.distributed: when this rank came to each collective operation, and when it could go on.

What is wrapped are the functions of distributed_c10d that a job calls; one that calls another of
them counts once, as the outer. An asynchronous operation leaves two spans, its issue and the wait
for its end (`works`). With CUDA the host does not wait; how long the default stream stood still is
told by events.
"""

import functools
import sys
from _thread import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any, Optional, Tuple

from .. import failed, layout, ring, without_our_frame
from . import calls, coalesced, cuda, groups, messages, seam, works

# function of distributed_c10d: (operation, the position of what this rank brings or -1)
FUNCTIONS = {
    "all_reduce": (layout.ALL_REDUCE, 0),
    "all_reduce_coalesced": (layout.ALL_REDUCE, 0),
    "all_gather": (layout.ALL_GATHER, 1),
    "all_gather_into_tensor": (layout.ALL_GATHER, 1),
    "all_gather_single": (layout.ALL_GATHER, 1),
    "all_gather_coalesced": (layout.ALL_GATHER, 1),
    "reduce_scatter": (layout.REDUCE_SCATTER, 1),
    "reduce_scatter_tensor": (layout.REDUCE_SCATTER, 1),
    "reduce_scatter_single": (layout.REDUCE_SCATTER, 1),
    "broadcast": (layout.BROADCAST, 0),
    "reduce": (layout.REDUCE, 0),
    "gather": (layout.GATHER, 0),
    "scatter": (layout.SCATTER, 1),
    "all_to_all": (layout.ALL_TO_ALL, 1),
    "all_to_all_single": (layout.ALL_TO_ALL, 1),
    "barrier": (layout.BARRIER, -1),
}
MESSAGES = {
    "send": layout.SEND,
    "isend": layout.SEND,
    "recv": layout.RECV,
    "irecv": layout.RECV,
}
NOWHERE = 99  # a position that no call has

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]


def install(module: ModuleType) -> bool:
    """Wrap the functions here and, if they are there already, under torch.distributed."""
    c10d: Any = module
    c10d._world.default_pg, c10d._world.pg_group_ranks  # noqa: B018 - or we cannot tell groups apart
    for name, (operation, brought) in FUNCTIONS.items():
        original = getattr(c10d, name, None)
        if original is not None and not hasattr(original, "_is_clusterprof"):
            _put(c10d, name, original, wrap(c10d, original, operation, brought))
    for name, operation in MESSAGES.items():
        original = getattr(c10d, name, None)
        if original is not None:
            begin = messages.reader(c10d, original, operation)
            _put(c10d, name, original, calls.wrap(original, begin))
    # Not the function of this name, which warns of its caller's line.
    group_class = c10d.ProcessGroup
    original = group_class.monitored_barrier
    group_class.monitored_barrier = calls.wrap(original, _monitored_barrier(c10d))
    c10d.Work.wait = works.wrap_wait(c10d.Work.wait)
    manager = c10d._coalescing_manager
    if not hasattr(manager, "_is_clusterprof"):
        _put(c10d, "_coalescing_manager", manager, coalesced.wrap_manager(c10d, manager))
    return True


def _put(c10d: Any, name: str, original: Any, wrapper: Any) -> None:
    wrapper._is_clusterprof = True
    setattr(c10d, name, wrapper)
    public = sys.modules.get("torch.distributed")
    if getattr(public, name, None) is original:
        setattr(public, name, wrapper)


def wrap(c10d: Any, original: Any, operation: int, brought: int) -> Any:
    """Wrap one collective, all in one function: with cold caches each further one costs 1 µs."""
    group_at, async_at, sent_by, brought_name = _places(original, operation, brought)
    world, inside, by_object, find = c10d._world, calls.inside, groups.by_object, groups.find
    coalescing = getattr(world, "pg_coalesce_state", {})
    tensor = calls.tensor_with_bytes()
    collective, issued = layout.COLLECTIVE, operation | layout.ISSUE << layout.FORM_SHIFT

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if seam.is_traced():
            return original(*arguments, **keywords)
        start, mark, group = 0, None, None
        try:
            thread = get_ident()
            if _probe.on and thread not in inside and not seam.compiler._is_compiling_flag:  # type: ignore[attr-defined]
                given = len(arguments)
                asked = arguments[group_at] if given > group_at else keywords.get("group")
                if asked is None:
                    asked = world.default_pg
                known = by_object.get(id(asked))
                group = known[1] if known and known[0]() is asked else find(c10d, asked)
            if group is not None:
                size, what = 0, operation
                if brought_name:
                    sent = arguments[brought] if given > brought else keywords.get(brought_name)
                    size = sent.nbytes if type(sent) is tensor else calls.bytes_of(sent)  # type: ignore[union-attr]
                if sent_by != NOWHERE:
                    size = _of_sender(size, group, sent_by, arguments, keywords)
                if coalescing and coalesced.takes(operation, size, group):
                    group = None
                elif arguments[async_at] if given > async_at else keywords.get("async_op"):
                    what = issued
                elif seam.cuda._initialized:
                    mark = cuda.before_wait(cuda.COLLECTIVES, default_stream=True)
            if group is not None:
                b = next(group.operations)
                inside.add(thread)
                start = ring.enter(group.number, b, size, what)
        except BaseException as error:
            failed(error)
        try:
            result = original(*arguments, **keywords)
        except BaseException as error:
            if start:
                inside.discard(thread)
            without_our_frame(error)
            raise
        if start and group is not None:
            try:
                end = monotonic_ns()
                inside.discard(thread)
                sequence = ring.emit(collective, start, end, group.number, b, size, what)
                if mark is not None or (what != operation and result is not None):
                    _goes_on(group, b, size, what, result, mark, sequence, start, end)
            except BaseException as error:
                failed(error)
        return result

    return wrapper


def _places(original: Any, operation: int, brought: int) -> Tuple[int, int, int, str]:
    """Return where group, async_op and src stand in this version, and what this rank brings."""
    names = calls.names_of(original)
    async_at = names.index("async_op") if "async_op" in names else NOWHERE
    sent_by = names.index("src") if operation == layout.BROADCAST else NOWHERE
    return names.index("group"), async_at, sent_by, names[brought] if brought >= 0 else ""


def _goes_on(
    group: groups.Group, b: int, size: int, what: int, result: Any,
    mark: cuda.Mark, sequence: int, start: int, end: int,
) -> None:  # fmt: skip
    """See to what ends later: the device's part of a wait, or an operation that was only issued."""
    if mark is not None:
        cuda.after_wait(mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)
    else:
        works.remember(result, group.number, b, size, what)


def _of_sender(size: int, group: groups.Group, at: int, arguments: Any, keywords: Any) -> int:
    """Return what a broadcast brings: nothing from those who only receive."""
    return size if messages.peer_of(group, at, "src", arguments, keywords) == group.rank else 0


def _monitored_barrier(c10d: Any) -> calls.Begin:
    def begin(arguments: Any, keywords: Any) -> Optional[calls.Call]:
        thread = get_ident()
        group = groups.find(c10d, arguments[0]) if thread not in calls.inside else None
        if group is None:
            return None
        b = next(group.operations)
        calls.inside.add(thread)
        start = ring.enter(group.number, b, 0, layout.BARRIER)
        return thread, group, b, 0, layout.BARRIER, None, start

    return begin
