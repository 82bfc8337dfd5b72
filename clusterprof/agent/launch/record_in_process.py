"""Record the process that asks for it: a notebook, or a script that cannot be prefixed.

The recorder is a process of its own, as for `record -- CMD`. The probe is loaded into the running
interpreter, and hooks what is imported already; processes that are started meanwhile load it
themselves.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clusterprof.agent.launch import identity
from clusterprof.agent.launch.election import PID_FILE, build_run_dir_path, choose_base
from clusterprof.agent.launch.launcher import (
    LaunchRequest,
    install_probe,
    start_recording,
    with_probe_path,
)
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import CannotStart, ClusterprofError, UsageError

_PROBE_MODULE = "_clusterprof_probe"
_END_TIMEOUT_S = 15.0
_POLL_S = 0.02


@contextmanager
def record_own_process(request: LaunchRequest) -> Iterator[Path | None]:
    """Record this process and those that it starts, until the context ends; gives the folder.

    The job comes first: when it cannot be recorded, or is recorded already, there is a warning, and
    the context runs without a recording and gives None. request: its command is not used.
    """
    saved = {name: os.environ.get(name) for name in ("PYTHONPATH", "CLUSTERPROF_RUN_DIR")}
    try:
        run_dir, folder = _begin_recording(request)
    except (ClusterprofError, OSError) as error:
        _restore_environment(saved)
        warnings.warn(f"clusterprof: not recording: {error}", RuntimeWarning, stacklevel=3)
        yield None
        return
    try:
        yield folder
    finally:
        _restore_environment(saved)
        sys.modules[_PROBE_MODULE].on = False  # type: ignore[attr-defined]
        _stop_recorder(run_dir)


def _begin_recording(request: LaunchRequest) -> tuple[Path, Path]:
    """Start the recorder and the probe; returns the run directory and the recording's folder.

    Raises: UsageError when this process is or was recorded already; CannotStart when the recorder
    does not start.
    """
    if _PROBE_MODULE in sys.modules:
        raise UsageError("this process is or was recorded already: once per process")
    job = identity.make_job_name(identity.find_script_name(sys.argv) or "python")
    base = choose_base(os.environ)
    run_dir = build_run_dir_path(base, identity.read_short_boot_id(Roots()), job)
    folder = start_recording(request, job, run_dir, os.environ, lambda line: None)
    if folder is None:
        raise CannotStart(f"another process records {job}")
    atexit.register(_remove_run_dir, run_dir, os.getpid())
    try:
        install_probe(run_dir, gpu_events=request.gpu_events, strict=False, stacks=request.stacks)
        os.environ.update(with_probe_path(run_dir, os.environ))
        _load_probe(run_dir / "probe")
    except (ClusterprofError, OSError):
        _stop_recorder(run_dir)
        raise
    return run_dir, folder


def _remove_run_dir(run_dir: Path, owner: int) -> None:
    """Remove the run directory at the end of the process; until then its probe may be needed."""
    if os.getpid() == owner:
        shutil.rmtree(run_dir, ignore_errors=True)


def _load_probe(folder: Path) -> None:
    """Start the probe as its bootstrap does at the start of an interpreter (probe.sitecustomize).

    Raises: CannotStart when it cannot be loaded.
    """
    package = folder / _PROBE_MODULE
    spec = importlib.util.spec_from_file_location(
        _PROBE_MODULE, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        raise CannotStart(f"the probe cannot be loaded from {package}")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[_PROBE_MODULE] = module
    spec.loader.exec_module(module)
    module.start(str(folder.parent), config)


def _restore_environment(saved: dict[str, str | None]) -> None:
    for name, value in saved.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _stop_recorder(run_dir: Path) -> None:
    """Ask the recorder of this run directory to end, and wait until it has written everything."""
    with suppress(OSError, ValueError, IndexError):
        pid = int((run_dir / PID_FILE).read_text(encoding="utf-8").split()[0])
        os.kill(pid, signal.SIGTERM)
        end_s = time.monotonic() + _END_TIMEOUT_S
        while time.monotonic() < end_s:
            state = identity.read_stat_fields("/proc", pid)
            if state is None or state[0] == b"Z":  # nobody reaps it in some containers
                return
            time.sleep(_POLL_S)
