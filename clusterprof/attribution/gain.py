"""What fixing one cause would win back: a second column, never a share of the first.

Attributed time is additive; recoverable time is not, and the two are never mixed. For one rank that
no other waits for, device time attributed to a cause was idle because of it and nothing else at
that instant; without the cause the host would have been earlier by at least that much. So the
attributed time is a lower bound of the gain, and that is what is said:

    production of a batch   60 read + 40 decode = 100, of which 30 hidden behind compute
    lost 70                 attributed to reading 42; without reading the wait is 10: gain 60 >= 42

It cannot be said when no device was measured (the loss itself is only "at most"), and for ranks
that wait for each other, where the next late rank takes the time over: that needs the pass across
ranks.
"""

from __future__ import annotations


def recoverable_ns(attributed_ns: int, upper_bound: bool, has_peers: bool) -> int | None:
    """Return at least how much device time fixing only this cause wins back; None = cannot say."""
    if upper_bound or has_peers:
        return None
    return attributed_ns
