"""Puts the probe where the Pythons of a job find it.

`install_probe` fills `<run dir>/probe`, `environment` points PYTHONPATH at it, and
`why_not_injectable` says beforehand when a command's Python would not look there.
"""

from __future__ import annotations

import os
import py_compile
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterprof.errors import CannotStart

PACKAGE = "_clusterprof_probe"
FORMAT = 1
MINIMUM_PYTHON = (3, 8)

# What every Python of the job loads at its start: compiled beforehand, for images that forbid
# Python to write bytecode. Another Python than ours compiles them for itself.
_AT_START = (
    "sitecustomize.py",
    f"{PACKAGE}/__init__.py",
    f"{PACKAGE}/importer.py",
    f"{PACKAGE}/hooks/__init__.py",
)

_SOURCE = Path(__file__).resolve().parent.parent / "probe"

# Commands that start the command that follows in their own arguments.
_NODE_LAUNCHERS = ("srun", "mpirun", "mpiexec", "numactl", "taskset", "chrt", "nice", "ionice")
_LAUNCHERS = {*_NODE_LAUNCHERS, "env", "nohup", "setsid", "stdbuf", "time", "timeout", "uv"}
_OPTIONS_WITH_VALUE = frozenset({"-X", "-W", "--check-hash-based-pycs"})


def install_probe(run_dir: Path, *, gpu_events: bool, strict: bool) -> None:
    """Copy the probe into the run directory, or leave the one that another rank put there.

    run_dir: exists, is ours. gpu_events: let the probe record events on the job's CUDA stream.
    strict: kept in the configuration for those who read it; the probe itself never insists.
    Raises CannotStart when the files cannot be written.
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
        shutil.copytree(_SOURCE, temporary / PACKAGE, ignore=ignore)
        shutil.copy(_SOURCE / "sitecustomize.py", temporary / "sitecustomize.py")
        for name in _AT_START:
            py_compile.compile(str(temporary / name))
        (temporary / "config.json").write_text(_config(gpu_events, strict))
        os.rename(temporary, target)  # onto nothing or an empty folder: all of it or nothing
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if (target / "config.json").is_file():  # another rank of this node was faster
            return
        raise CannotStart(
            f"the probe cannot be put into {run_dir}: {error.strerror or error}",
            "free some space there, or record with --inject off",
        ) from error


def _config(gpu_events: bool, strict: bool) -> str:
    """Write config.json: one key and one plain value to a line, which is how the probe reads it."""
    words = {True: "true", False: "false"}
    major, minor = MINIMUM_PYTHON
    return (
        "{\n"
        f'"format": {FORMAT},\n'
        f'"minimum_python": [{major}, {minor}],\n'
        f'"gpu_events": {words[gpu_events]},\n'
        f'"strict": {words[strict]}\n'
        "}\n"
    )


def environment(run_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the probe first on PYTHONPATH and CLUSTERPROF_RUN_DIR set."""
    result = dict(environ)
    probe = str(run_dir / "probe")
    path = result.get("PYTHONPATH", "")
    if probe not in path.split(os.pathsep):
        result["PYTHONPATH"] = probe + (os.pathsep + path if path else "")
    result["CLUSTERPROF_RUN_DIR"] = str(run_dir)
    return result


def why_not_injectable(command: Sequence[str]) -> str | None:
    """Return why the Python that `command` starts would not load the probe; None if it may.

    Looks at the options of the interpreter, also behind launchers such as `env` or `srun`, and at
    the first line of a script. What a shell script or a binary starts is not known beforehand.
    """
    words = list(command)
    if words and Path(words[0]).name in _LAUNCHERS:
        start = next((i for i, word in enumerate(words) if _is_python(word)), len(words))
        words = words[start:]
    if not words:
        return None
    if not _is_python(words[0]):
        words = _shebang(words[0])
        start = next((i for i, word in enumerate(words) if _is_python(word)), len(words))
        words = words[start:]
    return _blocking_option(words)


def _is_python(word: str) -> bool:
    name = Path(word).name
    for stem in ("python", "pypy"):
        if name.startswith(stem) and not name[len(stem) :].strip("0123456789.t"):
            return True
    return False


def _blocking_option(words: Sequence[str]) -> str | None:
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


def _shebang(word: str) -> list[str]:
    path = shutil.which(word)
    if path is None:
        return []
    try:
        with open(path, "rb") as file:
            line = file.readline(512)
    except OSError:
        return []
    return line[2:].decode("utf-8", "replace").split() if line.startswith(b"#!") else []
