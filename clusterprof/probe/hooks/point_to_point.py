"""send, recv and their asynchronous forms: numbered by pair, not by group."""

from _thread import get_ident
from typing import Any, Optional

from .. import layout, ring
from . import cuda, other_calls, process_groups


def make_message_reader(c10d: Any, original: Any, operation: int) -> other_calls.CallReader:
    """Return a function that reads the arguments of one send or receive function.

    The argument names are those of the installed version.
    """
    names = other_calls.list_argument_names(original)
    group_at = names.index("group")
    always_async = original.__name__ in ("isend", "irecv")
    peer_at = next(position for position, name in enumerate(names) if name in ("src", "dst"))
    peer_name = names[peer_at]
    sending = operation == layout.SEND
    coalescing = getattr(c10d._world, "pg_coalesce_state", {})

    def begin(arguments: Any, keywords: Any) -> Optional[other_calls.PendingCall]:
        thread = get_ident()
        if thread in other_calls.active_threads:
            return None
        process_group = arguments[group_at] if len(arguments) > group_at else keywords.get("group")
        group = process_groups.find_group(c10d, process_group)
        if group is None:
            return None
        size = 0
        if sending:
            size = other_calls.sum_tensor_bytes(
                arguments[0] if arguments else keywords.get(names[0])
            )
        peer = find_peer(group, peer_at, peer_name, arguments, keywords)
        b = group.next_message(peer, sending)
        if peer < 0:
            group.stop_numbering_receives()
        d = operation | (peer + 1 & layout.PEER_MASK) << layout.PEER_SHIFT
        mark = None
        if always_async or coalescing:
            d |= layout.ISSUE << layout.FORM_SHIFT
        else:
            mark = cuda.begin_wait(cuda.MAX_PENDING_COLLECTIVES, default_stream=True)
        other_calls.active_threads.add(thread)
        return thread, group, b, size, d, mark, ring.enter(group.number, b, size, d)

    return begin


def find_peer(
    group: process_groups.Group, position: int, name: str, arguments: Any, keywords: Any
) -> int:
    """Return the global rank given as `src` or `dst`, or by its rank in the group; -1 unknown."""
    peer = arguments[position] if len(arguments) > position else keywords.get(name)
    if peer is None:
        return group.global_rank(keywords.get("group_" + name))
    return peer if isinstance(peer, int) else process_groups.UNKNOWN
