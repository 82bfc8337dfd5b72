"""`record -- CMD`: register, elect, start the recorder if this process is elected, and exec CMD.

The training job has priority: if the recording fails, CMD still runs, in this very
process, with the signals, descriptors and environment it would have had.

Starts the recorder detached, in its own session: a double fork, so that the workload that
`record` turns into never has a child it did not start; a pipe, so that the launcher learns
within moments whether recording began and what is missing.

Installs the probe where the job's Python processes load it: `install_probe` fills
`<run dir>/probe`, `with_probe_path` puts it on PYTHONPATH, and `find_injection_obstacle`
reports in advance why the Python of a command would not load it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import marshal
import os
import py_compile
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

import clusterprof
from clusterprof.agent.launch import identity
from clusterprof.agent.launch.election import (
    FOLDER_FILE,
    build_run_dir_path,
    choose_base,
    ensure_run_dir,
    find_run_dir,
    join_recorder,
    write_private_file,
)
from clusterprof.agent.launch.nccl import reserve_output, with_nccl_variables
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.options import DEFAULT_OUT, Plan, encode_plan
from clusterprof.errors import EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, CannotStart, ClusterprofError

_MAX_REPLY_BYTES = 65536
ERROR_LOG_NAME = "agent.err"

# Isolated mode: neither PYTHONPATH nor the job's working directory decides what code runs in
# the recorder. The folder this package was loaded from is searched after the standard library
# but before installed packages, which may contain another clusterprof.
_AGENT_BOOT_CODE = (
    "import sys; at = [p.endswith('-packages') for p in sys.path + ['-packages']].index(True); "
    "sys.path[at:at] = sys.argv.pop(1).split(chr(58)); "
    "from clusterprof.agent.__main__ import main; sys.exit(main())"
)


def build_agent_command(arguments: Sequence[str]) -> list[str]:
    """Build the command line that runs `clusterprof.agent` with these arguments."""
    roots = [str(Path(module.__file__ or "").parent.parent) for module in (clusterprof, msgspec)]
    return [
        sys.executable,
        "-I",
        "-c",
        _AGENT_BOOT_CODE,
        ":".join(dict.fromkeys(roots)),
        *arguments,
    ]


def build_agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Build the environment that the agent is started with.

    The C library reserves 64 MiB of address space for the small allocations of every
    thread, and the recorder's address space is bounded: with a thread per GPU on eight GPUs
    little is left.
    """
    return {"MALLOC_ARENA_MAX": "2", **environ, "CLUSTERPROF_DISABLE": "1"}


