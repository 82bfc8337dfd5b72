"""torch.cuda: which device this process uses, and how long that device stood still for a wait.

Only once the job itself has initialised CUDA; nothing here ever initialises it or waits for it.

The exposed part of a host wait: an event recorded just before the wait completes when the device
has finished all work queued so far; one recorded just after it completes at once if the device had
run dry. The time between the two, read later with a query that does not block, is how long the
stream stood still for the wait: near zero when queued work hid it (docs/design.md, section 9).
"""

import sys
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple

from .. import layout, registration, ring
from . import allocator, h2d, sync

PENDING = 64  # waits whose events the device has not reached yet; beyond that none are measured
COLLECTIVES = PENDING // 2  # of them at most collectives: data waits always find room

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
_seen = False
_pool: Dict[int, List[Tuple[Any, Any]]] = {}  # by device: an event belongs to one for ever
_pending: Deque[Tuple[int, Tuple[Any, Any], int, int, int, int]] = deque()

Mark = Optional[Tuple[int, Tuple[Any, Any]]]


def _ready() -> Any:
    """Return torch.cuda if the job has initialised it in this process, else None."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return None
    if not _seen:
        _first_sight(cuda)
    return cuda


def look() -> None:
    """Read what events have completed; called now and then by other hooks."""
    cuda = _ready()
    if cuda is None or cuda.is_current_stream_capturing():
        return
    if _pending:
        _collect()
    allocator.look(cuda)


def before_wait(at_most: int = PENDING, default_stream: bool = False) -> Mark:
    """Record the first event of a wait, or return None when it cannot be measured.

    at_most: how many waits may be pending. default_stream: measure on no other; a collective that
    a framework enqueues on a stream of its own holds up nothing there but itself.
    """
    cuda = _ready()
    # A query or an event would break the graph that is being captured.
    if cuda is None or not _wanted() or cuda.is_current_stream_capturing():
        return None
    _collect()
    if len(_pending) >= at_most:
        return None
    stream = cuda.current_stream()
    if default_stream and stream.cuda_stream:
        return None
    device = stream.device_index
    free = _pool.setdefault(device, [])
    events = free.pop() if free else (_event(cuda), _event(cuda))
    events[0].record(stream)
    return device, events


def after_wait(
    mark: Mark, sequence: int, start_ns: int, end_ns: int, kind: int = layout.EXPOSED
) -> None:
    """Record the second event, on the stream that the job now uses."""
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


def _collect() -> None:
    while _pending and _pending[0][1][1].query():
        device, events, sequence, start_ns, end_ns, kind = _pending.popleft()
        exposed_ns = round(events[0].elapsed_time(events[1]) * 1e6)
        ring.emit(kind, start_ns, end_ns, sequence, max(0, exposed_ns))
        _pool[device].append(events)


def _event(cuda: Any) -> Any:
    return cuda.Event(enable_timing=True)


def _wanted() -> bool:
    return bool(_probe.config.get("gpu_events"))  # type: ignore[attr-defined]


def _first_sight(cuda: Any) -> None:
    global _seen
    _seen = True
    uuid = getattr(cuda.get_device_properties(cuda.current_device()), "uuid", None)
    if uuid is not None:
        name = str(uuid)
        registration.set_device(name if name.startswith(("GPU-", "MIG-")) else "GPU-" + name)
    h2d.install(sys.modules["torch"])
    sync.install(sys.modules["torch"])


def _forget() -> None:
    global _seen
    _seen = False
    _pool.clear()
    _pending.clear()


ring.after_fork.append(_forget)
