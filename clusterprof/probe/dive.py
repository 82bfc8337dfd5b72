"""A window of PyTorch's profiler over a few steps, where the recorder wants one (`record --dive`).

The recorder names the processes in `dives/wanted` in the run directory. In each of them:

    probe's thread      sees the wish                                      saves the trace
    training thread         | calibrates |  step  | the window | step | step |

A window begins and ends where a step ends, on the thread that trains: PyTorch's profiler belongs to
its thread. What it costs depends on the number of events, which is not known before. Therefore a
first window of a twentieth of a second counts them, and is thrown away. The number of steps
follows from that; a rank whose steps have too many events is left alone.

The answer is `dives/<pid>.done`, and before it the trace, `dives/<pid>.json`. Nothing is done while
another profiler is active. If the job starts one, or forks, in a window, that window ends first.
"""

import atexit
import json
import os
import sys
from _thread import get_ident
from time import monotonic_ns
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import annotations, handle_error, interpreter_lock, ring
from .hooks import wrap

FOLDER, WANTED = "dives", "wanted"
LOOK_NS = 2_000_000_000
"""Time between two looks for the recorder's wish, ns."""
CALIBRATION_NS = 50_000_000
MAX_STEP_NS = 60_000_000_000
"""A rank with longer steps is not profiled."""
MAX_STEPS, MAX_LENGTH_NS = 10, 2_000_000_000
"""Most steps of a window, and its length, ns, unless a single step is longer."""
AIMED_EVENTS, MAX_EVENTS = 20_000, 40_000
"""Events aimed at, and most that are saved. One takes 5 us in all, and 13 us where the CPUs are
busy: 40,000 take about half a second, less than 1 % of a minute."""
MIN_FREE_BYTES = 64 << 20
"""Free space that the run directory must have; the largest trace takes a third of it."""
MAX_RETRIES = 3
_OLDEST_CUDA = (12, 6)
_OTHER_PROFILERS = (
    *("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"),
    *("KINETO_USE_DAEMON", "HSA_TOOLS_LIB", "ROCP_TOOL_LIB"),
)
"""Variables by which other profilers come into a process."""
_MODULE = "torch.autograd.profiler"
_PATCHED = ("_prepare_profiler", "_enable_profiler")

ARMED, CALIBRATING, RUNNING, ENDED, TAKEN = range(5)

_probe: Any = sys.modules[__name__.rpartition(".")[0]]
_looked_ns = 0
_handled_ns = 0
_window: "Optional[Window]" = None


