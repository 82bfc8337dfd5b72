"""Define the catalog of signals: the names that collectors write and detectors read.

A signal is one kind of number about one device of a node ("disk.read_bytes_total" of
"vda"). Its name carries its unit; `_total` marks a counter, which is an integral: the
difference of two readings is exact for the time between them, and nothing is known
about an instant within it. A detector may not read a signal that is not listed here.
A collector whose signals no detector reads may declare them in its own file, by
`register_signal`.
"""

from __future__ import annotations

# The order of these imports is the order of the catalog.
# ruff: noqa: F403, I001
from clusterprof.signals.signal import (
    BY_NAME as BY_NAME,
    Signal as Signal,
    register_signal as register_signal,
)
from clusterprof.signals.host import *
from clusterprof.signals.io import *
from clusterprof.signals.gpu import *

CATALOG: tuple[Signal, ...] = tuple(BY_NAME.values())
"""The signals that detectors may read; BY_NAME also has those of collectors once imported."""