def start_detached_agent(
    arguments: Sequence[str], run_dir: Path, lock: int, timeout_s: float
) -> dict[str, Any]:
    """Start the agent and return its reply, {} when none arrives in time.

    lock: descriptor of the recorder's lock, which the agent inherits.
    Raises: CannotStart when the agent reports that it cannot record, or ends without a reply.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        command = [*build_agent_command(arguments), f"--lock-fd={lock}", f"--ready-fd={writer}"]
        child = os.fork()
        if child == 0:
            _replace_with_agent(command, run_dir, (lock, writer))
    finally:
        os.close(writer)
    try:
        os.waitpid(child, 0)
        reply = _read_reply(reader, timeout_s)
    finally:
        os.close(reader)
    if reply is None:
        return {}
    if not reply:
        raise CannotStart(
            "the recorder ended: " + _read_last_error(run_dir), "try clusterprof doctor"
        )
    message: dict[str, Any] = json.loads(reply)
    if "error" in message:
        raise CannotStart(str(message["error"]), str(message.get("remedy", "")))
    return message


def _replace_with_agent(command: list[str], run_dir: Path, kept_fds: Sequence[int]) -> NoReturn:
    """In the forked child: detach from everything of the workload and execute the agent."""
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.chdir("/")
        os.umask(0o077)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        errors = os.open(run_dir / ERROR_LOG_NAME, flags, 0o600)
        null = os.open(os.devnull, os.O_RDWR)
        for source, target in ((null, 0), (null, 1), (errors, 2)):
            os.dup2(source, target)
        low = 3
        for descriptor in sorted(kept_fds):
            os.closerange(low, descriptor)
            os.set_inheritable(descriptor, True)
            low = descriptor + 1
        os.closerange(low, os.sysconf("SC_OPEN_MAX"))
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            with contextlib.suppress(OSError, ValueError):  # reserved by the C library
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(command[0], command, build_agent_environment(os.environ))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(127)


def _read_reply(reader: int, timeout_s: float) -> bytes | None:
    """Read the reply until the other end is closed; None when it stays open too long."""
    deadline = time.monotonic() + timeout_s
    reply = b""
    while True:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not select.select([reader], (), (), remaining_s)[0]:
            return None
        chunk = os.read(reader, _MAX_REPLY_BYTES)
        if not chunk or len(reply) > _MAX_REPLY_BYTES:
            return reply
        reply += chunk


def _read_last_error(run_dir: Path) -> str:
    """Return the error of the last traceback, else the last line: an abort may follow an error."""
    try:
        lines = (run_dir / ERROR_LOG_NAME).read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    errors = [line for before, line in pairwise(lines) if before[:1] == " " != line[:1]] or lines
    return errors[-1][:300] if errors else "it left no message"


PROBE_PACKAGE = "_clusterprof_probe"
CONFIG_FORMAT = 1
MINIMUM_PYTHON = (3, 8)

# Files that every Python of the job loads at its start: compiled in advance, for images in which
# Python may not write bytecode. A different Python version compiles them for itself.
_COMPILED_FILES = (
    "sitecustomize.py",
    f"{PROBE_PACKAGE}/__init__.py",
    f"{PROBE_PACKAGE}/import_hooks.py",
    f"{PROBE_PACKAGE}/hooks/__init__.py",
)

_PROBE_SOURCE = Path(__file__).resolve().parents[2] / "probe"

# Commands that start another command given in their own arguments.
_NODE_LAUNCHERS = ("srun", "mpirun", "mpiexec", "numactl", "taskset", "chrt", "nice", "ionice")
# PyTorch's profiler prints lines of its own where it begins and ends; from 6 on it prints none.
_PROFILER_LOG_VARIABLE, _QUIET = "KINETO_LOG_LEVEL", "6"
_LAUNCHERS = {*_NODE_LAUNCHERS, "env", "nohup", "setsid", "stdbuf", "time", "timeout", "uv"}
_OPTIONS_WITH_VALUE = frozenset({"-X", "-W", "--check-hash-based-pycs"})


StackPaths = Literal["full", "hash", "names"]
_STACK_PATHS: tuple[StackPaths, ...] = ("full", "hash", "names")  # in the order of probe/stacks.py


def install_probe(
    run_dir: Path,
    *,
    gpu_events: bool,
    strict: bool,
    stacks: StackPaths | None = "full",
    dive: bool = False,
) -> None:
    """Copy the probe into the run directory, unless another rank has done so.

    run_dir: existing and owned by us. gpu_events: let the probe record events on the
    streams of the job's device. stacks: how files are named in sampled Python stacks (by path, by
    its hash, or by the base name alone); None = no stacks are sampled. strict: written to the
    configuration for its readers; the probe itself never enforces it. dive: let the probe use
    PyTorch's profiler.
    Raises: CannotStart when the files cannot be written.
    """
    target = run_dir / "probe"
    if (target / "config.json").is_file():
        return
    temporary = run_dir / f"probe.{os.getpid()}.tmp"
    try:
        for folder in ("rings", "register", "groups", "devices"):
            (run_dir / folder).mkdir(mode=0o700, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        ignore = shutil.ignore_patterns("__pycache__", "sitecustomize.py")
        shutil.copytree(_PROBE_SOURCE, temporary / PROBE_PACKAGE, ignore=ignore)
        shutil.copy(_PROBE_SOURCE / "sitecustomize.py", temporary / "sitecustomize.py")
        for name in _COMPILED_FILES:
            _require_whole_bytecode(py_compile.compile(str(temporary / name)) or "")
        (temporary / "config.json").write_text(_format_config(gpu_events, strict, stacks, dive))
        os.rename(temporary, target)  # target missing or an empty folder: atomic
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if (target / "config.json").is_file():  # another rank of this node has installed it
            return
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror or error
        raise CannotStart(
            f"the probe cannot be put into {run_dir}: {reason}",
            "free some space there, or record with --inject off",
        ) from error


def _require_whole_bytecode(path: str) -> None:
    """Raise OSError for bytecode that was cut short, which Python before 3.12.8 does not notice."""
    try:
        marshal.loads(Path(path).read_bytes()[16:])
    except (EOFError, ValueError, TypeError):
        raise OSError(errno.EFBIG, "compiled files were cut short") from None


def _format_config(gpu_events: bool, strict: bool, stacks: StackPaths | None, dive: bool) -> str:
    """Return config.json: one key and one plain value per line, as the probe parses it."""
    words = {True: "true", False: "false"}
    major, minor = MINIMUM_PYTHON
    return (
        "{\n"
        f'"format": {CONFIG_FORMAT},\n'
        f'"minimum_python": [{major}, {minor}],\n'
        f'"gpu_events": {words[gpu_events]},\n'
        f'"dive": {words[dive]},\n'
        f'"stacks": {words[stacks is not None]},\n'
        f'"stack_paths": {_STACK_PATHS.index(stacks or "full")},\n'
        f'"strict": {words[strict]}\n'
        "}\n"
    )


def with_probe_path(run_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the probe first on PYTHONPATH and CLUSTERPROF_RUN_DIR set."""
    result = dict(environ)
    probe = str(run_dir / "probe")
    path = result.get("PYTHONPATH", "")
    if probe not in path.split(os.pathsep):
        result["PYTHONPATH"] = probe + (os.pathsep + path if path else "")
    result["CLUSTERPROF_RUN_DIR"] = str(run_dir)
    return result


