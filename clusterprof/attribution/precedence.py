"""The order in which causes are asked, and under which names time may be claimed."""

from __future__ import annotations

from clusterprof.attribution.cooccurrence import BY_FAMILY

# P1 to P12 of the taxonomy: phase beats resource, storage is asked before the CPU.
PRECEDENCE = (
    "startup",
    "checkpoint",
    "eval-host",
    "device-throttled",
    "h2d-copy",
    "h2d-sync",
    "storage-local",
    "storage-contention",
    "storage-remote",
    "storage-client-queue",
    "storage-metadata",
    "storage-object",
    "storage-cold-cache",
    "cpu-preprocess",
    "cpu-throttled",
    "cpu-contention",
    "cpu-loader-config",
    "cpu-memory",
    "cpu-gc",
    "cpu-gil",
    "input-wait",
    "launch-recompile",
    "launch-alloc",
    "launch-bound",
)
STARTUP = "startup"
SPENT_ON = (*PRECEDENCE, *BY_FAMILY)
"""Causes under which the time of a rank may be claimed."""
