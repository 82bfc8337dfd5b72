"""One rank in blocks of its steps: time, samples, losses and lengths of steps, as they settle.

    steps     0  1  2  3  4  5  6         width 2, so that there are few blocks however long it runs
    blocks    |  0  |  1  |  2  | 3

An instant lies in the block of the step that is next to end. When there are more blocks than
`MOST`, each two become one: what comes out depends on the steps alone, not on how they were read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.attribution.lost import Account
from clusterprof.attribution.partial import SHARE
from clusterprof.attribution.regions import Region
from clusterprof.probe import layout
from clusterprof.stepstats import BINS_PER_OCTAVE
from clusterprof.timeline.model import PHASE_PERHAPS, Int, Lost, Rank

MOST = 128
STEPS, STEP_NS, TIME, MEASURED, IDLE, LOST, SAMPLES, TOKENS, COUNTED = range(9)
"""Rows of `Blocks.sums`; samples and tokens are those of `COUNTED` steps that told them."""
ROWS = 9
PERHAPS = "perhaps"
"""In `Blocks.lost`: time that was lost only if other ranks bear it out; not among `LOST`."""
_MOST_KEYS = 4096
_BIN_BITS = 16  # a length of 2**62 ns is bin 7,936

Keys = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Blocks:
    """What is known of a rank by block; small, so that it can travel."""

    width: int
    sums: Int
    """int64[ROWS, blocks]."""
    lost: Mapping[str, Int] = field(default_factory=dict)
    """Cause id as claimed -> int64[blocks], lost ns."""
    keys: Keys = field(default_factory=lambda: np.zeros((2, 0), np.int32))
    """int32[2, n]: block << 16 | bin of a length, rising; and how many steps."""

    def widened(self, width: int) -> Blocks:
        """Return the same in blocks of `width` steps, a multiple of its own."""
        times = width // self.width
        if times == 1:
            return self
        at = np.arange(0, self.sums.shape[1], times)
        lost = {cause: np.add.reduceat(ns, at) for cause, ns in self.lost.items()}
        block, bin_ = parted(self.keys)
        keys = packed(np.stack([block // times << _BIN_BITS | bin_, self.keys[1]]))
        return Blocks(width, np.add.reduceat(self.sums, at, axis=1), lost, keys.astype(np.int32))


class StepBlocks:
    """Adds up what settles of one rank."""

    def __init__(self) -> None:
        self._width = 1
        self._ended = 0
        """Steps that have ended so far, tentative ones too."""
        self._certain = 0
        self._sums = np.zeros((ROWS, MOST), np.int64)
        self._lost: dict[str, Int] = {}
        self._keys = np.zeros((2, 0), np.int64)
        """Block and bin in one number, and how many steps."""
        self._tentative: list[_Stretch] = []

    def add(self, rank: Rank, region: Region, lost: Lost, shares: Mapping[str, Int],
            account: Account) -> None:  # fmt: skip
        """Take a settled stretch; `shares` are those of its lost pieces, in 1/SHARE."""
        one = _Stretch(self._ended, rank, region, lost, shares, account)
        self._ended += one.ends.size
        self._tentative.append(one)
        if not region.tentative:
            self.confirm()

    def confirm(self) -> None:
        """Take what was tentative: another step has ended."""
        for stretch in self._tentative:
            self._take(stretch)
        self._certain, self._tentative = self._ended, []

    def done(self) -> Blocks | None:
        """Return the blocks; None without a step."""
        if not self._certain:
            return None
        blocks = -(-self._certain // self._width)
        # What follows the last step to its last sample belongs to the last block.
        rest = self._sums[:, blocks:].sum(axis=1)
        self._sums[:, blocks - 1] += rest
        lost = {}
        for cause, ns in self._lost.items():
            ns[blocks - 1] += ns[blocks:].sum()
            lost[cause] = ns[:blocks].copy()
        keys = packed(self._keys).astype(np.int32)  # there may be thousands of ranks
        return Blocks(self._width, self._sums[:, :blocks].copy(), lost, keys)

    def _take(self, one: _Stretch) -> None:
        last = one.first + one.ends.size
        while last // self._width >= MOST:
            self._halve()
        edges = one.edges(self._width)
        first = one.first // self._width
        part = slice(first, first + edges.size + 1)
        self._sums[:, part] += one.sums(edges, self._width)
        for cause, ns in one.losses(edges):
            if cause not in self._lost:
                self._lost[cause] = np.zeros(MOST, np.int64)
            self._lost[cause][part] += ns
        if one.ends.size:
            block = (one.first + np.arange(one.ends.size)) // self._width
            new = np.stack([block << _BIN_BITS | bins(one.lengths), np.ones_like(block)])
            self._keys = np.concatenate([self._keys, new], axis=1)
            if self._keys.shape[1] > _MOST_KEYS:
                self._keys = packed(self._keys)

    def _halve(self) -> None:
        self._width *= 2
        self._sums = _halved(self._sums)
        self._lost = {cause: _halved(ns[None])[0] for cause, ns in self._lost.items()}
        block, bin_ = parted(self._keys)
        self._keys[0] = block // 2 << _BIN_BITS | bin_


class _Stretch:
    """A settled stretch, with the steps that ended in it."""

    def __init__(self, first: int, rank: Rank, region: Region, lost: Lost,
                 shares: Mapping[str, Int], account: Account) -> None:  # fmt: skip
        """`first`: how many steps had ended before."""
        self.first, self._region, self._account = first, region, account
        perhaps = lost.phase == PHASE_PERHAPS
        self._lost = lost
        self._sure_ns = np.where(perhaps, 0, lost.lost_ns)
        self._claims = {
            cause: self._sure_ns * share // SHARE for cause, share in shares.items() if share.any()
        }
        if perhaps.any():
            self._claims[PERHAPS] = lost.lost_ns - self._sure_ns
        self.ends = self.lengths = np.zeros(0, np.int64)
        self._counts = np.zeros((2, 0), np.int64)
        steps = rank.main.spans.get(layout.STEP)
        if steps is not None:
            rows = np.flatnonzero(
                (steps.end_ns > region.start_ns) & (steps.end_ns <= region.end_ns)
            )
            start, end = steps.start_ns[rows], steps.end_ns[rows]
            new = np.ones(rows.size, np.bool_)  # the same span may stand there twice
            new[1:] = (start[1:] != start[:-1]) | (end[1:] != end[:-1])
            rows = rows[new][np.argsort(end[new], kind="stable")]
            self.ends, self.lengths = steps.end_ns[rows], steps.end_ns[rows] - steps.start_ns[rows]
            self._counts = np.stack([steps.c[rows], steps.d[rows]])

    def edges(self, width: int) -> Int:
        """Return when each block but the last one ends."""
        at = np.arange(width - 1 - self.first % width, self.ends.size, width)
        return self.ends[at]

    def sums(self, edges: Int, width: int) -> Int:
        """Return int64[ROWS, edges + 1]."""
        out = np.zeros((ROWS, edges.size + 1), np.int64)
        bounds = np.concatenate([[self._region.start_ns], edges, [self._region.end_ns]])
        out[TIME] = np.diff(bounds)
        windows = self._account.windows
        if windows is not None:
            start, measured, idle = windows
            block = np.searchsorted(edges, start, side="right")
            out[MEASURED] = _added(block, measured, edges.size)
            out[IDLE] = _added(block, idle, edges.size)
        out[LOST] = self._by_block(edges, self._sure_ns)
        if self.ends.size:
            block = (self.first + np.arange(self.ends.size)) // width - self.first // width
            out[STEPS] = np.bincount(block, minlength=edges.size + 1)
            out[STEP_NS] = _added(block, self.lengths, edges.size)
            samples, tokens = self._counts
            told = samples > 0
            out[SAMPLES] = _added(block, np.where(told, samples, 0), edges.size)
            out[TOKENS] = _added(block, np.where(told, np.maximum(tokens, 0), 0), edges.size)
            out[COUNTED] = np.bincount(block[told], minlength=edges.size + 1)
        return out

    def losses(self, edges: Int) -> list[tuple[str, Int]]:
        """Return (cause, int64[edges + 1]) of what was claimed."""
        return [(cause, self._by_block(edges, ns)) for cause, ns in self._claims.items()]

    def _by_block(self, edges: Int, ns: Int) -> Int:
        return _added(np.searchsorted(edges, self._lost.start_ns, side="right"), ns, edges.size)


def bins(lengths_ns: Int) -> Int:
    """Return the bin of each length."""
    octaves = np.log2(np.maximum(lengths_ns, 1).astype(np.float64))
    return np.floor(BINS_PER_OCTAVE * octaves).astype(np.int64)


def packed(keys: Int | Keys) -> Int:
    """Return keys in rising order, each once, and the sum of its counts."""
    found, at = np.unique(keys[0], return_inverse=True)
    counts = np.bincount(at, weights=keys[1], minlength=found.size).astype(np.int64)
    return np.stack([found, counts])


def parted(keys: Int | Keys) -> tuple[Any, Any]:
    """Return the block and the bin of packed keys."""
    return keys[0] >> _BIN_BITS, keys[0] & (1 << _BIN_BITS) - 1


def _added(block: Int, ns: Int, edges: int) -> Int:
    # float64 adds whole numbers below 2**53 exactly: a stretch is never 100 days long
    return np.bincount(block, weights=ns, minlength=edges + 1).astype(np.int64)


def _halved(table: Int) -> Int:
    """Each two columns become one; the second half is empty then."""
    out = np.zeros_like(table)
    out[:, : table.shape[1] // 2] = table[:, ::2] + table[:, 1::2]
    return out
