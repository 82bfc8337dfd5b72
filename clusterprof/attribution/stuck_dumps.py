"""Who stood in which operation when the flight recorders of a job were dumped.

rank 0   all_reduce 812 begun, not ended      stuck
rank 1   all_reduce 811 ended, nothing begun  not stuck: the one that rank 0 waits for
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from clusterprof.attribution.blame_hangs import Stuck
from clusterprof.importers.flight_recorder import Dump, Entry


def stuck_of(dumps: Sequence[Dump]) -> list[Stuck]:
    """Return, per rank and group, the oldest collective that was issued and had not ended.

    Teams are the numbers of groups of docs/design.md, section 12; numbers of operations are those
    of the dumps, from 1. Sends and receives are left out: the two sides number them differently.
    """
    found = []
    for dump in dumps:
        oldest: dict[str, Entry] = {}
        for entry in dump.entries:
            if not entry.done and not entry.message and entry.group in dump.members:
                known = oldest.get(entry.group)
                if known is None or entry.number < known.number:
                    oldest[entry.group] = entry
        for group, entry in oldest.items():
            since_ns = 0 if entry.created_ns is None else max(0, dump.at_ns - entry.created_ns)
            team = team_of(dump.members[group])
            found.append(Stuck(dump.rank, team, entry.number, since_ns))
    return found


def members_of(dumps: Sequence[Dump]) -> dict[int, tuple[int, ...]]:
    """Return the global ranks of each team of `stuck_of`."""
    return {team_of(ranks): ranks for dump in dumps for ranks in dump.members.values()}


def team_of(ranks: Sequence[int]) -> int:
    """Return the number of a group, as the probe gives it (docs/design.md, section 12)."""
    text = ",".join(str(rank) for rank in sorted(ranks))
    first = blake2b(text.encode()).digest()[:8]
    return int.from_bytes(first, "little") & (1 << 63) - 1
