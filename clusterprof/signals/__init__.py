"""The catalogue of signals: the vocabulary that collectors write and detectors read.

A signal is one kind of number about one device of a node ("disk.read_bytes_total" of "vda").
Its name carries its unit; `_total` marks a counter, which is an integral: the difference of two
readings is exact for the time between them, and nothing is known of a point inside.
A collector may not write, and a detector may not read, what is not listed here.
"""

from __future__ import annotations

# The order of these imports is the order of the catalogue.
# ruff: noqa: F403, I001
from clusterprof.signals.made import DECLARED, Signal as Signal
from clusterprof.signals.host import *
from clusterprof.signals.storage import *
from clusterprof.signals.network import *
from clusterprof.signals.gpu import *
from clusterprof.signals.accelerators import *
from clusterprof.signals.own import *

CATALOGUE: tuple[Signal, ...] = tuple(DECLARED)
BY_NAME: dict[str, Signal] = {signal.name: signal for signal in CATALOGUE}
