"""What an imported trace says of a host whose threads nobody sampled.

A profiler or a tracer of system calls was there instead of us: spans `starved` (the device had
nothing to do, for its host had not launched yet) and `loading` (reads and computing of the thread
that loads) say what our own samples of threads would have said (docs/design.md, section 4).
"""

from __future__ import annotations

import numpy as np

from clusterprof.probe import layout
from clusterprof.timeline.intervals import overlaps
from clusterprof.timeline.model import Chunk, Float, Int, Rank, SpanTable

LOCAL, NETWORK, OBJECT = 1, 2, 3  # field d of `loading`: where the files lie
_SOURCE = "importer"  # in the header's versions: which importer a recording comes from


def is_imported(chunk: Chunk) -> bool:
    """True of a recording that was made of somebody else's trace."""
    return _SOURCE in chunk.header.versions


def traced_threads(rank: Rank) -> bool:
    """True when a trace says what our samples of threads would."""
    return bool({layout.STARVED, layout.LOADING} & rank.main.spans.keys())


def in_spans(table: SpanTable | None, start_ns: Int, end_ns: Int, **columns: Int | None) -> Float:
    """Return float64[k, n]: how much of each of k amounts of spans lies in each of n intervals.

    An amount is spread evenly over its span; None = the span's own length.
    """
    out = np.zeros((len(columns), len(start_ns)))
    if table is None or not table.start_ns.size or not len(start_ns):
        return out
    order = np.argsort(table.start_ns, kind="stable")
    spans = table.start_ns[order], table.end_ns[order]
    length = np.maximum(spans[1] - spans[0], 1)
    parts = overlaps((start_ns, end_ns), spans)
    part = (parts.end_ns - parts.start_ns) / length[parts.interval]
    for row, amount in enumerate(columns.values()):
        whole = length if amount is None else np.minimum(np.maximum(amount[order], 0), length)
        out[row] = np.bincount(parts.piece, part * whole[parts.interval], minlength=len(start_ns))
    return out


def loading_shares(rank: Rank, start_ns: Int, end_ns: Int) -> dict[str, Float] | None:
    """Return float64[n] per word: which part of each interval the loading thread read or computed.

    `local`, `network`, `object`: reads of files that lie there; `elsewhere`: reads of which it is
    not known; `computing`. None when no trace says so. Shares of a row sum to at most 1.
    """
    table = rank.main.spans.get(layout.LOADING)
    if table is None:
        return None
    reads = {
        name: np.where(table.d == code, table.a, 0)
        for name, code in (("local", LOCAL), ("network", NETWORK), ("object", OBJECT))
    }
    reads["elsewhere"] = np.where(np.isin(table.d, (LOCAL, NETWORK, OBJECT)), 0, table.a)
    amounts = in_spans(table, start_ns, end_ns, **reads, computing=table.b)
    amounts /= np.maximum(end_ns - start_ns, 1)
    amounts /= np.maximum(amounts.sum(axis=0), 1.0)
    return dict(zip((*reads, "computing"), amounts))
