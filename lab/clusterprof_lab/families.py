"""The causes a truth may name, each with its top-level group: the taxonomy the corpus is scored in.

The taxonomy belongs to the corpus, not to a tool: `clusterprof` need not know every cause in it.
"""

from __future__ import annotations

from collections.abc import Mapping

UNATTRIBUTED = "unattributed"

FAMILIES = (
    "storage",
    "cpu",
    "network",
    "synchronization",
    "h2d",
    "launch",
    "checkpoint",
    "startup",
    "device",
    "eval",
    "fail",
    "unallocated",
    UNATTRIBUTED,
)

FAMILY_OF: Mapping[str, str] = {
    "storage-local": "storage",
    "storage-contention": "storage",
    "storage-remote": "storage",
    "storage-client-queue": "storage",
    "storage-metadata": "storage",
    "storage-object": "storage",
    "storage-cold-cache": "storage",
    "cpu-preprocess": "cpu",
    "cpu-contention": "cpu",
    "cpu-throttled": "cpu",
    "cpu-loader-config": "cpu",
    "cpu-memory": "cpu",
    "cpu-gc": "cpu",
    "cpu-gil": "cpu",
    "h2d-copy": "h2d",
    "h2d-sync": "h2d",
    "h2d-copy-bound": "h2d",
    "launch-bound": "launch",
    "launch-alloc": "launch",
    "launch-recompile": "launch",
    "memory-free": "launch",
    "net-transfer": "network",
    "net-congestion": "network",
    "net-link": "network",
    "net-path": "network",
    "sync-imbalance": "synchronization",
    "sync-slow-compute": "synchronization",
    "sync-bubble": "synchronization",
    "sync-unknown-peer": "synchronization",
    "checkpoint": "checkpoint",
    "startup": "startup",
    "warm-up": "startup",
    "device-throttled": "device",
    "eval-host": "eval",
    "fail-restart": "fail",
    "fail-hang": "fail",
}
"""Leaf -> family, in kebab case; sections P1 to P11 of the taxonomy."""