class Window:
    """One window, from the wish to the answer."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.state = ARMED
        self.steps = self.wanted_steps = 0
        self.begun_ns = self.ended_ns = self.cost_ns = self.events = self.step_ns = 0
        self.results: Any = None
        self.reason = ""
        self.thread = 0
        self._retries = 0
        self._is_own_call = False
        self._originals: Dict[str, Any] = {}
        self._emits: Tuple[Any, Any] = (None, None)

    def finish_step(self, start_ns: int, end_ns: int) -> None:
        """Begin or end the window where a step ends; on the thread that trains."""
        try:
            if self.state == ARMED:
                self.step_ns = end_ns - start_ns
                self._begin()
            elif self.state == CALIBRATING:
                self.steps += 1
                self._calibrate()
            elif self.state == RUNNING:
                self.steps += 1
                if self.steps >= self.wanted_steps:
                    self._end()
                    self.state = TAKEN
        except Exception as error:
            self.give_up("%s: %s" % (type(error).__name__, str(error)[:160]))

    def give_up(self, reason: str) -> None:
        """End the profiler if it runs, keep nothing, and let the answer say why."""
        try:
            if self.state in (CALIBRATING, RUNNING):
                self._end()
        except Exception as error:
            reason += " (%s)" % type(error).__name__
        self.results, self.reason, self.state = None, reason, TAKEN

    def retry(self, reason: str) -> None:
        """End the profiler, and begin again with the next step; after some times give up."""
        self._retries += 1
        if self._retries > MAX_RETRIES:
            self.give_up(reason)
        else:
            self._end()
            self.state, self.steps, self.wanted_steps = ARMED, 0, 0

    def _begin(self) -> None:
        reason = find_obstacle(self.folder)
        if self.step_ns > MAX_STEP_NS:
            reason = "its steps take longer than %d s" % (MAX_STEP_NS // 10**9)
        elif get_ident() != _probe.main_thread[0]:
            # If the job ended within the window, nothing could end the profiler any more, and the
            # process might crash.
            reason = "another thread than the main one trains"
        if reason:
            self.give_up(reason)
            return
        self.thread, self.steps = get_ident(), 0
        begun_ns = monotonic_ns()
        module = sys.modules[_MODULE]
        self._watch_others(module)
        self.state = RUNNING if self.wanted_steps else CALIBRATING
        self._is_own_call = True
        try:
            profiler = _make_profiler(module)
            profiler._prepare_trace()
            profiler._start_trace()
        finally:
            self._is_own_call = False
        self.begun_ns = monotonic_ns()
        self.cost_ns += self.begun_ns - begun_ns
        # A step that takes much longer than the one before it would have too many events.
        is_first = self.state == CALIBRATING
        length_ns = CALIBRATION_NS if is_first else 4 * self.wanted_steps * self.step_ns + 10**9
        self._watch_deadline(self.begun_ns + length_ns)

    def _calibrate(self) -> None:
        """End the first window, and choose the number of steps by its number of events."""
        self._end()
        counted_ns = monotonic_ns()
        events, self.results = len(self.results.events()), None
        self.cost_ns += monotonic_ns() - counted_ns
        elapsed_ns = max(1, self.ended_ns - self.begun_ns)
        # A whole step was counted; else the rest of it is taken to be as dense.
        per_step = events / self.steps if self.steps else events * self.step_ns / elapsed_ns
        if per_step > MAX_EVENTS:
            self.give_up(_format_excess(int(per_step), "a step has some"))
            return
        most = min(MAX_STEPS, MAX_LENGTH_NS // max(1, self.step_ns))
        self.wanted_steps = max(1, min(most, int(AIMED_EVENTS / max(1.0, per_step))))
        self.state = ARMED

    def _end(self) -> None:
        begun_ns = monotonic_ns()
        self.state = ENDED  # first: whatever fails, the profiler is ended only once
        self._unwatch()
        module = sys.modules[_MODULE]
        if get_ident() != self.thread:
            return
        cuda = _find_cuda()
        if cuda is not None and not cuda.is_current_stream_capturing():
            cuda.synchronize()  # or the last kernels would be missing
        self.ended_ns = monotonic_ns()
        self.results = module._disable_profiler()  # type: ignore[attr-defined]
        stop = getattr(module, "_run_on_profiler_stop", None)
        if stop is not None:
            stop()
        self.cost_ns += monotonic_ns() - begun_ns

    def _watch_others(self, module: Any) -> None:
        """Give way if the job starts a profiler: there can only be one at a time."""
        for name in _PATCHED:
            self._originals[name] = original = getattr(module, name)
            setattr(module, name, self._make_wrapper(original))

    def _make_wrapper(self, original: Any) -> Any:
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            if not self._is_own_call and self.state in (CALIBRATING, RUNNING):
                self.give_up("the job started a profiler of its own")
            return original(*arguments, **keywords)

        return wrapper

    def _watch_deadline(self, deadline_ns: int) -> None:
        """Look at the time wherever this thread marks a span, for one look within a long step."""
        original = ring.emit

        def emit(*values: int, **named: int) -> int:
            sequence = original(*values, **named)
            if monotonic_ns() >= deadline_ns and get_ident() == self.thread:
                self._pass_deadline()
            return sequence

        self._emits = original, emit
        ring.emit = emit

    def _pass_deadline(self) -> None:
        try:
            if self.state == CALIBRATING:
                self._calibrate()
            elif self.state == RUNNING:
                self.give_up("a step took much longer than the one before it")
        except Exception as error:
            self.give_up("%s: %s" % (type(error).__name__, str(error)[:160]))

    def _unwatch(self) -> None:
        module = sys.modules[_MODULE]
        for name, original in self._originals.items():
            setattr(module, name, original)
        self._originals = {}
        original, watching_emit = self._emits
        if (
            watching_emit is not None and ring.emit is watching_emit
        ):  # not if the probe has switched itself off
            ring.emit = original
        self._emits = None, None

    def save(self) -> None:
        """Save the trace and the answer; in the probe's thread."""
        begun_ns = monotonic_ns()
        path = "%s/%d" % (self.folder, os.getpid())
        results, self.results = self.results, None
        if results is not None:
            self.events = len(results.events())
            if self.events > MAX_EVENTS:
                self.reason = _format_excess(self.events, "the window has")
            else:
                results.save(path + ".json")
        del results
        self.cost_ns += monotonic_ns() - begun_ns
        answer = {
            "reason": self.reason,
            "steps": self.steps,
            "begun_ns": self.begun_ns,
            "ended_ns": self.ended_ns,
            "step_ns": self.step_ns,
            "events": self.events,
            "cost_ns": self.cost_ns,
        }
        with open(path + ".tmp", "w") as file:
            json.dump(answer, file)
        os.rename(path + ".tmp", path + ".done")


