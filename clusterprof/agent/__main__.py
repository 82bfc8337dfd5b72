"""`python -m clusterprof.agent`: the recorder without the imports of the command line.

For DaemonSets, prologs and `srun --overlap`; `clusterprof record` starts it detached.
Without `--follow` it records in the foreground until SIGINT, SIGTERM or `--duration`;
with `--pid` also until that process exits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterprof.agent.options import Parser, Plan, RecordingRequest, RecordingStarted
    from clusterprof.errors import ClusterprofError

_MAX_NOTES = 200
_MAX_UNAVAILABLE = 12
_MAX_WAKE_BYTES = 4096
EXIT_BY_SIGNAL = 128
ATTACH_LINE = (
    "clusterprof: attached. Recorded: thread states, CPU, files, network, accelerators."
    " Not recorded: steps, lines of code, causes; for these start the job with clusterprof record"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recorder and return its exit code.

    128 plus the signal number when SIGINT or SIGTERM ended a recording in the foreground.
    """
    from clusterprof.errors import EXIT_OK, ClusterprofError
    from clusterprof.trace.segments import PRIVATE_MODE

    try:
        options = _build_parser().parse(arguments)
    except ClusterprofError as error:
        return _print_error(error)
    # After the options are parsed, so that `--help` and a mistyped option cost nothing.
    from clusterprof.agent.sampling import service

    service.apply_process_limits()
    for inherited in (options.lock_fd, options.ready_fd):
        if inherited is not None:
            os.set_inheritable(inherited, False)  # a helper process must not hold them open
    signals = _Signals(detached=options.ready_fd is not None)
    try:
        os.umask(0o077)
        request, lock = _build_request(options)
        # Explicit modes keep the run directory private; the umask is that of the recording.
        os.umask(0o777 & ~request.plan.recording.get("mode", PRIVATE_MODE))
        _run_recording(request, options.ready_fd, signals)
        os.close(lock)
    except ClusterprofError as error:
        if options.ready_fd is not None:
            _send_reply(options.ready_fd, {"error": error.message, "remedy": error.remedy})
        else:
            _print_error(error)
        return error.exit_code
    if signals.received and options.ready_fd is None:
        return EXIT_BY_SIGNAL + signals.received
    return EXIT_OK


def _print_error(error: ClusterprofError) -> int:
    hint = f" ({error.remedy})" if error.remedy else ""
    print(f"clusterprof: {error.message}{hint}", file=sys.stderr)
    return error.exit_code


