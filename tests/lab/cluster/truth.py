"""What a job's own stopwatches say: who waited, for whom, and what was the network's.

The nodes share CLOCK_MONOTONIC, so arrivals can be compared directly, which an analysis of a real
cluster cannot do. A rank that came last did not do so by its own fault if it could go on last
after the step before (latency): compare what each did in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SUMS = ("total_ns", "data_wait_ns", "send_recv_ns", "compute_ns", "reduce_wait_ns", "delayed_ns")


def truth(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return sums per rank, in ns: its own, the waits for a later rank, the waits it caused.

    In a step the rank whose last gradient came last kept every other waiting for the difference;
    what all waited after that is the transfer.
    """
    rows = [
        {
            "rank": one["rank"],
            "host": one["host"],
            **{name: one[name] for name in _SUMS},
            "waited_for_others_ns": 0,
            "kept_others_waiting_ns": 0,
            "transfer_ns": 0,
            "last_times": 0,
        }
        for one in ranks
    ]
    arrivals = [one["arrived_us"] for one in ranks]
    for step, arrived in enumerate(zip(*arrivals, strict=True)):
        latest = max(arrived)
        last = rows[arrived.index(latest)]
        last["last_times"] += 1
        for row, one, at in zip(rows, ranks, arrived):
            row["waited_for_others_ns"] += (latest - at) * 1000
            row["transfer_ns"] += (one["left_us"][step] - latest) * 1000
            last["kept_others_waiting_ns"] += (latest - at) * 1000
    return {"steps": ranks[0]["steps"], "ranks": rows}


def table(found: dict[str, Any]) -> str:
    """Return the truth as a table, in milliseconds per step."""
    steps = found["steps"]
    names = [*_SUMS, "waited_for_others_ns", "transfer_ns", "kept_others_waiting_ns"]
    titles = [
        *("step", "data", "send/recv", "compute", "reduce", "delayed"),
        *("for others", "transfer", "caused"),
    ]
    lines = ["  rank host   " + "".join(f"{title:>11}" for title in titles) + "   came last"]
    for row in found["ranks"]:
        cells = "".join(f"{row[name] / steps / 1e6:>11.1f}" for name in names)
        lines.append(f"  {row['rank']:<4} {row['host']:<6} {cells}{row['last_times']:>9} x")
    return "\n".join(lines)
