"""Jobs of real frameworks under the probe: what `make test-frameworks` runs and CI leaves out."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support import job_python
from tests.support.job_python import has_module
from tests.support.probe_jobs import (
    DATA_WAIT,
    HOOK_NOTE,
    STEP,
    WAIT,
    Ring,
    RingWatcher,
    install_probe,
    run_python,
)

CHECKPOINT, EVAL, COMPILE = 5, 12, 13
LIVENESS_SECONDS = 900  # some import for minutes, or compile, on a machine at work on other things


def require_modules(*libraries: str) -> None:
    """Skip a whole file whose library is not there, and say how to get it."""
    missing = [name for name in libraries if not has_module(name)]
    if missing:
        reason = f"needs {', '.join(missing)}: make test-frameworks"
        pytest.skip(reason, allow_module_level=True)


def make_one_rank_environment() -> dict[str, str]:
    """Return what a launcher sets for a job of one rank without a GPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def run_with_and_without_probe(code: str, tmp_path: Path, **environ: str) -> list[Ring]:
    """Run a job with the probe and without it; check that the output is the same; return all rings.

    The job is a file, so that workers can be spawned, and gets a folder of its own to write to.
    """
    (tmp_path / "train.py").write_text(code + WAIT)
    run_dir = install_probe(tmp_path / "run")
    with RingWatcher(run_dir) as watcher:
        (tmp_path / "with").mkdir()
        ours = _run_job(tmp_path, "with", run_dir, environ)
    (tmp_path / "without").mkdir()
    theirs = _run_job(tmp_path, "without", None, environ)
    if job_python.IS_ANOTHER and theirs.returncode > 0:
        job_python.skip_if_unsupported(theirs.stderr)
    assert ours.returncode == 0, ours.stderr.decode()
    assert (ours.returncode, _clean_stdout(ours)) == (theirs.returncode, _clean_stdout(theirs)), (
        theirs
    )
    rings = watcher.read_rings()
    assert [ring.switched_off for ring in rings] == [0] * len(rings)
    return rings


def run_without_probe(code: str, folder: Path, **environ: str) -> None:
    """Run a job without the probe, for what it leaves behind."""
    (folder / "train.py").write_text(code)
    (folder / "alone").mkdir()
    _run_job(folder, "alone", None, environ)


def _run_job(
    folder: Path, own: str, run_dir: Path | None, environ: dict[str, str]
) -> subprocess.CompletedProcess[bytes]:
    job = ("train.py", str(folder / own))
    return run_python(*job, run_dir=run_dir, cwd=folder, seconds=LIVENESS_SECONDS, **environ)


def _clean_stdout(job: subprocess.CompletedProcess[bytes]) -> bytes:
    """Return what a job printed, without lines that hold times or tell of a build."""
    dropped = rb"\{|\[20\d\d-|ninja: |\[\d+/\d+\] |Time to load "
    return re.sub(rb"(?m)^(" + dropped + rb").*\n", b"", job.stdout)


def find_trainer_ring(rings: list[Ring]) -> Ring:
    """Return the only ring with steps."""
    (result,) = [ring for ring in rings if ring.of(STEP)]
    return result


def list_steps(ring: Ring) -> list[tuple[int, int, int]]:
    """Return who ended each step, and how many samples and tokens came in during it."""
    steps = ring.of(STEP)
    assert [step.a for step in steps] == list(range(len(steps)))
    return [(step.b, step.c, step.d) for step in steps]


def list_hooked_modules(ring: Ring) -> set[str]:
    """Return the modules whose hooks stand; fails when one could not be put in place."""
    from clusterprof.probe.hooks import HOOKS

    notes = ring.of(HOOK_NOTE)
    assert [HOOKS[note.a] for note in notes if not note.b] == []
    return {HOOKS[note.a][0] for note in notes}


def count_waits_inside(ring: Ring, kind: int) -> list[int]:
    """Return how many data waits lie in each span of a kind."""
    waits = ring.of(DATA_WAIT)
    return [
        sum(span.start_ns <= wait.start_ns and wait.end_ns <= span.end_ns for wait in waits)
        for span in ring.of(kind)
    ]


def measure_folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