def find_injection_obstacle(command: Sequence[str]) -> str | None:
    """Return why the Python that `command` starts would not load the probe; None if it may.

    Checks the options of the interpreter, also after launchers like `env` or `srun`, and
    the first line of a script. What a shell script or a binary starts is not known in
    advance.
    """
    words = list(command)
    if words and Path(words[0]).name in _LAUNCHERS:
        start = next((i for i, word in enumerate(words) if _is_python(word)), len(words))
        words = words[start:]
    if not words:
        return None
    if not _is_python(words[0]):
        words = _read_shebang(words[0])
        start = next((i for i, word in enumerate(words) if _is_python(word)), len(words))
        words = words[start:]
    return _find_blocking_option(words)


def _is_python(word: str) -> bool:
    name = Path(word).name
    for stem in ("python", "pypy"):
        if name.startswith(stem) and not name[len(stem) :].strip("0123456789.t"):
            return True
    return False


def _find_blocking_option(words: Sequence[str]) -> str | None:
    reasons = {
        "I": "python -I ignores PYTHONPATH",
        "E": "python -E ignores PYTHONPATH",
        "S": "python -S does not load sitecustomize",
    }
    position = 1
    while position < len(words):
        word = words[position]
        if not word.startswith("-") or word == "-":
            return None
        if word in _OPTIONS_WITH_VALUE:
            position += 1
        elif not word.startswith("--"):
            for letter in word[1:]:
                if letter in reasons:
                    return reasons[letter]
                if letter in "cmXW":
                    break  # the rest of the word is this option's value
            if word[1:2] in ("c", "m") or word[-1] in ("c", "m"):
                return None
        position += 1
    return None


def _read_shebang(word: str) -> list[str]:
    path = shutil.which(word)
    if path is None:
        return []
    try:
        with open(path, "rb") as file:
            line = file.readline(512)
    except OSError:
        return []
    return line[2:].decode("utf-8", "replace").split() if line.startswith(b"#!") else []


Injection = Literal["auto", "off", "strict"]
READY_TIMEOUT_S = 2.0
STRICT_READY_TIMEOUT_S = 10.0
RUN_DIR_VARIABLE = "CLUSTERPROF_RUN_DIR"


class CannotExecute(ClusterprofError):  # noqa: N818 - named like its siblings
    """The command cannot be executed or does not exist."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The request of `record -- CMD`."""

    command: Sequence[str]
    out: Path | None
    """None = ./clusterprof-out/<job>."""
    plan: Callable[[], Plan]
    """Called only by the process that starts the recorder."""
    inject: Injection = "auto"
    gpu_events: bool = True
    stacks: StackPaths | None = "full"
    """How files are named in sampled Python stacks; None = no stacks are sampled."""
    duration_ns: int | None = None
    nccl: bool = False
    """Let PyTorch and NCCL record their operations, where the user has not set that up."""
    dive: bool = False
    """Let the probe use PyTorch's profiler where a rank stands out."""


