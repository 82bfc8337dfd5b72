"""What has numbers of its own: a *channel*.

A group, or the messages from one rank to another in a group, and of that one life: when a rank
begins to count anew, that is another channel.
"""

from __future__ import annotations

import numpy as np

from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import mixed


class Channels:
    """The channels of one rank, and how far each has come."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, int, int]] = []
        """Group; peer, -1 for none; kind (send, receive, or 0 for all others); life."""
        self._known: dict[tuple[int, int], int] = {}  # (line, life) -> channel
        # A line is a channel with all its lives. By its label, ascending:
        none = np.zeros(0, np.int64)
        self._label, self._of_label = none, none
        # By line: its present life, and what was reached in it.
        self._life, self._channel = none, none
        self._number, self._arrive_ns = none, none

    def of(self, group: Int, peer: Int, way: Int, arrive_ns: Int, number: Int) -> Int:
        """Return the channel of each operation; they come in the order in which they ended."""
        line = self._lines(group, peer, way)
        order = np.argsort(arrive_ns, kind="stable")
        # Short numbers are sorted in one pass.
        short = line[order].astype(np.int16 if self._life.size < 1 << 15 else np.int64)
        order = order[np.argsort(short, kind="stable")]
        of, now, t = line[order], number[order], arrive_ns[order]
        opens = np.ones(of.size, np.bool_)
        opens[1:] = of[1:] != of[:-1]
        again = np.zeros(of.size, np.bool_)
        again[1:] = ~opens[1:] & (now[1:] < now[:-1])
        heads = np.flatnonzero(opens)
        mine = of[heads]
        # What began before the latest one did is only late, not a beginning.
        again[heads] = (now[heads] < self._number[mine]) & (t[heads] > self._arrive_ns[mine])
        tails = np.append(heads[1:], of.size) - 1
        later = t[tails] > self._arrive_ns[mine]
        self._number[mine] = np.where(later, now[tails], self._number[mine])
        self._arrive_ns[mine] = np.maximum(t[tails], self._arrive_ns[mine])
        if not again.any():
            return self._channel[line]
        begun = np.cumsum(again)
        before: Int = np.repeat(begun[heads] - again[heads], np.diff([*heads, of.size]))
        life = self._life[of] + begun - before
        self._life[mine] = life[tails]
        out = np.empty(of.size, np.int64)
        for one, its_life in sorted(set(zip(of.tolist(), life.tolist()))):
            out[(of == one) & (life == its_life)] = self._in_life(one, its_life)
        self._channel[mine] = out[tails]
        channel = np.empty(of.size, np.int64)
        channel[order] = out
        return channel

    def _lines(self, group: Int, peer: Int, way: Int) -> Int:
        label = mixed(group, peer, way)
        at = np.minimum(np.searchsorted(self._label, label), max(self._label.size - 1, 0))
        if not self._label.size or not (self._label[at] == label).all():
            new, first = np.unique(label, return_index=True)
            self._begin(
                *(
                    column[np.sort(first[~np.isin(new, self._label)])]
                    for column in (label, group, peer, way)
                )
            )
            at = np.searchsorted(self._label, label)
        return self._of_label[at]

    def _begin(self, label: Int, group: Int, peer: Int, way: Int) -> None:
        count = self._life.size
        every = np.concatenate([self._label, label])
        of = np.concatenate([self._of_label, count + np.arange(label.size)])
        order = np.argsort(every)
        self._label, self._of_label = every[order], of[order]
        channels = len(self.found) + np.arange(label.size)
        none = np.zeros(label.size, np.int64)
        self._life = np.concatenate([self._life, none])
        self._number = np.concatenate([self._number, none - 1])
        self._arrive_ns = np.concatenate([self._arrive_ns, none + np.iinfo(np.int64).min])
        self._channel = np.concatenate([self._channel, channels])
        for number, key in enumerate(zip(group.tolist(), peer.tolist(), way.tolist())):
            self._known[count + number, 0] = len(self.found)
            self.found.append((*key, 0))

    def _in_life(self, line: int, life: int) -> int:
        if (line, life) not in self._known:
            self._known[line, life] = len(self.found)
            self.found.append((*self.found[self._known[line, 0]][:3], life))
        return self._known[line, life]
