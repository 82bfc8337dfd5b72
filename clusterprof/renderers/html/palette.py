"""The colour of a cause: its family's, in a tone of its own, the same in every report.

The colours themselves are custom properties of `assets/colors.css`, one set for each theme, and
every family has a pattern too (`assets/paint.js`): no reader has to tell colours apart.
"""

from __future__ import annotations

from clusterprof.findings import UNATTRIBUTED
from clusterprof.history import WAITING

FAMILIES = (
    "storage", "cpu", "input", "h2d", "launch", "network", "synchronization", "checkpoint", "eval",
    "startup", "device", "fail", "unattributed", "waiting",
)  # fmt: skip
"""Those with a colour; any other has that of "other"."""
_TONES = 4
# (family, tone) by cause; the tones of a family tell its causes apart
_CAUSES: dict[str, tuple[str, ...]] = {
    "storage": (
        "storage-local", "storage-remote", "storage-object", "storage-metadata",
        "storage-contention", "storage-cold-cache", "storage-client-queue",
    ),
    "cpu": (
        "cpu-preprocess", "cpu-contention", "cpu-loader-config", "cpu-throttled",
        "cpu-gil", "cpu-gc", "cpu-memory",
    ),
    "input": ("input-wait",),
    "h2d": ("h2d-copy", "h2d-sync"),
    "launch": ("launch-bound", "launch-recompile", "launch-alloc"),
    "network": ("net-transfer", "net-link", "net-congestion", "net-path"),
    "synchronization": (
        "sync-imbalance", "sync-slow-compute", "sync-bubble", "sync-unknown-peer",
    ),
    "checkpoint": ("checkpoint",),
    "eval": ("eval-host",),
    "startup": ("startup",),
    "device": ("device-throttled",),
    "fail": ("fail-hang", "fail-restart"),
    "unattributed": (UNATTRIBUTED,),
    "waiting": (WAITING,),
}  # fmt: skip
KNOWN: dict[str, tuple[str, int]] = {
    cause: (family, at % _TONES)
    for family, causes in _CAUSES.items()
    for at, cause in enumerate(causes)
}


def colour(cause: str, family: str = "") -> tuple[str, int]:
    """Return (family, tone) for a cause; "other" where neither it nor its family is known."""
    if cause in KNOWN:
        return KNOWN[cause]
    return (family if family in FAMILIES else "other", 0)


def css_class(cause: str, family: str = "") -> str:
    """Return the classes that give an element the colour of a cause as `--k`."""
    name, tone = colour(cause, family)
    return f"k-{name} tone{tone}"