def record_command(
    request: LaunchRequest, environ: Mapping[str, str], print_line: Callable[[str], None]
) -> NoReturn:
    """Start or join the recording of this node and execute the command; never returns.

    print_line: prints one line to stderr.
    Raises: CannotExecute (exit code 126 or 127) without having recorded anything;
    CannotStart only under `inject="strict"`.
    """
    program = resolve_command(request.command[0], environ)
    job = identity.find_launcher_job(environ, os.getppid()) or identity.find_command_job(
        request.command
    )
    job = job or identity.make_job_name(identity.find_script_name(request.command))
    environment, missing = dict(environ), "not recording"
    try:
        run_dir = find_run_dir(environ, job)
        folder = start_recording(request, job, run_dir, environ, print_line)
        if folder is None and environ.get(RUN_DIR_VARIABLE) == str(run_dir):
            print_line(_format_joined_line(run_dir))
        environment[RUN_DIR_VARIABLE], missing = str(run_dir), "no spans"
        environment = build_environment(request, run_dir, environ, print_line)
    except Exception as error:  # whatever it is, a lack of memory too: the job runs
        if request.inject == "strict":
            raise error if isinstance(error, CannotStart) else CannotStart(str(error)) from error
        problem = error if isinstance(error, ClusterprofError | OSError) else repr(error)
        print_line(f"clusterprof: {missing}: {problem}")
    replace_process(program, request.command, environment)


def resolve_command(name: str, environ: Mapping[str, str]) -> str:
    """Return the path of a command as a shell finds it.

    Raises: CannotExecute when it does not exist, is a directory or is not executable.
    """
    search_path = environ.get("PATH", os.defpath)
    program = name if "/" in name else shutil.which(name, path=search_path)
    if program is None or not os.path.exists(program):
        raise CannotExecute(f"{name}: command not found", EXIT_NOT_FOUND)
    if os.path.isdir(program):
        raise CannotExecute(f"{name}: is a directory", EXIT_NOT_EXECUTABLE)
    if not os.access(program, os.X_OK):
        raise CannotExecute(f"{name}: permission denied", EXIT_NOT_EXECUTABLE)
    return program


