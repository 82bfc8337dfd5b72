"""The device of this process, and how long its stream was idle during host waits.

The device is that of torch.cuda, of torch.xpu, or of a backend that registers its own module with
PyTorch, such as torch.npu. Active only after the job itself has initialized it; nothing here
initializes it or blocks. What a module lacks is not measured.

The exposed part of a host wait: an event recorded just before the wait completes when
the device has finished all work queued so far; one recorded just after it completes at
once if the device queue was empty. The time between the two, read later by a
non-blocking query, is how long the stream was idle because of the wait: near zero when
queued work hid it (docs/design/attribution.md).
"""

import sys
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

from .. import is_from_signal_handler, layout, ring
from . import device_sync, h2d, torch_state

MAX_PENDING = 64  # waits whose events the device has not reached; beyond that no wait is measured
MAX_PENDING_COLLECTIVES = (
    MAX_PENDING // 2
)  # limit for collectives, so that data waits always find space

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
_UNSUPPORTED = (AttributeError, TypeError, RuntimeError)
"""What a device module raises for a function that its device does not have."""

accelerator: Any = None
"""The module of the device that the job uses in this process; None = none is known yet."""
_is_cuda = False
_has_events = False
_is_capturing: Callable[[], bool]
_default_streams: Dict[int, Any] = {}  # by device, of modules other than torch.cuda
_pool: Dict[int, List[Tuple[Any, Any]]] = {}  # by device: an event stays with its device
_pending: Deque[Tuple[int, Tuple[Any, Any], int, int, int, int]] = deque()

WaitMark = Optional[Tuple[int, Tuple[Any, Any]]]


def _find_accelerator() -> Any:
    """Return the device module that the job has initialized in this process, else None."""
    module = accelerator or sys.modules.get("torch.cuda")
    if module is not None and module.is_initialized():
        if accelerator is None:
            _use_accelerator(module, "cuda")
        return module
    return _find_other_accelerator() if accelerator is None else None


def _find_other_accelerator() -> Any:
    """Return torch.xpu or the module of an out-of-tree backend, if the job has initialized it.

    Modules are taken from the names that torch already has: to ask it for others could import them.
    """
    torch = sys.modules.get("torch")
    get_backend_name = getattr(getattr(torch, "_C", None), "_get_privateuse1_backend_name", None)
    if get_backend_name is None:
        return None
    for name in ("xpu", get_backend_name()):
        module = torch.__dict__.get(name)
        is_initialized = getattr(module, "is_initialized", None)
        try:
            if is_initialized is not None and is_initialized():
                _use_accelerator(module, name)
                return module
        except _UNSUPPORTED as error:
            _stop_measuring(error)
    return None


def collect_finished_waits() -> None:
    """Record the waits whose events have completed; called occasionally by other hooks."""
    module = _find_accelerator()
    if module is None or _is_capturing():
        return
    if _pending:
        try:
            _collect_events()
        except _UNSUPPORTED as error:
            _stop_measuring(error)
    torch_state.record_allocator_counters(module)


def begin_wait(max_pending: int = MAX_PENDING, default_stream: bool = False) -> WaitMark:
    """Record the first event of a wait; None when the wait cannot be measured.

    max_pending: how many waits may be pending. default_stream: measure only on the default
    stream; a collective that a framework enqueues on a side stream delays nothing but that
    stream.
    """
    module = _find_accelerator()
    # A query or an event would break a graph capture.
    if module is None or not _has_events or not _is_enabled() or _is_capturing():
        return None
    try:
        _collect_events()
        if len(_pending) >= max_pending:
            return None
        stream = module.current_stream()
        device = stream.device_index
        if not _is_cuda:
            if not _is_measured_stream(stream, device, default_stream):
                return None
        elif default_stream and stream.cuda_stream:
            return None
        free = _pool.setdefault(device, [])
        events = free.pop() if free else (_make_event(module), _make_event(module))
        events[0].record(stream)
    except _UNSUPPORTED as error:
        _stop_measuring(error)
        return None
    return device, events


def _is_measured_stream(stream: Any, device: int, default_stream: bool) -> bool:
    """Return whether a wait on this stream is measured, for modules other than torch.cuda.

    torch.xpu cannot tell its default stream: there it is that of the first wait for data.
    """
    default = _default_streams.get(device)
    if default is None:
        find_default = getattr(accelerator, "default_stream", None)
        if find_default is None and default_stream:
            return False
        default = _default_streams[device] = stream if find_default is None else find_default()
    return not default_stream or bool(stream == default)


def finish_wait(
    mark: WaitMark, sequence: int, start_ns: int, end_ns: int, kind: int = layout.EXPOSED
) -> None:
    """Record the second event of a wait, on the current stream.

    sequence: number of the wait's span; start_ns, end_ns: its times.
    kind: kind of the exposed span.
    """
    if mark is None or not _has_events:
        return
    device, events = mark
    try:
        stream = accelerator.current_stream()
        if stream.device_index != device or _is_capturing() or not sequence:
            _pool.setdefault(device, []).append(events)
            return
        events[1].record(stream)
    except _UNSUPPORTED as error:
        _stop_measuring(error)
        return
    _pending.append((device, events, sequence, start_ns, end_ns, kind))


def _collect_events() -> None:
    while _pending and _pending[0][1][1].query():
        device, events, sequence, start_ns, end_ns, kind = _pending.popleft()
        exposed_ns = round(events[0].elapsed_time(events[1]) * 1e6)
        ring.emit(kind, start_ns, end_ns, sequence, max(0, exposed_ns))
        _pool.setdefault(device, []).append(events)


def _make_event(module: Any) -> Any:
    return module.Event(enable_timing=True)


def _stop_measuring(error: BaseException) -> None:
    """Measure no more waits, since the events of this device fail.

    Raises: the error, when it came from a signal handler of the job.
    """
    global _has_events
    if is_from_signal_handler(error):
        raise error
    _has_events = False
    _pool.clear()
    _pending.clear()


def _is_enabled() -> bool:
    return bool(_probe.config.get("gpu_events"))  # type: ignore[attr-defined]


def _is_never_capturing() -> bool:
    return False


def _use_accelerator(module: Any, name: str) -> None:
    """Install the hooks of the device that the job uses, which is called `name` in PyTorch."""
    global accelerator, _is_cuda, _has_events, _is_capturing
    accelerator, _is_cuda = module, name == "cuda"
    _has_events = hasattr(module, "current_stream") and hasattr(module, "Event")
    _is_capturing = getattr(module, "is_current_stream_capturing", _is_never_capturing)
    if _is_cuda:
        uuid = getattr(module.get_device_properties(module.current_device()), "uuid", None)
        if uuid is not None:
            text = str(uuid)
            ring.set_device(text if text.startswith(("GPU-", "MIG-")) else "GPU-" + text)
    h2d.install(sys.modules["torch"], name)
    device_sync.install(sys.modules["torch"], name)


def _clear_accelerator() -> None:
    global accelerator, _has_events
    accelerator, _has_events = None, False
    _default_streams.clear()
    _pool.clear()
    _pending.clear()


ring.after_fork.append(_clear_accelerator)
