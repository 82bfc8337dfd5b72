"""The guest inside the training process: marks what the process does, and harms nothing.

Standard library only, Python 3.8 syntax, nothing of clusterprof imported: `record` copies this
folder under the name `_clusterprof_probe` to where the job can reach it (docs/design.md,
section 3). No thread, no socket, no process, no output. Whatever goes wrong in here switches the
probe off and is not seen by the job.

Little is imported when Python starts: the importer, which waits for torch. The ring is opened by
the first record.
"""

TYPE_CHECKING = False  # typing itself would cost each Python of the job more than all of this
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Dict, Optional

on = True
"""False once the probe switched itself off: every hook then only calls what it wrapped."""

run_dir = ""
config: "Dict[str, Any]" = {}
_ring: "Any" = None
_steps: "Any" = None
_spans: "Any" = None


def start(directory: str, values: "Dict[str, Any]") -> None:
    """Wait for the modules whose seams we mark. Called once, by the bootstrap."""
    global run_dir, config
    run_dir = directory
    config = values
    from . import importer
    from .hooks import HOOKS

    importer.watch(HOOKS)


def prepare() -> None:
    """Load the rest of the probe; a job that imports clusterprof will need it."""
    try:
        if on:
            load()
    except BaseException as error:
        failed(error)


def load() -> "Any":
    """Load the rest of the probe and return its ring.

    All at once, on the first occasion: a child forked while another thread imports would wait for
    that import for ever.
    """
    global _ring, _steps, _spans
    if _ring is None:
        from . import ring, spans, steps
        from .hooks import gc_pauses  # noqa: F401 - joins the ring by itself

        _steps, _spans, _ring = steps, spans, ring
    return _ring


def step() -> None:
    """Mark the end of an optimizer step; `clusterprof.step()` ends here."""
    try:
        if on:
            load()
            _steps.mark()
    except BaseException as error:
        failed(error)


def span(name: str) -> "Any":
    """Return a context manager that records `name`, or None; `clusterprof.span()` ends here."""
    try:
        if on:
            load()
            return _spans.span(name)
    except BaseException as error:
        failed(error)
    return None


def emit(kind: int, start_ns: int, end_ns: int, *values: int) -> int:
    """Record one span of any kind of the table in docs/design.md, section 4.

    For adapters and tests. Returns its sequence number, 0 when nothing was recorded.
    """
    try:
        if on:
            return load().emit(kind, start_ns, end_ns, *values)
    except BaseException as error:
        failed(error)
    return 0


def failed(error: BaseException) -> None:
    """Switch the probe off for an error of our own; let through what belongs to the job.

    An exception that a signal handler of the job raised while our code happened to run (Ctrl-C,
    a timeout by SIGALRM) is the job's, and is raised on.
    """
    global on
    try:
        theirs = _is_of_a_signal(error)
    except BaseException:
        theirs = False
    if theirs:
        raise error
    on = False
    try:
        if _ring is not None:
            _ring.switch_off()
    except BaseException:
        pass


def without_our_frame(error: BaseException) -> None:
    """Take the caller's frame out of the traceback of an exception it is about to re-raise.

    The job's traceback then reads as it does without us. Python before 3.11 re-raises a copy of
    the traceback, there our frame stays.
    """
    trace = error.__traceback__
    if trace is not None:
        error.__traceback__ = trace.tb_next


def _is_of_a_signal(error: BaseException) -> bool:
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
    # The default handler of SIGINT is written in C and leaves no frame. Nothing in here raises
    # KeyboardInterrupt, so one that no `raise` statement raised is a Ctrl-C.
    return isinstance(error, KeyboardInterrupt) and last is not None and not _raised_at(last)


def _raised_at(trace: "TracebackType") -> bool:
    from opcode import opmap

    code = trace.tb_frame.f_code.co_code
    return code[trace.tb_lasti] == opmap["RAISE_VARARGS"]
