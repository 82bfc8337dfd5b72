"""torch.distributed: when this rank came to each collective operation, and when it could go on.

What is wrapped are the functions of distributed_c10d that a job calls; one that calls another of
them counts once, as the outer. An asynchronous operation leaves two spans, its issue and the wait
for its end, which goes through the class of all works: the job's own objects stay as they are.
With CUDA the host does not wait; how long the default stream stood still is told by events.
"""

import functools
import sys
import weakref
from _thread import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any, Callable, Dict, Optional, Set, Tuple

from .. import failed, layout, ring, without_our_frame
from . import cuda, groups, seam

WORKS_AT_MOST = 512  # operations under way whose wait we would recognise

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
    "send": (layout.SEND, 0),
    "isend": (layout.SEND, 0),
    "recv": (layout.RECV, -1),
    "irecv": (layout.RECV, -1),
}
MESSAGES = (layout.SEND, layout.RECV)

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
_inside: Set[int] = set()  # threads that are in a wrapped function: what it calls is its own matter

Call = Tuple[int, groups.Group, int, int, int, Any, int]  # thread, group, b, c, d, mark, start
Begin = Callable[[Tuple[Any, ...], Dict[str, Any]], Optional[Call]]
Known = Tuple[Callable[[], Any], int, int, int, int]  # the work, a, b, c, d
_works: Dict[int, Known] = {}  # by id(), oldest first


def install(module: ModuleType) -> bool:
    """Wrap the functions here and, if they are there already, under torch.distributed."""
    c10d: Any = module
    c10d._world.default_pg, c10d._world.pg_group_ranks  # noqa: B018 - or we cannot tell groups apart
    public = sys.modules.get("torch.distributed")
    for name, (operation, brought) in FUNCTIONS.items():
        original = getattr(module, name, None)
        if original is None:
            continue  # not in this version
        wrapper = _wrap(original, _reader(c10d, original, operation, brought))
        setattr(module, name, wrapper)
        if getattr(public, name, None) is original:
            setattr(public, name, wrapper)
    # Not the function of this name, which warns of its caller's line.
    group_class = c10d.ProcessGroup
    original = group_class.monitored_barrier
    group_class.monitored_barrier = _wrap(original, _monitored_barrier(c10d))
    c10d.Work.wait = _wrap_wait(c10d.Work.wait)
    return True


def _wrap(original: Any, begin: Begin) -> Any:
    if getattr(original, "_is_clusterprof", False):
        return original

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if seam.is_compiling():
            return original(*arguments, **keywords)
        call = None
        try:
            if _probe.on:  # type: ignore[attr-defined]
                call = begin(arguments, keywords)
        except BaseException as error:
            failed(error)
        try:
            result = original(*arguments, **keywords)
        except BaseException as error:
            if call is not None:
                _inside.discard(call[0])
            without_our_frame(error)
            raise
        if call is not None:
            try:
                _ended(call, monotonic_ns(), result)
            except BaseException as error:
                failed(error)
        return result

    wrapper._is_clusterprof = True  # type: ignore[attr-defined]
    return wrapper


