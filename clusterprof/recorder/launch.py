"""`record -- CMD`: register, elect, start the recorder if it is ours to start, and become CMD.

The training job comes first: whatever goes wrong with the recording, CMD runs, in this very
process, with the signals, descriptors and environment it would have had.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from clusterprof.errors import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    CannotStart,
    ClusterprofError,
)
from clusterprof.linux.roots import Roots
from clusterprof.recorder import identity, inject
from clusterprof.recorder.detach import agent_environment, python_command, start_detached
from clusterprof.recorder.election import join
from clusterprof.recorder.order import DEFAULT_OUT
from clusterprof.recorder.plan import Plan, plan_to_json
from clusterprof.recorder.rundir import (
    choose_base,
    ensure_run_dir,
    run_dir_path,
    write_private,
)

Injection = Literal["auto", "off", "strict"]
READY_WITHIN_S = 2.0
READY_WITHIN_STRICT_S = 10.0
RUN_DIR_VARIABLE = "CLUSTERPROF_RUN_DIR"


class CannotExecute(ClusterprofError):  # noqa: N818 - named like its siblings
    """The command cannot be executed, or there is no such command."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Launch:
    """What `record -- CMD` was asked for."""

    command: Sequence[str]
    out: Path | None
    """None = ./clusterprof-out/<job>."""
    plan: Callable[[], Plan]
    """Called only by the one that starts the recorder."""
    inject: Injection = "auto"
    gpu_events: bool = True
    duration_ns: int | None = None


def launch(wish: Launch, environ: Mapping[str, str], say: Callable[[str], None]) -> NoReturn:
    """Start or join the recording of this node and become the command; never returns.

    `say` prints one line to stderr. Raises `CannotExecute` (126, 127) without having recorded
    anything, and `CannotStart` only under `inject="strict"`.
    """
    program = resolve(wish.command[0], environ)
    job = identity.launcher_job(environ, os.getppid()) or identity.command_job(wish.command)
    job = job or identity.own_job()
    environment = dict(environ)
    try:
        run_dir = run_dir_path(choose_base(environ), identity.boot8(Roots()), job)
        _record(wish, job, run_dir, environ, say)
        environment = _environment(wish, run_dir, environ, say)
    except (ClusterprofError, OSError) as error:
        if wish.inject == "strict":
            if isinstance(error, CannotStart):
                raise
            raise CannotStart(str(error)) from error
        say(f"clusterprof: not recording: {error}")
    become(program, wish.command, environment)


def resolve(name: str, environ: Mapping[str, str]) -> str:
    """Return the path of a command as a shell would find it; raise `CannotExecute` as it would."""
    path = environ.get("PATH", os.defpath)
    found = name if "/" in name else shutil.which(name, path=path)
    if found is None or not os.path.exists(found):
        raise CannotExecute(f"{name}: command not found", EXIT_NOT_FOUND)
    if os.path.isdir(found):
        raise CannotExecute(f"{name}: is a directory", EXIT_NOT_EXECUTABLE)
    if not os.access(found, os.X_OK):
        raise CannotExecute(f"{name}: permission denied", EXIT_NOT_EXECUTABLE)
    return found


def become(program: str, command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Execute the command in this process, with signals as they were before Python."""
    # Python ignores these two at its start, and what is ignored stays ignored across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execve(program, list(command), dict(environ))
    except OSError as error:
        if error.errno == errno.ENOEXEC:  # a script without a first line: a shell runs it
            try:
                os.execve("/bin/sh", ["/bin/sh", program, *command[1:]], dict(environ))
            except OSError:
                pass
        code = EXIT_NOT_FOUND if error.errno == errno.ENOENT else EXIT_NOT_EXECUTABLE
        raise CannotExecute(f"{command[0]}: {(error.strerror or '').lower()}", code) from error


def _record(
    wish: Launch, job: str, run_dir: Path, environ: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Register this process, and start the recorder if nobody else has."""

    def register() -> None:
        content = json.dumps(registration(environ)).encode()
        write_private(run_dir / "register" / f"{os.getpid()}.json", content)

    lock = join(run_dir, register)
    if lock is None:
        return
    try:
        out = wish.out if wish.out is not None else Path(DEFAULT_OUT) / job
        write_private(run_dir / "plan.json", plan_to_json(wish.plan()))
        arguments = [f"--run-dir={run_dir}", f"--out={out.absolute()}", f"--job={job}", "--follow"]
        if wish.duration_ns is not None:
            arguments.append(f"--duration={wish.duration_ns / 1e9:.9f}s")
        within_s = READY_WITHIN_STRICT_S if wish.inject == "strict" else READY_WITHIN_S
        answer = start_detached(arguments, run_dir, lock, within_s)
    finally:
        os.close(lock)
    if not answer and wish.inject == "strict":
        raise CannotStart(f"the recorder did not answer within {within_s:g} s")
    say(start_line(out, answer))


def _environment(
    wish: Launch, run_dir: Path, environ: Mapping[str, str], say: Callable[[str], None]
) -> dict[str, str]:
    if wish.inject == "off":
        return {**environ, RUN_DIR_VARIABLE: str(run_dir)}
    why_not = inject.why_not_injectable(wish.command)
    if why_not is not None:
        if wish.inject == "strict":
            raise CannotStart(f"no spans: {why_not}", "remove the option, or --inject off")
        say(f"clusterprof: no spans: {why_not}")
    inject.install_probe(run_dir, gpu_events=wish.gpu_events, strict=wish.inject == "strict")
    return inject.environment(run_dir, environ)


def registration(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what `register/<pid>.json` says of this process (docs/design.md, section 3)."""
    variables = identity.launcher_variables(environ)
    return {
        "pid": os.getpid(),
        "started_ticks": identity.started_ticks("/proc", os.getpid()),
        "role": "command",
        "variables": variables,
        "device": "",
        "node_local_rank": identity.node_local_rank(variables),
    }


def start_line(out: Path, answer: Mapping[str, Any]) -> str:
    """Return the one line of the start: where it goes, what cannot be seen, how to analyse it."""
    unseen = [f"{name} ({kind})" for name, kind in answer.get("unseen", ())]
    parts = [f"clusterprof: recording to {out}"]
    if not answer:
        parts.append(f"the recorder has not answered within {READY_WITHIN_S:g} s and comes late")
    if answer.get("emulated"):
        parts.append("accelerators are EMULATED")
    if unseen:
        parts.append("not seen: " + ", ".join(unseen))
    return "; ".join([*parts, f"then: clusterprof analyze {out}"])


def record_here(
    out: Path | None,
    plan: Plan,
    duration_ns: int | None,
    pid: int | None,
    environ: Mapping[str, str],
) -> NoReturn:
    """Become the agent in the foreground: no command, the node or a running process is recorded."""
    job = identity.own_job() if pid is not None else None
    job = job or identity.launcher_job(environ, os.getppid()) or identity.own_job()
    run_dir = run_dir_path(choose_base(environ), identity.boot8(Roots()), job)
    ensure_run_dir(run_dir)
    write_private(run_dir / "plan.json", plan_to_json(plan))
    out = out if out is not None else Path(DEFAULT_OUT) / job
    arguments = [f"--run-dir={run_dir}", f"--out={out.absolute()}", f"--job={job}"]
    if duration_ns is not None:
        arguments.append(f"--duration={duration_ns / 1e9:.9f}s")
    if pid is not None:
        arguments.append(f"--pid={pid}")
    command = python_command(arguments)
    become(command[0], command, agent_environment(environ))
