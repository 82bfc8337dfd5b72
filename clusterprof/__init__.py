"""clusterprof: says why the GPUs of a training cluster idle."""

from __future__ import annotations

__version__ = "0.1.0"
