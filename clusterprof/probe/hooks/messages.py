"""send, recv and their asynchronous forms: numbered by pair, not by group."""

from _thread import get_ident
from typing import Any, Optional

from .. import layout, ring
from . import calls, cuda, groups


def reader(c10d: Any, original: Any, operation: int) -> calls.Begin:
    """Return what reads the arguments of one function, by the names they have in this version."""
    names = calls.names_of(original)
    group_at = names.index("group")
    always_async = original.__name__ in ("isend", "irecv")
    peer_at = next(at for at, name in enumerate(names) if name in ("src", "dst"))
    peer_name = names[peer_at]
    sending = operation == layout.SEND
    coalescing = getattr(c10d._world, "pg_coalesce_state", {})

    def begin(arguments: Any, keywords: Any) -> Optional[calls.Call]:
        thread = get_ident()
        if thread in calls.inside:
            return None
        process_group = arguments[group_at] if len(arguments) > group_at else keywords.get("group")
        group = groups.find(c10d, process_group)
        if group is None:
            return None
        size = 0
        if sending:
            size = calls.bytes_of(arguments[0] if arguments else keywords.get(names[0]))
        peer = peer_of(group, peer_at, peer_name, arguments, keywords)
        b = group.message(peer, sending)
        if peer < 0:
            group.lose_count()
        d = operation | (peer + 1 & layout.PEER_MASK) << layout.PEER_SHIFT
        mark = None
        if always_async or coalescing:
            d |= layout.ISSUE << layout.FORM_SHIFT
        else:
            mark = cuda.before_wait(cuda.COLLECTIVES, default_stream=True)
        calls.inside.add(thread)
        return thread, group, b, size, d, mark, ring.enter(group.number, b, size, d)

    return begin


def peer_of(group: groups.Group, at: int, name: str, arguments: Any, keywords: Any) -> int:
    """Return the global rank that a call names as `src` or `dst`, or by its number in the group."""
    peer = arguments[at] if len(arguments) > at else keywords.get(name)
    if peer is None:
        return group.global_rank(keywords.get("group_" + name))
    return peer if isinstance(peer, int) else groups.UNKNOWN
