"""What operations between ranks are called, in the words of torch.distributed."""

from __future__ import annotations

from clusterprof.probe import layout

OPERATIONS = {
    layout.ALL_REDUCE: "all_reduce",
    layout.ALL_GATHER: "all_gather",
    layout.REDUCE_SCATTER: "reduce_scatter",
    layout.BROADCAST: "broadcast",
    layout.REDUCE: "reduce",
    layout.GATHER: "gather",
    layout.SCATTER: "scatter",
    layout.ALL_TO_ALL: "all_to_all",
    layout.BARRIER: "barrier",
    layout.SEND: "send",
    layout.RECV: "recv",
    layout.GRADIENTS: "gradients",
    layout.OTHER_OPERATION: "collective",
}
"""By the number that spans carry (`layout.OPERATION_MASK`)."""
