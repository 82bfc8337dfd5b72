"""Process groups of torch.distributed: their members, and the number of the next operation of each.

A group is identified by its members, so that numbers agree between ranks without communication
(docs/design/waits-between-ranks.md). Of several process groups with equal members, all but the one
created first are also identified by their name, which torch needs to be equal on all members: each
has an order of its own, and different threads may use them at the same time. Only weak references
to the job's process groups are held.
"""

import hashlib
import itertools
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from .. import ring

UNKNOWN = -1
MAX_ANNOUNCED = 256  # files of one process; members of further groups stay unannounced
_MAX_OBJECTS = 1024


class Group:
    """Ranks that operate together, and how many operations they have counted."""

    __slots__ = ("_messages", "_receives_from_any", "number", "operations", "rank", "ranks")

    def __init__(self, number: int, ranks: Sequence[int], rank: int) -> None:
        self.number = number
        self.ranks = ranks  # global ranks in the group's own order; empty = unknown
        self.rank = rank  # global rank of this process
        self.operations: Iterator[int] = itertools.count()
        self._messages: Dict[Tuple[int, bool], Iterator[int]] = {}
        self._receives_from_any = False

    def global_rank(self, group_rank: Any) -> int:
        """Return the global rank of a member given its rank within the group, -1 if unknown."""
        if isinstance(group_rank, int) and 0 <= group_rank < len(self.ranks):
            return self.ranks[group_rank]
        return UNKNOWN

    def next_message(self, peer: int, sending: bool) -> int:
        """Return the number of the next message with a peer, equal on both sides; -1 = none."""
        if peer < 0 or (self._receives_from_any and not sending):
            return UNKNOWN
        counter = self._messages.get((peer, sending))
        if counter is None:
            counter = self._messages.setdefault((peer, sending), itertools.count())
        return next(counter)

    def stop_numbering_receives(self) -> None:
        """Stop numbering received messages, after one was received from an unknown sender."""
        self._receives_from_any = True


_by_number: Dict[int, Group] = {}
by_object: Dict[int, Tuple[Callable[[], Any], Group]] = {}
"""By id() of a process group: a weak reference that shows whether it is still that object."""


def find_group(c10d: Any, process_group: Any) -> Optional[Group]:
    """Return the group of a call (None: the default group); None when not a member."""
    if process_group is None:
        process_group = c10d._world.default_pg
    entry = by_object.get(id(process_group))
    if entry is not None and entry[0]() is process_group:
        return entry[1]
    if not isinstance(process_group, c10d.ProcessGroup):
        return None  # not initialized, or the constant for ranks outside the group
    return _add_group(c10d, process_group)


def compute_group_number(ranks: Sequence[int], name: str = "") -> int:
    """Compute the number of a group in every recording: 63 bits of a hash of its global ranks.

    name: of a process group whose members are also those of an earlier one.
    """
    text = ",".join(str(rank) for rank in sorted(ranks)) + (":" + name if name else "")
    digest = hashlib.blake2b(text.encode()).digest()[:8]
    return int.from_bytes(digest, "little") & (1 << 63) - 1


def _add_group(c10d: Any, process_group: Any) -> Group:
    numbering = c10d._world.pg_group_ranks.get(process_group)
    if numbering:
        ranks: List[int] = sorted(numbering, key=numbering.__getitem__)
        name = _find_own_name(c10d, process_group, ranks)
        group = _make_group(ranks, ranks[process_group.rank()], name)
    else:
        group = Group(0, (), UNKNOWN)
        group.operations = itertools.repeat(UNKNOWN)
    if len(by_object) >= _MAX_OBJECTS:
        _drop_dead_groups()
    by_object[id(process_group)] = (weakref.ref(process_group), group)
    return group


def _find_own_name(c10d: Any, process_group: Any, ranks: List[int]) -> str:
    """Return the name of a process group if an earlier one has the same members, else ""."""
    for group, numbering in list(c10d._world.pg_group_ranks.items()):
        if group is process_group:
            break
        if sorted(numbering) == sorted(ranks):
            return str(getattr(c10d._world, "pg_names", {}).get(process_group, ""))
    return ""


def _make_group(ranks: List[int], rank: int, name: str = "") -> Group:
    number = compute_group_number(ranks, name)
    group = _by_number.get(number)
    if group is None:
        group = _by_number.setdefault(number, Group(number, ranks, rank))
        if len(_by_number) <= MAX_ANNOUNCED:
            ring.register_group(number, sorted(ranks))
    if group.ranks == ranks:
        return group
    # Equal ranks in another order: a separate order, but a common count.
    new_group = Group(number, ranks, rank)
    new_group.operations = group.operations
    new_group._messages = group._messages
    return new_group


def _drop_dead_groups() -> None:
    for key, (reference, _) in list(by_object.items()):
        if reference() is None:
            by_object.pop(key, None)


def _clear_groups() -> None:
    _by_number.clear()
    by_object.clear()


ring.after_fork.append(_clear_groups)