def _build_parser() -> Parser:
    from clusterprof.agent import options

    parser = options.Parser("python -m clusterprof.agent", description=__doc__)
    agent_options = (
        options.OUT,
        options.DURATION,
        options.HZ,
        options.PID,
        options.MODE,
        options.METRICS,
    )
    for option in agent_options:
        parser.add_option(option)
    parser.add_argument("--profile-json", metavar="FILE", help="Sampling plan (plan.json).")
    parser.add_argument("--run-dir", metavar="DIR", help="Run directory of the job.")
    parser.add_argument("--job", help="Name of the job.")
    parser.add_argument("--follow", action="store_true", help="End with the last process.")
    parser.add_argument("--lock-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    return parser


def _build_request(options: argparse.Namespace) -> tuple[RecordingRequest, int]:
    """Build the request from the options; return it and the descriptor of the recorder's lock."""
    from clusterprof.agent.launch import identity
    from clusterprof.agent.launch.election import build_run_dir_path, choose_base, join_recorder
    from clusterprof.agent.linux.files import Roots
    from clusterprof.agent.options import DEFAULT_OUT, RecordingRequest, parse_duration
    from clusterprof.errors import CannotStart

    roots = Roots()
    job = (
        options.job
        or identity.find_launcher_job(os.environ, os.getppid())
        or identity.make_job_name()
    )
    if options.run_dir:
        run_dir = Path(options.run_dir)
    else:
        run_dir = build_run_dir_path(
            choose_base(os.environ), identity.read_short_boot_id(roots), job
        )
    lock = options.lock_fd
    if lock is None:
        lock = join_recorder(run_dir, lambda: None)
        if lock is None:
            raise CannotStart(f"job {job} is already being recorded", f"see {run_dir}/agent.pid")
    out = Path(options.out) if options.out else Path(DEFAULT_OUT) / job
    return RecordingRequest(
        out=out.absolute(),
        run_dir=run_dir,
        plan=_load_plan(options, run_dir),
        job=job,
        follow=options.follow or options.pid is not None,
        duration_ns=parse_duration(options.duration) if options.duration else None,
        pid=options.pid,
        roots=roots,
    ), lock


def _load_plan(options: argparse.Namespace, run_dir: Path) -> Plan:
    from clusterprof.agent.options import (
        Plan,
        decode_plan,
        parse_mode,
        with_hz,
        with_metrics,
        with_mode,
    )
    from clusterprof.errors import UsageError

    path = Path(options.profile_json) if options.profile_json else run_dir / "plan.json"
    if not options.profile_json and not path.exists():
        plan = Plan()
    else:
        try:
            plan = decode_plan(path.read_bytes())
        except OSError as error:
            raise UsageError(f"{path}: {(error.strerror or '').lower()}") from error
    plan = plan if options.hz is None else with_hz(plan, options.hz)
    plan = with_metrics(plan, options.metrics or (), os.environ, Path.cwd())
    return plan if options.mode is None else with_mode(plan, parse_mode(options.mode))


def _run_recording(request: RecordingRequest, ready_fd: int | None, signals: _Signals) -> None:
    from clusterprof.agent.collectors.registry import select_collectors
    from clusterprof.agent.sampling.service import Service

    log = _Log()
    if request.plan.recording.get("redact", 0):
        from clusterprof.agent.sampling.redaction import Redactor

        log.hide_text = Redactor(request.job).hide_text

    def started(reply: RecordingStarted) -> None:
        log.move_to(reply.folder)
        if ready_fd is not None:
            unavailable = [(collector.collector, collector.kind) for collector in reply.unseen]
            _send_reply(
                ready_fd,
                {
                    "folder": str(reply.folder),
                    "emulated": reply.emulated,
                    "unseen": unavailable[:_MAX_UNAVAILABLE],
                    "notes": list(reply.notes)[:_MAX_UNAVAILABLE],
                },
            )
        else:
            for line in (f"recording to {reply.folder}", *reply.notes):
                print(f"clusterprof: {line}", file=sys.stderr, flush=True)
            if request.pid is not None:
                print(ATTACH_LINE, file=sys.stderr, flush=True)

    collectors = select_collectors(request.roots, request.plan.use_portable())
    service = Service(request, collectors, signals.wake, log.note, signals.count_device_requests)
    service.run(signals.stop_reason, started)
    log.close()
    service.close()


def _send_reply(descriptor: int, values: dict[str, Any]) -> None:
    """Send the one reply that the launcher waits for; it may have stopped waiting."""
    with contextlib.suppress(OSError):
        os.write(descriptor, json.dumps(values).encode())
        os.close(descriptor)


class _Signals:
    """Handlers of signals: they only note the request and wake the loop at once.

    SIGTERM and SIGINT ask it to stop, SIGUSR2 to release the devices or to open them again.
    """

    def __init__(self, detached: bool) -> None:
        self.wake, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.received = 0
        self._device_requests = 0
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        signal.signal(signal.SIGUSR2, self._note_device_request)
        # A detached recorder has no terminal; in the foreground a hang-up ends the recording.
        signal.signal(signal.SIGHUP, signal.SIG_IGN if detached else self._handle)

    def _handle(self, number: int, _: object) -> None:
        self.received = number

    def _note_device_request(self, number: int, _: object) -> None:
        self._device_requests += 1

    def count_device_requests(self, seen: int) -> int:
        """Return how many SIGUSR2 have arrived so far.

        seen: the number that the caller has handled. When there are more, the descriptor that
        wakes the loop is emptied first, so that it does not wake the loop again and again.
        """
        if self._device_requests != seen:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake, _MAX_WAKE_BYTES)
        return self._device_requests

    def stop_reason(self) -> str:
        """Return the name of the signal that asked for the end, "" while none was received."""
        return signal.Signals(self.received).name if self.received else ""


class _Log:
    """agent.log in the node's folder: errors inside the recorder, with their time."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._notes = 0
        self.hide_text: Callable[[str], str] = str

    def close(self) -> None:
        """Close agent.log, so that its file system can be unmounted after the recording."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def move_to(self, folder: Path) -> None:
        """Write to `<folder>/agent.log` from now on; before that, notes go to stderr."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(os.stat(folder).st_mode) & 0o666
            self._descriptor = os.open(folder / "agent.log", flags, mode)

    def note(self, subject: str, error: BaseException) -> None:
        """Write an error that the recording survived; after 200 of them nothing is written."""
        self._notes += 1
        if self._notes > _MAX_NOTES:
            return
        try:
            import traceback

            lines = "".join(traceback.format_exception(error))
        except Exception:  # no descriptor or no memory is left to import it
            lines = f"{type(error).__name__}: {error}\n"
        text = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {subject}: {lines}"
        text = self.hide_text(text)
        with contextlib.suppress(OSError):
            os.write(2 if self._descriptor < 0 else self._descriptor, text.encode())


if __name__ == "__main__":
    sys.exit(main())