def is_profiling() -> bool:
    """Return whether PyTorch's profiler runs for a window of the recorder's."""
    window = _window
    return window is not None and window.state in (CALIBRATING, RUNNING)


def find_obstacle(folder: str) -> str:
    """Return why no window can be taken now; "" = it can."""
    module: Any = sys.modules.get(_MODULE)
    autograd = getattr(sys.modules.get("torch._C"), "_autograd", None)
    is_supported = module is not None and all(hasattr(module, name) for name in _PATCHED)
    if autograd is None or not is_supported:
        return "this PyTorch has no profiler that the probe knows"
    if getattr(module, "_is_profiler_enabled", False) or autograd._profiler_enabled():
        return "another profiler was active"
    for name in _OTHER_PROFILERS:
        if os.environ.get(name):
            return "another profiler may be active: %s is set" % name
    if _find_cuda() is not None:
        version = str(getattr(sys.modules["torch"].version, "cuda", "") or "")
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if numbers and numbers < _OLDEST_CUDA:
            # Ending CUPTI could crash a job that uses CUDA graphs.
            return "profiling is only safe from CUDA %d.%d on, this is %s" % (
                *_OLDEST_CUDA,
                version,
            )
    status = os.statvfs(folder)
    if status.f_bavail * status.f_frsize < MIN_FREE_BYTES:
        return "too little space is free for the trace"
    return ""


def _make_profiler(module: Any) -> Any:
    device = None if _find_cuda() is None else "cuda"
    try:
        return module.profile(use_kineto=True, use_device=device)
    except TypeError:  # before PyTorch 2.3
        return module.profile(use_kineto=True, use_cuda=device is not None)


def _find_cuda() -> Any:
    """Return torch.cuda if the job uses it in this process, else None."""
    cuda = sys.modules.get("torch.cuda")
    return cuda if cuda is not None and wrap.cuda._initialized else None


def _format_excess(events: int, subject: str) -> str:
    return "%s %d events; more than %d would delay it" % (subject, events, MAX_EVENTS)


def look(now_ns: int) -> None:
    """Look for the recorder's wish, and save what was taken; gives the interpreter lock away.

    Errors are ignored: the recording then has no trace of this process.
    """
    global _looked_ns, _handled_ns, _window
    try:
        if _window is not None and _window.state == TAKEN:
            window, _window = _window, None
            _disarm(window)
            window.save()
        if now_ns - _looked_ns < LOOK_NS:
            return
        _looked_ns = now_ns
        folder = _probe.run_dir + "/" + FOLDER
        try:
            wanted_ns = os.stat(folder + "/" + WANTED).st_mtime_ns
        except OSError:
            if _window is not None and _window.state == ARMED:  # it is no longer awaited
                _disarm(_window)
                _window = None
            return
        if wanted_ns == _handled_ns or _window is not None:
            return
        _handled_ns = wanted_ns
        with open(folder + "/" + WANTED) as file:
            if str(os.getpid()) in file.read().split():
                _window = Window(folder)
                annotations.after_step_end.append(_window.finish_step)
    except Exception:
        pass


def _disarm(window: Window) -> None:
    callbacks: List[Callable[[int, int], None]] = annotations.after_step_end
    if window.finish_step in callbacks:
        callbacks.remove(window.finish_step)


def _stop_at_exit() -> None:
    try:
        window = _window
        if window is not None and window.state in (CALIBRATING, RUNNING):
            window.give_up("the job ended within the window")
            window.save()
    except BaseException as error:
        handle_error(error)


def _stop_before_fork() -> None:
    """End a window of the forking thread: its child would go on profiling."""
    try:
        window = _window
        is_open = window is not None and window.state in (CALIBRATING, RUNNING)
        if window is not None and is_open and get_ident() == window.thread:
            window.retry("the job started processes within each window")
    except BaseException as error:
        handle_error(error)


def _forget() -> None:
    global _window
    _window = None
    annotations.after_step_end.clear()


interpreter_lock.on_look.append(look)
ring.after_fork.append(_forget)
os.register_at_fork(before=_stop_before_fork)
atexit.register(_stop_at_exit)
