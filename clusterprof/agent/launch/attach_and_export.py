"""`record --export`: record a process that runs already, before it starts what is to be recorded.

A prolog of a resource manager runs before the job, in a process of its own, so it cannot become the
job's command as `record -- CMD` does. It knows the process that will:

    task, pid 4711      waits for the prolog              | becomes the user's program
      prolog            record --export slurm --pid 4711  |
                        prints "export PYTHONPATH=…"      -> environment of pid 4711

The process is registered as if it had called `record` itself, and the recording ends with it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping

from clusterprof.agent.launch import identity
from clusterprof.agent.launch.election import find_run_dir
from clusterprof.agent.launch.launcher import LaunchRequest, build_environment, start_recording
from clusterprof.errors import CannotStart


def record_process(
    request: LaunchRequest, pid: int, environ: Mapping[str, str], print_line: Callable[[str], None]
) -> dict[str, str]:
    """Start or join the recording of a running process.

    Returns the variables that must be added to the environment of the programs that it starts, so
    that they load the probe. request: its command is not used. environ: that of the job.
    Raises: CannotStart when there is no such process, when it is another user's, or when the
    recording cannot begin.
    """
    fields = identity.read_stat_fields("/proc", pid)
    if fields is None:
        raise CannotStart(f"--pid {pid}: there is no such process", "give a process that runs")
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError as error:
        raise CannotStart(f"--pid {pid}: {error.strerror}", "give a process that runs") from error
    if owner != os.geteuid():
        raise CannotStart(
            f"--pid {pid} belongs to the user {owner}: its programs would not load our probe",
            "run this command as that user",
        )
    parent_pid = int(fields[1])
    job = identity.find_launcher_job(environ, parent_pid) or identity.make_job_name(f"pid-{pid}")
    run_dir = find_run_dir(environ, job)
    try:
        start_recording(request, job, run_dir, environ, print_line, pid)
        environment = build_environment(request, run_dir, environ, print_line)
    except OSError as error:
        raise CannotStart(f"{run_dir}: {error.strerror or error}") from error
    return {name: value for name, value in environment.items() if environ.get(name) != value}


def format_exports(variables: Mapping[str, str], form: str) -> str:
    """Format variables as lines that a shell evaluates ("sh"), or that Slurm reads ("slurm").

    Slurm takes everything behind the equals sign as it is, to the end of the line. A value that
    holds a line end cannot be written in its form, and is left out.
    """
    if form == "sh":
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
    else:
        lines = [
            f"export {name}={value}\n" for name, value in variables.items() if "\n" not in value
        ]
    return "".join(lines)
