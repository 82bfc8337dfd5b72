"""The probe inside the training process: records spans of the job and must never disturb it.

Standard library only, Python 3.8 syntax, no import of clusterprof: `record` copies this
folder under the name `_clusterprof_probe` to where the job can import it
(docs/design/recording-format.md). It starts one thread (`interpreter_lock.py`), no socket
and no process, and prints nothing.
Any error in here switches the probe off and stays invisible to the job.

At the start of Python only the import hook is loaded, which waits for torch. The first
record opens the ring.
"""

from _thread import allocate_lock, get_ident, get_native_id, start_new_thread

TYPE_CHECKING = False  # importing typing would cost more than the rest of this module
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Dict, Optional, Tuple

on = True
"""False once the probe has switched itself off; hooks then only call what they wrap."""

# As they are before a library such as gevent replaces them.
make_lock, start_thread = allocate_lock, start_new_thread

run_dir = ""
config: "Dict[str, Any]" = {}
main_thread: "Tuple[int, int]" = (0, 0)
"""Main thread of the process: number in Python, number in the kernel."""
_ring: "Any" = None
_annotations: "Any" = None


def start(directory: str, values: "Dict[str, Any]") -> None:
    """Start waiting for the modules that have hooks. Called once, by the bootstrap."""
    global run_dir, config, main_thread
    run_dir = directory
    config = values
    main_thread = get_ident(), get_native_id()
    from . import import_hooks
    from .hooks import HOOKS

    import_hooks.watch_imports(HOOKS)


def prepare() -> None:
    """Load the rest of the probe early, because a job that imports clusterprof will need it."""
    try:
        if on:
            load()
    except BaseException as error:
        handle_error(error)


def load() -> "Any":
    """Load the rest of the probe and return its ring module.

    Everything is imported at once, on first use: a child forked while another thread
    imports would wait for that import forever.
    """
    global _ring, _annotations
    if _ring is None:
        from . import annotations, interpreter_lock, ring  # noqa: F401 - joins the ring by itself
        from .hooks import gc_pauses  # noqa: F401 - joins the ring by itself

        _annotations, _ring = annotations, ring
    return _ring


def step(number: int = -1) -> None:
    """Mark the end of an optimizer step; called by `clusterprof.step()`."""
    try:
        if on:
            load()
            _annotations.mark_step(number)
    except BaseException as error:
        handle_error(error)


def span(name: str) -> "Any":
    """Return a context manager that records `name`, or None; called by `clusterprof.span()`."""
    try:
        if on:
            load()
            return _annotations.make_span(name)
    except BaseException as error:
        handle_error(error)
    return None


def emit(kind: int, start_ns: int, end_ns: int, *values: int) -> int:
    """Record one span of any kind listed in docs/design/recording-format.md.

    For adapters and tests; times in ns. Returns its sequence number, 0 when nothing was
    recorded.
    """
    try:
        if on:
            return load().emit(kind, start_ns, end_ns, *values)
    except BaseException as error:
        handle_error(error)
    return 0


def handle_error(error: BaseException) -> None:
    """Switch the probe off after its own error; re-raise an error that belongs to the job.

    An exception that a signal handler of the job raised while probe code was running
    (Ctrl-C, a timeout by SIGALRM) belongs to the job.
    Raises: the given exception, when it came from a signal handler.
    """
    global on
    try:
        from_job = is_from_signal_handler(error)
    except BaseException:
        from_job = False
    if from_job:
        raise error
    on = False
    try:
        if _ring is not None:
            _ring.stop_recording()
    except BaseException:
        pass


def remove_own_frame(error: BaseException) -> None:
    """Remove the caller's frame from the traceback of an exception about to be re-raised.

    The job's traceback then reads as without the probe. Python before 3.11 re-raises a copy
    of the traceback; there the frame stays.
    """
    trace = error.__traceback__
    if trace is not None:
        error.__traceback__ = trace.tb_next


def is_from_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler of the job raised an exception while probe code ran."""
    import signal

    trace: "Optional[TracebackType]" = error.__traceback__
    last: "Optional[TracebackType]" = trace
    codes = set()
    while trace is not None:
        codes.add(trace.tb_frame.f_code)
        last = trace
        trace = trace.tb_next
    for number in range(1, signal.NSIG):
        try:
            handler = signal.getsignal(number)
        except (OSError, ValueError):
            continue
        code = getattr(getattr(handler, "__func__", handler), "__code__", "none")
        if code in codes:
            return True
    # The default handler of SIGINT is written in C and leaves no frame. The probe never raises
    # KeyboardInterrupt, so one that does not come from a `raise` statement is a Ctrl-C.
    return (
        isinstance(error, KeyboardInterrupt) and last is not None and not _is_raise_statement(last)
    )


def _is_raise_statement(trace: "TracebackType") -> bool:
    from opcode import opmap

    code = trace.tb_frame.f_code.co_code
    return code[trace.tb_lasti] == opmap["RAISE_VARARGS"]
