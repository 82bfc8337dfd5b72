"""`python -m clusterprof.agent`: the recorder without the command line's imports.

For DaemonSets, prologs and `srun --overlap`; and what `clusterprof record` starts detached. Without
`--follow` it records in the foreground until SIGINT, SIGTERM or `--duration`; with `--pid` also
until that process ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterprof.errors import ClusterprofError
    from clusterprof.recorder.options import Parser
    from clusterprof.recorder.order import Order, Started
    from clusterprof.recorder.plan import Plan

_NOTES_AT_MOST = 200
_UNSEEN_AT_MOST = 12
EXIT_BY_SIGNAL = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recorder; return its exit code."""
    from clusterprof.errors import EXIT_OK, ClusterprofError

    try:
        options = _parser().read(arguments)
    except ClusterprofError as error:
        return _say(error)
    # Below the options, so that `--help` and a mistyped option cost nothing.
    from clusterprof.recorder import neighbour

    neighbour.settle()
    os.umask(0o077)
    for inherited in (options.lock_fd, options.ready_fd):
        if inherited is not None:
            os.set_inheritable(inherited, False)  # a helper that kept them would outlive us
    signals = _Signals(detached=options.ready_fd is not None)
    try:
        order, lock = _order(options)
        _run(order, options.ready_fd, signals)
        os.close(lock)
    except ClusterprofError as error:
        if options.ready_fd is not None:
            _answer(options.ready_fd, {"error": error.message, "remedy": error.remedy})
        else:
            _say(error)
        return error.exit_code
    if signals.received and options.ready_fd is None:
        return EXIT_BY_SIGNAL + signals.received
    return EXIT_OK


def _say(error: ClusterprofError) -> int:
    hint = f" ({error.remedy})" if error.remedy else ""
    print(f"clusterprof: {error.message}{hint}", file=sys.stderr)
    return error.exit_code


def _parser() -> Parser:
    from clusterprof.recorder import options

    parser = options.Parser("python -m clusterprof.agent", description=__doc__)
    for option in (options.OUT, options.DURATION, options.HZ, options.PID):
        parser.take(option)
    parser.add_argument("--profile-json", metavar="FILE", help="Sampling plan (plan.json).")
    parser.add_argument("--run-dir", metavar="DIR", help="Run directory of the job.")
    parser.add_argument("--job", help="Name of the job.")
    parser.add_argument("--follow", action="store_true", help="End with the last process.")
    parser.add_argument("--lock-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    return parser


def _order(options: argparse.Namespace) -> tuple[Order, int]:
    """Return what to do, and the descriptor of the lock that makes us the node's recorder."""
    from clusterprof.errors import CannotStart
    from clusterprof.linux.roots import Roots
    from clusterprof.recorder import identity
    from clusterprof.recorder.election import join
    from clusterprof.recorder.order import DEFAULT_OUT, Order, parse_duration
    from clusterprof.recorder.rundir import choose_base, run_dir_path

    roots = Roots()
    job = options.job or identity.launcher_job(os.environ, os.getppid()) or identity.own_job()
    if options.run_dir:
        run_dir = Path(options.run_dir)
    else:
        run_dir = run_dir_path(choose_base(os.environ), identity.boot8(roots), job)
    lock = options.lock_fd
    if lock is None:
        lock = join(run_dir, lambda: None)
        if lock is None:
            raise CannotStart(f"job {job} is already being recorded", f"see {run_dir}/agent.pid")
    out = Path(options.out) if options.out else Path(DEFAULT_OUT) / job
    return Order(
        out=out.absolute(),
        run_dir=run_dir,
        plan=_plan(options, run_dir),
        job=job,
        follow=options.follow or options.pid is not None,
        duration_ns=parse_duration(options.duration) if options.duration else None,
        pid=options.pid,
        roots=roots,
    ), lock


def _plan(options: argparse.Namespace, run_dir: Path) -> Plan:
    from clusterprof.errors import UsageError
    from clusterprof.recorder.plan import Plan, plan_from_json, with_hz

    path = Path(options.profile_json) if options.profile_json else run_dir / "plan.json"
    if not options.profile_json and not path.exists():
        plan = Plan()
    else:
        try:
            plan = plan_from_json(path.read_bytes())
        except OSError as error:
            raise UsageError(f"{path}: {(error.strerror or '').lower()}") from error
    return plan if options.hz is None else with_hz(plan, options.hz)


def _run(order: Order, ready_fd: int | None, signals: _Signals) -> None:
    from clusterprof.collectors.registry import COLLECTORS
    from clusterprof.recorder.service import Service

    log = _Log()

    def started(answer: Started) -> None:
        log.move_to(answer.folder)
        if ready_fd is not None:
            unseen = [(one.collector, one.kind) for one in answer.unseen]
            _answer(ready_fd, {
                "folder": str(answer.folder), "emulated": answer.emulated,
                "unseen": unseen[:_UNSEEN_AT_MOST],
            })  # fmt: skip
        else:
            print(f"clusterprof: recording to {answer.folder}", file=sys.stderr, flush=True)

    service = Service(order, COLLECTORS, signals.wake, log.note)
    service.run(signals.asked, started)
    log.close()
    service.close()


def _answer(descriptor: int, values: dict[str, Any]) -> None:
    """Tell the launcher, once; it may have stopped waiting."""
    with contextlib.suppress(OSError):
        os.write(descriptor, json.dumps(values).encode())
        os.close(descriptor)


class _Signals:
    """SIGTERM and SIGINT ask the loop to end; both wake it from its wait at once."""

    def __init__(self, detached: bool) -> None:
        self.wake, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.received = 0
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._come)
        # Detached there is no terminal to hang up; in the foreground a hang-up is an end.
        signal.signal(signal.SIGHUP, signal.SIG_IGN if detached else self._come)

    def _come(self, number: int, _: object) -> None:
        self.received = number

    def asked(self) -> str:
        """Return the name of the signal that asked for the end, "" while none has."""
        return signal.Signals(self.received).name if self.received else ""


class _Log:
    """agent.log in the node's folder: what went wrong inside the recorder, and when."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._notes = 0

    def close(self) -> None:
        """Close agent.log: whoever has seen the end may take its disk away."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def move_to(self, folder: Path) -> None:
        """Write from now on to `<folder>/agent.log`; until then it is stderr."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            self._descriptor = os.open(folder / "agent.log", flags, 0o600)

    def note(self, what: str, error: BaseException) -> None:
        """Note an error that the recording survived; after 200 of them nothing more."""
        self._notes += 1
        if self._notes > _NOTES_AT_MOST:
            return
        import traceback

        lines = "".join(traceback.format_exception(error))
        text = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {what}: {lines}"
        with contextlib.suppress(OSError):
            os.write(2 if self._descriptor < 0 else self._descriptor, text.encode())


if __name__ == "__main__":
    sys.exit(main())
