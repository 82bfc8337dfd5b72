"""Whatever goes wrong in the probe: the job's output and exit code are those of a run without us.

The job is a Python that imports a stand-in for `torch.serialization`, so that a hook is installed
and called, writes to both outputs and exits with 7.
"""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import clusterprof.probe
from tests.support import job_python
from tests.support.probe_jobs import (
    CHECKPOINT,
    collect_output,
    install_probe,
    parse_ring,
    run_python,
)

JOB = """
import os, sys
if hasattr(os, "memfd_create"):
    del os.memfd_create  # the ring then is a file, for the test to read
import torch.serialization
torch.serialization.save([1], sys.argv[1])
print("out", sys.path, torch.serialization.save.__qualname__)
print("err", file=sys.stderr)
sys.exit(7)
"""
STAND_IN = "def save(obj, f):\n    open(f, 'w').write(repr(obj))\n"
ERRORS = ["RuntimeError('x')", "SystemExit(3)", "KeyboardInterrupt()", "ImportError('x')"]
ERRORS += ["MemoryError()", "SyntaxError('x')", "AttributeError('x')", "BaseException('x')"]
PLACES = [  # file of the probe, and a line after which it fails
    ("__init__.py", "    config = values\n"),
    ("import_hooks.py", "        for finder in list(sys.meta_path):\n"),
    ("hooks/checkpoint.py", '    """Wrap the save functions before other modules import them'),
    ("hooks/outermost_calls.py", "        inside, thread, part_count = mark\n"),
    ("hooks/wrap.py", "            if start and _probe.on:  # type: ignore[attr-defined]\n"),
    ("ring.py", '    problem = ""\n'),
    ("ring.py", 'def register_process(problem: str = "") -> None:\n'),
    ("hooks/gc_pauses.py", '    """Record pauses from now on; those before the first record'),
]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return a folder with the job and the stand-in for torch."""
    folder = tmp_path / "job"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text("")
    (folder / "torch/serialization.py").write_text(STAND_IN)
    (folder / "job.py").write_text(JOB)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return install_probe(tmp_path / "run")


def package(run_dir: Path) -> Path:
    return run_dir / "probe/_clusterprof_probe"


def same_as_without_us(job: Path, run_dir: Path, *options: str, **environ: str) -> None:
    command = (*options, "job.py", "saved")
    with_probe = run_python(*command, run_dir=run_dir, cwd=job, **environ)
    assert collect_output(with_probe) == collect_output(
        run_python(*command, run_dir=None, cwd=job, **environ)
    )
    assert with_probe.returncode == 7


def checkpoints(run_dir: Path) -> int:
    """Return how many checkpoints the rings hold: 1 when the probe was whole, 0 when off."""
    rings = [parse_ring(path.read_bytes()) for path in (run_dir / "rings").glob("*.ring")]
    return sum(len(ring.of(CHECKPOINT)) for ring in rings)


def test_an_intact_probe_records_without_affecting_the_job(job: Path, run_dir: Path) -> None:
    same_as_without_us(job, run_dir)
    assert checkpoints(run_dir) == 1


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("file", "line"), PLACES)
def test_a_probe_error_does_not_affect_the_job(
    job: Path, run_dir: Path, file: str, line: str, error: str
) -> None:
    source = (package(run_dir) / file).read_text()
    before, line, after = source.partition(line)
    assert line, f"{file} has changed: choose another line"
    if not line.endswith("\n"):
        rest, newline, after = after.partition("\n")
        line += rest + newline
    depth = " " * {"import_hooks.py": 12, "hooks/wrap.py": 16, "hooks/outermost_calls.py": 8}.get(
        file, 4
    )
    (package(run_dir) / file).write_text(f"{before}{line}{depth}raise {error}\n{after}")
    same_as_without_us(job, run_dir)
    if file not in ("import_hooks.py", "hooks/gc_pauses.py"):
        assert checkpoints(run_dir) == 0


def remove(path: Path) -> None:
    path.unlink() if path.is_file() else shutil.rmtree(path)


def make_unreadable(path: Path) -> None:
    """Put a folder in its place: permissions would not keep root from reading."""
    remove(path)
    path.mkdir()


FILES = ["", "__init__.py", "import_hooks.py", "ring.py", "layout.py"]
FILES += ["hooks", "hooks/__init__.py", "hooks/checkpoint.py", "hooks/wrap.py", "../config.json"]


@pytest.mark.parametrize("harm", [remove, make_unreadable])
@pytest.mark.parametrize("file", FILES)
def test_a_missing_or_unreadable_probe_file_leaves_the_job_unaffected(
    job: Path, run_dir: Path, file: str, harm: Callable[[Path], None]
) -> None:
    shutil.rmtree(package(run_dir) / "__pycache__")
    harm(package(run_dir) / file)
    same_as_without_us(job, run_dir)
    assert checkpoints(run_dir) == 0


@pytest.mark.parametrize("file", ["__init__.py", "import_hooks.py", "ring.py", "hooks/wrap.py"])
def test_a_syntax_error_in_the_probe_does_not_affect_jobs(
    job: Path, run_dir: Path, file: str
) -> None:
    (package(run_dir) / file).write_text("def broken(:\n")
    same_as_without_us(job, run_dir)
    assert checkpoints(run_dir) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "not json",
        '"format": x',
        '"format": 2\n"minimum_python": [3, 8]',
        '"format": 1\n"minimum_python": [9, 0]',
        "\0",
    ],
)
def test_an_unusable_configuration_disables_the_probe(job: Path, run_dir: Path, text: str) -> None:
    (run_dir / "probe/config.json").write_text(text)
    same_as_without_us(job, run_dir)
    assert checkpoints(run_dir) == 0


@pytest.mark.parametrize("option", ["-I", "-E", "-S", "-IS"])
def test_python_options_that_exclude_the_probe_are_respected(
    job: Path, run_dir: Path, option: str
) -> None:
    # An isolated Python does not look beside the script either, and with -S nobody is there to
    # take our folder off sys.path: both jobs print less.
    (job / "job.py").write_text("import sys; print('out'); sys.exit(7)")
    same_as_without_us(job, run_dir, option)
    assert checkpoints(run_dir) == 0


def test_the_disable_variable_turns_the_probe_off(job: Path, run_dir: Path) -> None:
    same_as_without_us(job, run_dir, CLUSTERPROF_DISABLE="1")
    assert checkpoints(run_dir) == 0


def test_a_run_directory_of_another_user_is_not_used(job: Path, run_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(run_dir, 65534, 65534)
    same_as_without_us(job, run_dir)
    assert checkpoints(run_dir) == 0


def test_unwritable_home_and_run_directories_do_not_affect_the_job(
    job: Path, run_dir: Path
) -> None:
    for folder in ("rings", "register"):
        remove(run_dir / folder)
        (run_dir / folder).write_text("a file where a folder should be")
    same_as_without_us(job, run_dir, HOME="/proc/nowhere")


@pytest.mark.parametrize("home", ["/proc/nowhere", "/sys", "/dev/null", ""])
def test_an_unwritable_home_directory_does_not_affect_recording(
    job: Path, run_dir: Path, home: str
) -> None:
    # Not even root creates a file in /sys; the others are absent, no folder, and not set.
    same_as_without_us(job, run_dir, HOME=home)
    assert checkpoints(run_dir) == 1


@pytest.mark.skipif(
    job_python.get_python_version() < (3, 11), reason="Python 3.10 raises on a copied traceback"
)
def test_a_job_traceback_contains_no_probe_frames(job: Path, run_dir: Path) -> None:
    text = (job / "job.py").read_text().replace("save([1], sys.argv[1])", "save([1], '/sys/x')")
    (job / "job.py").write_text(text)
    with_probe = run_python("job.py", run_dir=run_dir, cwd=job)
    assert collect_output(with_probe) == collect_output(run_python("job.py", run_dir=None, cwd=job))
    assert with_probe.returncode == 1
    assert b"in save" in with_probe.stderr


@pytest.mark.parametrize("error", ERRORS)
def test_a_probe_error_before_a_wrapped_call_is_hidden(
    job: Path, run_dir: Path, error: str
) -> None:
    hook = package(run_dir) / "hooks/outermost_calls.py"
    source = hook.read_text()
    changed = source.replace("record_mark, open_mark,", "record_mark, _fail,")
    assert changed != source, "hooks/outermost_calls.py has changed: choose another place"
    hook.write_text(f"{changed}\n\ndef _fail(*arguments, **keywords):\n    raise {error}\n")
    same_as_without_us(job, run_dir)
    assert checkpoints(run_dir) == 0


def test_a_job_without_free_descriptors_runs_unrecorded(job: Path, run_dir: Path) -> None:
    text = (job / "job.py").read_text()
    taken = "held = []\ntry:\n    while True: held.append(os.dup(0))\nexcept OSError: pass\n"
    text = text.replace("torch.serialization.save(", taken + "torch.serialization.save(")
    (job / "job.py").write_text(text)
    (job / "torch/serialization.py").write_text("def save(obj, f):\n    print(obj)\n")
    same_as_without_us(job, run_dir)
    assert checkpoints(run_dir) == 0


def test_a_missing_run_directory_does_not_affect_the_job(job: Path, run_dir: Path) -> None:
    shutil.rmtree(run_dir)
    (job / "job.py").write_text("import sys; print('out'); sys.exit(7)")
    same_as_without_us(job, run_dir)


def test_the_probe_start_imports_no_other_modules_or_threads(run_dir: Path) -> None:
    code = (
        "import sys; ours = [name for name in sys.modules if 'clusterprof' in name]\n"
        "print(len(sys.modules) - len(ours), sorted(sys.path), 'sitecustomize' in sys.modules)\n"
        "import threading, os; print(threading.active_count(), os.listdir('/proc/self/fd'))\n"
        "print(sys.path_importer_cache.keys() & {sys.argv[1]}, file=sys.stderr)\n"
        "print(len(ours), file=sys.stderr)"
    )
    folder = str(run_dir / "probe")
    with_probe = run_python("-c", code, folder, run_dir=run_dir)
    without = run_python("-c", code, folder, run_dir=None)
    assert with_probe.stdout == without.stdout
    assert with_probe.stderr == b"set()\n3\n"  # the package, its import hook, its table of hooks


def test_the_bootstrap_parses_on_python_3_4() -> None:
    source = Path(clusterprof.probe.__file__).parent / "sitecustomize.py"
    ast.parse(source.read_text(), feature_version=(3, 4))


def test_the_probe_parses_on_python_3_8() -> None:
    for path in Path(clusterprof.probe.__file__).parent.rglob("*.py"):
        ast.parse(path.read_text(), filename=str(path), feature_version=(3, 8))
