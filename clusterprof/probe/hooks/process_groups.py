"""Process groups of torch.distributed: who belongs to one, and which operation of it is the next.

A group is its members: two process groups of the same ranks are one here, and count as one, so
that numbers agree between ranks without a word exchanged (docs/design.md, section 12). Process
groups of the job are never held on to, only looked at.
"""

import hashlib
import itertools
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from .. import registration, ring

UNKNOWN = -1
ANNOUNCED_AT_MOST = 256  # files of one process; a group beyond that is known by those seen in it
_OBJECTS_AT_MOST = 1024


class Group:
    """Ranks that operate together, and how far they have counted."""

    __slots__ = ("_from_anybody", "_messages", "number", "operations", "rank", "ranks")

    def __init__(self, number: int, ranks: Sequence[int], rank: int) -> None:
        self.number = number
        self.ranks = ranks  # global, in the order of the group's own numbering; empty = not known
        self.rank = rank  # of this process, global
        self.operations: Iterator[int] = itertools.count()
        self._messages: Dict[Tuple[int, bool], Iterator[int]] = {}
        self._from_anybody = False

    def global_rank(self, group_rank: Any) -> int:
        """Return the global rank of a member that was named by its number in the group."""
        if isinstance(group_rank, int) and 0 <= group_rank < len(self.ranks):
            return self.ranks[group_rank]
        return UNKNOWN

    def message(self, peer: int, sending: bool) -> int:
        """Return the number of the next message to or from a peer: both count the same ones."""
        if peer < 0 or (self._from_anybody and not sending):
            return UNKNOWN
        counter = self._messages.get((peer, sending))
        if counter is None:
            counter = self._messages.setdefault((peer, sending), itertools.count())
        return next(counter)

    def lose_count(self) -> None:
        """Number no message received from now on: one came of which nobody says whose it is."""
        self._from_anybody = True


_by_number: Dict[int, Group] = {}
by_object: Dict[int, Tuple[Callable[[], Any], Group]] = {}
"""By id() of a process group: a weak reference that says whether it is still that one."""


def find(c10d: Any, process_group: Any) -> Optional[Group]:
    """Return the group of a call (None: the default one); None when we are not in it."""
    if process_group is None:
        process_group = c10d._world.default_pg
    known = by_object.get(id(process_group))
    if known is not None and known[0]() is process_group:
        return known[1]
    if not isinstance(process_group, c10d.ProcessGroup):
        return None  # not initialised, or the constant for those outside
    return _first_sight(c10d, process_group)


def number_of(ranks: Sequence[int]) -> int:
    """Return what names a group in every recording: 63 bits of a hash over its global ranks."""
    text = ",".join(str(rank) for rank in sorted(ranks))
    first = hashlib.blake2b(text.encode()).digest()[:8]
    return int.from_bytes(first, "little") & (1 << 63) - 1


def _first_sight(c10d: Any, process_group: Any) -> Group:
    numbering = c10d._world.pg_group_ranks.get(process_group)
    if numbering:
        ranks: List[int] = sorted(numbering, key=numbering.__getitem__)
        group = _of(ranks, ranks[process_group.rank()])
    else:
        group = Group(0, (), UNKNOWN)
        group.operations = itertools.repeat(UNKNOWN)
    if len(by_object) >= _OBJECTS_AT_MOST:
        _drop_dead()
    by_object[id(process_group)] = (weakref.ref(process_group), group)
    return group


def _of(ranks: List[int], rank: int) -> Group:
    number = number_of(ranks)
    group = _by_number.get(number)
    if group is None:
        group = _by_number.setdefault(number, Group(number, ranks, rank))
        if len(_by_number) <= ANNOUNCED_AT_MOST:
            registration.announce_group(number, sorted(ranks))
    if group.ranks == ranks:
        return group
    # The same ranks in another order: their own numbering, but one count.
    other = Group(number, ranks, rank)
    other.operations = group.operations
    other._messages = group._messages
    return other


def _drop_dead() -> None:
    for key, (reference, _) in list(by_object.items()):
        if reference() is None:
            by_object.pop(key, None)


def _forget() -> None:
    _by_number.clear()
    by_object.clear()


ring.after_fork.append(_forget)
