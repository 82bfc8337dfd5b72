"""The families of causes: name, title, and how the page paints them.

A cause belongs to one family and takes its color. A new family is one entry here: the
page's style sheet, its patterns and the analysis derive from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.report.history import WAITING_FOR_RANKS
from clusterprof.report.model import UNATTRIBUTED, HiddenCost


@dataclass(frozen=True, slots=True)
class Family:
    """A group of causes; a report names it when the cause itself cannot be decided."""

    name: str
    """Id of the family as a cause, and of its color on the page."""
    title: str
    """One line that a report can print as a headline, without a full stop."""
    advice: str
    """The first thing to do about it; "" = nothing in general."""
    light: str
    """Color in the light theme, "#rrggbb". Hues of neighbors in a stack stay distinct for
    color-blind readers.

    Source: Okabe and Ito, "Color Universal Design" (2008); Tol, "Colour Schemes" (2021).
    """
    dark: str
    """Color in the dark theme, "#rrggbb"."""
    strokes: str = ""
    """Pattern over the color: an SVG path on a tile of 8 by 8; "" = solid."""
    tile: str = ""
    """The pattern in pixels: 8 rows of two hexadecimal digits, lowest bit left; "" = solid."""
    cause_prefix: str = ""
    """Prefix of its cause ids, where it differs from the name."""
    hidden_cost: HiddenCost = ""
    """As in `Cause.hidden_cost`, for time claimed for the family without a cause."""


FAMILIES: tuple[Family, ...] = (
    Family(
        "storage",
        "The data path waits for storage",
        "Record with the probe (--inject auto) to learn whether a local disk or a mount is slow",
        light="#0067a5",
        dark="#3d9be0",
        hidden_cost="batch",
    ),
    Family(
        "cpu",
        "The CPU side delays the step: data preparation, contention or limits",
        "Record with the probe (--inject auto) to learn which threads wait, and what for",
        light="#e08a00",
        dark="#f0a534",
        strokes="M-2,10L10,-2M-2,2L2,-2M6,10L10,6",
        tile="0381c06030180c06",
        hidden_cost="batch",
    ),
    Family(
        "input",
        "The step waits for its data",
        "Record a minute with clusterprof",
        light="#00a0a0",
        dark="#4cc9c9",
        strokes="M0,0h1M4,0h1M2,2h1M6,2h1M0,4h1M4,4h1M2,6h1M6,6h1",
        tile="1100440011004400",
    ),
    Family(
        "h2d",
        "Copies between host and GPU, or waits for the GPU, delay the step",
        "Record with the probe",
        light="#4fb3e8",
        dark="#86d0f5",
        strokes="M0,2H8M0,6H8",
        tile="0000ff000000ff00",
    ),
    Family(
        "launch",
        "The host launches too slowly",
        "Record with the probe",
        light="#d0490b",
        dark="#f0764a",
        strokes="M2,0V8M6,0V8",
        tile="4444444444444444",
    ),
    Family(
        "checkpoint",
        "Training stops for checkpoints",
        "",
        light="#4b3fa8",
        dark="#8f86ec",
        strokes="M0,4H8M4,0V8",
        tile="10101010ff101010",
    ),
    Family(
        "eval",
        "Training pauses: the host evaluates, logs, sleeps or waits",
        "",
        light="#8f8f2e",
        dark="#c2c25e",
        strokes="M4,4h1",
        tile="0000000010000000",
    ),
    Family(
        "fail",
        "Training failed or hung",
        "Check the rank named above",
        light="#86234f",
        dark="#d46a9a",
        strokes="M0,1H8M0,5H8M2,0V8",
        tile="04ff040404ff0404",
    ),
    Family(
        "startup",
        "The job is starting up",
        "",
        light="#2f7d3b",
        dark="#62b970",
        strokes="M0,4H8",
        tile="00000000ff000000",
    ),
    Family(
        "device",
        "The GPU is slow",
        "Check clocks and power of the node",
        light="#7d4a1a",
        dark="#c08a55",
        strokes="M0,0L8,8M8,0L0,8",
        tile="8142241818244281",
    ),
    Family(
        "network",
        "Ranks wait for the network",
        "Check its links",
        light="#008a66",
        dark="#2fbf93",
        strokes="M1,2h2M5,6h2",
        tile="0000060000006000",
        cause_prefix="net-",
    ),
    Family(
        "synchronization",
        "Ranks wait for each other",
        "Record on every node",
        light="#c46a9b",
        dark="#e08fbb",
        strokes="M-2,-2L10,10M-2,6L2,10M6,-2L10,2",
        tile="03060c183060c081",
        cause_prefix="sync-",
    ),
)
"""Every family, in the order in which they are presented."""
BUCKETS: tuple[Family, ...] = (
    Family("unattributed", "", "", light="#8d949e", dark="#757d88"),
    Family(
        "waiting",
        "",
        "",
        light="#a79fc9",
        dark="#8b82b8",
        strokes="M-2,6L6,-2M2,10L10,2",
        tile="0180402010080402",
    ),
)
"""What is painted like a family and is none: time without a cause, time in other ranks."""
BUCKET_OF = {UNATTRIBUTED: "unattributed", WAITING_FOR_RANKS: "waiting"}
"""Cause id in a chart -> entry of BUCKETS."""


def get_cause_prefix(family: str) -> str:
    """Return the prefix of the ids of a family's causes."""
    prefixes = {known.name: known.cause_prefix for known in FAMILIES}
    return prefixes.get(family) or f"{family}-"