def replace_process(program: str, command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Execute the command in this process, with the signal handlers it had before Python.

    Raises: CannotExecute when the system cannot execute it.
    """
    # Python ignores these two signals at its start, and ignored signals stay ignored across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execve(program, list(command), dict(environ))
    except OSError as error:
        if error.errno == errno.ENOEXEC:  # a script without an interpreter line
            with contextlib.suppress(OSError):
                os.execve("/bin/sh", ["/bin/sh", program, *command[1:]], dict(environ))
        code = EXIT_NOT_FOUND if error.errno == errno.ENOENT else EXIT_NOT_EXECUTABLE
        raise CannotExecute(f"{command[0]}: {(error.strerror or '').lower()}", code) from error


def start_recording(
    request: LaunchRequest,
    job: str,
    run_dir: Path,
    environ: Mapping[str, str],
    print_line: Callable[[str], None],
    pid: int | None = None,
) -> Path | None:
    """Register a process, and start the recorder if no other process has.

    pid: None = this process. Returns the folder of the recording, None if another recorder runs.
    Raises: CannotStart when the recorder cannot start.
    """

    def register() -> None:
        content = json.dumps(build_registration(environ, pid)).encode()
        write_private_file(run_dir / "register" / f"{pid or os.getpid()}.json", content)

    lock = join_recorder(run_dir, register)
    if lock is None:
        return None
    try:
        out = request.out if request.out is not None else Path(DEFAULT_OUT) / job
        write_private_file(run_dir / "plan.json", encode_plan(request.plan()))
        arguments = [f"--run-dir={run_dir}", f"--out={out.absolute()}", f"--job={job}", "--follow"]
        if request.duration_ns is not None:
            arguments.append(f"--duration={request.duration_ns / 1e9:.9f}s")
        timeout_s = STRICT_READY_TIMEOUT_S if request.inject == "strict" else READY_TIMEOUT_S
        _make_parents(out.absolute())
        if request.nccl:
            reserve_output(run_dir)
        reply = start_detached_agent(arguments, run_dir, lock, timeout_s)
    finally:
        os.close(lock)
    if not reply and request.inject == "strict":
        raise CannotStart(f"the recorder did not answer within {timeout_s:g} s")
    print_line(format_start_line(out, reply))
    return find_chosen_folder(out, reply)


def _make_parents(out: Path) -> None:
    """Create the folders above a recording with the user's own umask, never writable by others.

    They are shared by many recordings: the mode of a recording is not theirs.
    """
    umask = os.umask(0o077)
    os.umask(umask | 0o022)
    with contextlib.suppress(OSError):  # the recorder reports why the folder cannot be used
        out.parent.mkdir(parents=True, exist_ok=True)
    os.umask(umask)


def build_environment(
    request: LaunchRequest,
    run_dir: Path,
    environ: Mapping[str, str],
    print_line: Callable[[str], None],
) -> dict[str, str]:
    """Install the probe, and return the environment in which programs load it.

    Raises: CannotStart when the probe cannot be installed, or under `inject="strict"` when the
    command would not load it.
    """
    if request.nccl:
        environ = with_nccl_variables(environ, run_dir, request.duration_ns is not None)
    if request.inject == "off":
        return {**environ, RUN_DIR_VARIABLE: str(run_dir)}
    obstacle = find_injection_obstacle(request.command)
    if obstacle is not None:
        if request.inject == "strict":
            raise CannotStart(f"no spans: {obstacle}", "remove the option, or --inject off")
        print_line(f"clusterprof: no spans: {obstacle}")
    install_probe(
        run_dir,
        gpu_events=request.gpu_events,
        strict=request.inject == "strict",
        stacks=request.stacks,
        dive=request.dive,
    )
    if request.dive:
        environ = {_PROFILER_LOG_VARIABLE: _QUIET, **environ}
    return with_probe_path(run_dir, environ)


def build_registration(environ: Mapping[str, str], pid: int | None = None) -> dict[str, Any]:
    """Return the content of a process's `register/<pid>.json` (docs/design/recording-format.md).

    pid: None = this process.
    """
    variables = identity.select_launcher_variables(environ)
    pid = pid or os.getpid()
    return {
        "pid": pid,
        "started_ticks": identity.read_start_ticks("/proc", pid),
        "role": "command",
        "variables": variables,
        "device": "",
        "node_local_rank": identity.find_node_local_rank(variables),
    }


def format_start_line(out: Path, reply: Mapping[str, Any]) -> str:
    """Format the line printed at the start: output folder, coverage gaps, the analyze command."""
    unavailable = [f"{name} ({kind})" for name, kind in reply.get("unseen", ())]
    folder = find_chosen_folder(out, reply)
    parts = [f"clusterprof: recording to {folder}"]
    if folder != out:
        parts.append(f"{out} holds another job")
    if not reply:
        parts.append(f"the recorder did not answer within {READY_TIMEOUT_S:g} s and may start late")
    if reply.get("emulated"):
        parts.append("accelerators are EMULATED")
    parts += reply.get("notes", ())
    if unavailable:
        parts.append("not seen: " + ", ".join(unavailable))
    return "; ".join([*parts, f"then: clusterprof analyze {folder}"])


def _format_joined_line(run_dir: Path) -> str:
    """Format the line of a command that is recorded already, for example by a prolog."""
    try:
        folder = os.fsdecode((run_dir / FOLDER_FILE).read_bytes())
    except OSError:
        folder = "a folder that is not known yet"
    return f"clusterprof: this job is recorded already, to {folder}: -o and --profile are not used"


def find_chosen_folder(out: Path, reply: Mapping[str, Any]) -> Path:
    """Return the folder that the recorder chose: `out`, or one in it."""
    folder = Path(reply["folder"]).parent if reply.get("folder") else out.absolute()
    return out / folder.relative_to(out.absolute()) if folder != out.absolute() else out


def record_in_foreground(
    out: Path | None,
    plan: Plan,
    duration_ns: int | None,
    pid: int | None,
    environ: Mapping[str, str],
) -> NoReturn:
    """Become the agent in the foreground and record the node or a running process, no command.

    Raises: CannotStart when the run directory cannot be used; CannotExecute when Python
    cannot start.
    """
    job = identity.make_job_name(f"pid-{pid}") if pid is not None else None
    job = job or identity.find_launcher_job(environ, os.getppid()) or identity.make_job_name()
    run_dir = build_run_dir_path(choose_base(environ), identity.read_short_boot_id(Roots()), job)
    ensure_run_dir(run_dir)
    write_private_file(run_dir / "plan.json", encode_plan(plan))
    out = out if out is not None else Path(DEFAULT_OUT) / job
    arguments = [f"--run-dir={run_dir}", f"--out={out.absolute()}", f"--job={job}"]
    if duration_ns is not None:
        arguments.append(f"--duration={duration_ns / 1e9:.9f}s")
    if pid is not None:
        arguments.append(f"--pid={pid}")
    command = build_agent_command(arguments)
    replace_process(command[0], command, build_agent_environment(environ))
