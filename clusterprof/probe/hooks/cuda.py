"""torch.cuda: the device of this process, and how long its stream was idle during host waits.

Active only after the job itself has initialized CUDA; nothing here initializes it or
blocks.

The exposed part of a host wait: an event recorded just before the wait completes when
the device has finished all work queued so far; one recorded just after it completes at
once if the device queue was empty. The time between the two, read later by a
non-blocking query, is how long the stream was idle because of the wait: near zero when
queued work hid it (docs/design/attribution.md).
"""

import sys
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple

from .. import layout, ring
from . import allocator, h2d, sync

MAX_PENDING = 64  # waits whose events the device has not reached; beyond that no wait is measured
MAX_PENDING_COLLECTIVES = (
    MAX_PENDING // 2
)  # limit for collectives, so that data waits always find space

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
_is_initialized = False
_pool: Dict[int, List[Tuple[Any, Any]]] = {}  # by device: an event stays with its device
_pending: Deque[Tuple[int, Tuple[Any, Any], int, int, int, int]] = deque()

WaitMark = Optional[Tuple[int, Tuple[Any, Any]]]


def _get_initialized_cuda() -> Any:
    """Return torch.cuda if the job has initialised it in this process, else None."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return None
    if not _is_initialized:
        _install_device_hooks(cuda)
    return cuda


def collect_finished_waits() -> None:
    """Record the waits whose events have completed; called occasionally by other hooks."""
    cuda = _get_initialized_cuda()
    if cuda is None or cuda.is_current_stream_capturing():
        return
    if _pending:
        _collect_events()
    allocator.record_allocator_counters(cuda)


def begin_wait(max_pending: int = MAX_PENDING, default_stream: bool = False) -> WaitMark:
    """Record the first event of a wait; None when the wait cannot be measured.

    max_pending: how many waits may be pending. default_stream: measure only on the default
    stream; a collective that a framework enqueues on a side stream delays nothing but that
    stream.
    """
    cuda = _get_initialized_cuda()
    # A query or an event would break a graph capture.
    if cuda is None or not _is_enabled() or cuda.is_current_stream_capturing():
        return None
    _collect_events()
    if len(_pending) >= max_pending:
        return None
    stream = cuda.current_stream()
    if default_stream and stream.cuda_stream:
        return None
    device = stream.device_index
    free = _pool.setdefault(device, [])
    events = free.pop() if free else (_make_event(cuda), _make_event(cuda))
    events[0].record(stream)
    return device, events


def finish_wait(
    mark: WaitMark, sequence: int, start_ns: int, end_ns: int, kind: int = layout.EXPOSED
) -> None:
    """Record the second event of a wait, on the current stream.

    sequence: number of the wait's span; start_ns, end_ns: its times.
    kind: kind of the exposed span.
    """
    if mark is None:
        return
    device, events = mark
    cuda = sys.modules["torch.cuda"]
    stream = cuda.current_stream()
    if stream.device_index != device or cuda.is_current_stream_capturing() or not sequence:
        _pool[device].append(events)
        return
    events[1].record(stream)
    _pending.append((device, events, sequence, start_ns, end_ns, kind))


def _collect_events() -> None:
    while _pending and _pending[0][1][1].query():
        device, events, sequence, start_ns, end_ns, kind = _pending.popleft()
        exposed_ns = round(events[0].elapsed_time(events[1]) * 1e6)
        ring.emit(kind, start_ns, end_ns, sequence, max(0, exposed_ns))
        _pool[device].append(events)


def _make_event(cuda: Any) -> Any:
    return cuda.Event(enable_timing=True)


def _is_enabled() -> bool:
    return bool(_probe.config.get("gpu_events"))  # type: ignore[attr-defined]


def _install_device_hooks(cuda: Any) -> None:
    global _is_initialized
    _is_initialized = True
    uuid = getattr(cuda.get_device_properties(cuda.current_device()), "uuid", None)
    if uuid is not None:
        name = str(uuid)
        ring.set_device(name if name.startswith(("GPU-", "MIG-")) else "GPU-" + name)
    h2d.install(sys.modules["torch"])
    sync.install(sys.modules["torch"])


def _clear_cuda_state() -> None:
    global _is_initialized
    _is_initialized = False
    _pool.clear()
    _pending.clear()


ring.after_fork.append(_clear_cuda_state)
