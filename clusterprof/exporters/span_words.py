"""What spans are called outside, and what their four values mean (`clusterprof.probe.layout`)."""

from __future__ import annotations

from collections.abc import Mapping

from clusterprof.probe import layout
from clusterprof.renderers.text_safety import safe_text
from clusterprof.timeline.operation_names import OPERATIONS

_FORMS = {layout.ISSUE: " (issue)", layout.WAIT: " (wait)"}

VALUES: Mapping[int, tuple[str, str, str, str]] = {
    layout.DATA_WAIT: ("batch", "worker_pid", "workers", ""),
    layout.FETCH: ("items", "user_cpu_ns", "system_cpu_ns", "read_bytes"),
    layout.STEP: ("step", "", "samples", "tokens"),
    layout.H2D: ("bytes", "non_blocking", "", ""),
    layout.CHECKPOINT: ("bytes", "", "", ""),
    layout.GC: ("generation", "collected", "", ""),
    layout.EXPOSED: ("sequence", "device_ns", "", ""),
    layout.EXPOSED_COLLECTIVE: ("sequence", "device_ns", "", ""),
    layout.COLLECTIVE: ("group", "number", "bytes", ""),
    layout.COMPILE: ("compiled_before", "", "", ""),
    layout.LOADER_START: ("workers", "pin_memory", "prefetch_factor", "persistent_workers"),
    layout.WORKER_START: ("worker", "workers", "", ""),
    layout.SYNC: ("waited_ns", "times", "", ""),
    layout.ALLOCATOR: ("retries", "mallocs", "frees", "out_of_memory"),
}
"""Kind -> what a, b, c and d are; "" = nothing to show. -1 is not known, and left out."""
UNKNOWN_OF = {layout.SYNC: layout.WHOLE_NS}


def span_name(kind: int, d: int, names: Mapping[int, str]) -> str:
    """Return what a span is called: its operation, its phase, or the user's own name for it."""
    if kind == layout.COLLECTIVE and d >= 0:
        operation = OPERATIONS.get(d & layout.OPERATION_MASK, "collective")
        return operation + _FORMS.get(d >> layout.FORM_SHIFT & layout.FORM_MASK, "")
    if kind in layout.KIND_NAMES:
        return layout.KIND_NAMES[kind]
    return safe_text(names.get(kind, f"kind {kind}"), 100)


def peer_of(kind: int, d: int) -> int | None:
    """Return the other rank of a send or receive; None for everything else."""
    if kind != layout.COLLECTIVE or d < 0:
        return None
    peer = d >> layout.PEER_SHIFT & layout.PEER_MASK
    return peer - 1 if peer else None
