"""What fixing one cause would win back: a second column, never a share of the first.

Attributed time is additive; recoverable time is not, and the two are never mixed. For one rank that
no other waits for, device time attributed to a cause was idle because of it and nothing else at
that instant; without the cause the host would have been earlier by at least that much. So the
attributed time is a lower bound of the gain, and that is what is said:

    production of a batch   60 read + 40 decode = 100, of which 30 hidden behind compute
    lost 70                 attributed to reading 42; without reading the wait is 10: gain 60 >= 42

It cannot be said when no device was measured (the loss itself is only "at most"). Where ranks wait
for each other the next late rank takes the time over: a culprit wins what lies between the next
late one and itself, and a cause what lies between the last and who would be the last without it
(`blame_gains`). Where ranks do not all meet in every step, a cause wins what its culprits win alone
and what all lost alike:

    rank 0   |-- storage 20 --|== work ==|                        arrives at 120
    rank 1   |-- storage 20 --|== work ==|                        arrives at 120
    rank 2   |-- storage 50 --------------|== work ==|            arrives at 150
    rank 2 alone wins 3 * 30, all without storage 3 * 30 + 3 * 20

Where operations were not laid side by side it cannot be said.

A report says this only of what could not be played again: else what the replay won (`engine/wins`).
"""

from __future__ import annotations

from collections.abc import Sequence


def recoverable_ns(attributed_ns: int, upper_bound: bool, has_peers: bool) -> int | None:
    """Return at least how much device time fixing only this cause wins back; None = cannot say."""
    if upper_bound or has_peers:
        return None
    return attributed_ns


def common_ns(own_ns: Sequence[int]) -> int:
    """Return what all ranks lost alike by themselves, by the one that lost least.

    Assumes that it came in the same steps; where it did not, they waited for each other instead.
    """
    return len(own_ns) * min(own_ns, default=0)
