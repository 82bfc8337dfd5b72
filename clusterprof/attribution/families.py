"""Causes at the level of a family: said when the leaf cannot be told."""

from __future__ import annotations

from clusterprof.detectors.peers import PEER_CAUSES
from clusterprof.detectors.registry import DETECTORS
from clusterprof.findings import Cause

FAMILIES: dict[str, Cause] = {
    "storage": Cause(
        "storage",
        "storage",
        "The data path waits for storage",
        "Record with the probe (--inject auto) to learn whether a local disk or a mount is behind",
    ),
    "cpu": Cause(
        "cpu",
        "cpu",
        "The data path waits for the CPU",
        "Record with the probe (--inject auto) to learn what the loading threads lack",
    ),
    "input": Cause(
        "input", "input", "The step waits for its data", "Record a minute with clusterprof"
    ),
    "h2d": Cause("h2d", "h2d", "Copies to the GPU hold the step up", "Record with the probe"),
    "launch": Cause("launch", "launch", "The host launches too slowly", "Record with the probe"),
    "checkpoint": Cause("checkpoint", "checkpoint", "Training stands still for a checkpoint", ""),
    "eval": Cause("eval", "eval", "Evaluation or logging holds the step up", ""),
    "fail": Cause(
        "fail", "fail", "Training failed or stood still", "Look at the rank that is named"
    ),
    "startup": Cause("startup", "startup", "The job is starting up", ""),
    "device": Cause("device", "device", "The GPU is slowed", "Check clocks and power of the node"),
    "network": Cause("network", "network", "Ranks wait for the network", "Look at its links"),
    "synchronization": Cause(
        "synchronization", "synchronization", "Ranks wait for each other", "Record on every node"
    ),
}
CAUSES: dict[str, Cause] = {
    **FAMILIES,
    **{cause.id: cause for cause in PEER_CAUSES},
    **{one.cause.id: one.cause for one in DETECTORS},
}