def _reader(c10d: Any, original: Any, operation: int, brought: int) -> Begin:
    """Return what reads the arguments of one function, by the names they have in this version."""
    code = _innermost(original).__code__
    names = code.co_varnames[: code.co_argcount]
    group_at = names.index("group")
    async_at = names.index("async_op") if "async_op" in names else len(names)
    always_async = original.__name__ in ("isend", "irecv")
    message = operation in MESSAGES
    peer_at = next((at for at, name in enumerate(names) if name in ("src", "dst")), -1)
    peer_name = names[peer_at] if peer_at >= 0 else ""
    brought_name = names[brought] if brought >= 0 else ""
    coalescing = getattr(c10d._world, "pg_coalesce_state", {})

    def peer_of(group: groups.Group, arguments: Any, keywords: Any) -> int:
        peer = arguments[peer_at] if len(arguments) > peer_at else keywords.get(peer_name)
        if peer is None:
            return group.global_rank(keywords.get("group_" + peer_name))
        return peer if isinstance(peer, int) else groups.UNKNOWN

    def begin(arguments: Any, keywords: Any) -> Optional[Call]:
        thread = get_ident()
        if thread in _inside:
            return None
        process_group = arguments[group_at] if len(arguments) > group_at else keywords.get("group")
        group = groups.find(c10d, process_group)
        if group is None:
            return None
        size = 0
        if brought >= 0:
            size = _bytes(
                arguments[brought] if len(arguments) > brought else keywords.get(brought_name)
            )
        d = operation
        if message:
            peer = peer_of(group, arguments, keywords)
            b = group.message(peer, operation == layout.SEND)
            if peer < 0:
                group.lose_count()
            d |= (peer + 1 & layout.PEER_MASK) << layout.PEER_SHIFT
        else:
            b = next(group.operations)
            if operation == layout.BROADCAST and peer_of(group, arguments, keywords) != group.rank:
                size = 0
        mark = None
        is_async = arguments[async_at] if len(arguments) > async_at else keywords.get("async_op")
        if is_async or always_async or coalescing:
            d |= layout.ISSUE << layout.FORM_SHIFT
        else:
            mark = cuda.before_wait(cuda.COLLECTIVES, default_stream=True)
        _inside.add(thread)
        return thread, group, b, size, d, mark, ring.enter(group.number, b, size, d)

    return begin


def _monitored_barrier(c10d: Any) -> Begin:
    def begin(arguments: Any, keywords: Any) -> Optional[Call]:
        thread = get_ident()
        group = groups.find(c10d, arguments[0]) if thread not in _inside else None
        if group is None:
            return None
        b = next(group.operations)
        _inside.add(thread)
        start = ring.enter(group.number, b, 0, layout.BARRIER)
        return thread, group, b, 0, layout.BARRIER, None, start

    return begin


def _ended(call: Call, end: int, result: Any) -> None:
    thread, group, b, size, d, mark, start = call
    _inside.discard(thread)
    sequence = ring.emit(layout.COLLECTIVE, start, end, group.number, b, size, d)
    if d >> layout.FORM_SHIFT & layout.FORM_MASK == layout.BLOCKING:
        if mark is not None:
            cuda.after_wait(mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)
    elif result is not None:
        if len(_works) >= WORKS_AT_MOST:
            for key in list(_works)[: WORKS_AT_MOST // 4]:  # nobody waits for these any more
                _works.pop(key, None)
        waits = d + (layout.WAIT - layout.ISSUE << layout.FORM_SHIFT)
        _works[id(result)] = (weakref.ref(result), group.number, b, size, waits)


def _wrap_wait(original: Any) -> Any:
    """Wrap the wait of every work.

    It has to be called `wait` and to take `self` first: by this pybind11 recognises that a
    subclass written in Python has come from here and not from its own override.
    """
    if getattr(original, "_is_clusterprof", False):
        return original

    @functools.wraps(original)
    def wait(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if seam.is_compiling():
            return original(self, *arguments, **keywords)
        known = None
        mark = None
        start = 0
        try:
            if _works and _probe.on:  # type: ignore[attr-defined]
                known = _works.pop(id(self), None)
                if known is not None and known[0]() is not self:
                    known = None
                if known is not None:
                    mark = cuda.before_wait(cuda.COLLECTIVES, default_stream=True)
                    start = ring.enter(*known[1:])
        except BaseException as error:
            failed(error)
        try:
            result = original(self, *arguments, **keywords)
        except BaseException as error:
            without_our_frame(error)
            raise
        try:
            if start and known is not None:
                end = monotonic_ns()
                sequence = ring.emit(layout.COLLECTIVE, start, end, *known[1:])
                if mark is not None:
                    cuda.after_wait(mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)
        except BaseException as error:
            failed(error)
        return result

    wait._is_clusterprof = True  # type: ignore[attr-defined]
    return wait


def _bytes(brought: Any) -> int:
    """Return the bytes of a tensor or of the tensors in a list; 0 for none, -1 unknown."""
    if brought is None:
        return 0
    try:
        if isinstance(brought, (list, tuple)):
            return sum([each.nbytes for each in brought])
        return int(brought.nbytes)
    except (AttributeError, TypeError, RuntimeError):
        return groups.UNKNOWN  # not what it should be: torch will say so


def _innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _forget() -> None:
    _inside.clear()
    _works.clear()


ring.after_fork.append(_forget)
