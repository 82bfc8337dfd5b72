"""The Python that runs the tests' jobs, and the packages that it has.

CLUSTERPROF_JOB_PYTHON names another one than that of the tests: one older than the tests' own
syntax, or with other versions of the frameworks in it (tests/tools/framework_matrix.py).
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import pytest

PYTHON = os.environ.get("CLUSTERPROF_JOB_PYTHON") or sys.executable
IS_ANOTHER = bool(os.environ.get("CLUSTERPROF_JOB_PYTHON"))


@functools.cache
def evaluate_in_job_python(expression: str, *modules: str) -> str:
    """Evaluate an expression that uses these modules in the jobs' Python."""
    code = "".join(f"import {module}\n" for module in modules) + f"print({expression})"
    return subprocess.run([PYTHON, "-c", code], check=True, capture_output=True, text=True).stdout


def get_python_version() -> tuple[int, ...]:
    """Return major and minor version of the jobs' Python."""
    return _parse_version(evaluate_in_job_python("'%d.%d' % sys.version_info[:2]", "sys"))


def has_module(module: str) -> bool:
    """Return whether a job could import a module; only its parent packages are imported."""
    try:
        spec = f"importlib.util.find_spec({module!r}) is not None"
        return evaluate_in_job_python(spec, "importlib.util") == "True\n"
    except subprocess.CalledProcessError:  # not even the package it would be part of
        return False


def require_torch(at_least: str = "2.0", reason: str = "") -> None:
    """Skip a whole test file without PyTorch, or with one that is too old for it."""
    if not has_module("torch"):
        message = "needs PyTorch: pip install 'clusterprof[torch]'"
        pytest.skip(message, allow_module_level=True)
    result = get_torch_version()
    if result < _parse_version(at_least):
        text = ".".join(str(number) for number in result)
        pytest.skip(f"PyTorch {text}: {reason}", allow_module_level=True)


@functools.cache
def get_torch_version() -> tuple[int, ...]:
    """Return major and minor version of the PyTorch that jobs import."""
    return _parse_version(
        evaluate_in_job_python("importlib.metadata.version('torch')", "importlib.metadata")
    )


def skip_free_threaded() -> pytest.MarkDecorator:
    """Return a mark that skips a test of stacks or of the lock in a free-threaded Python."""
    has_lock = "getattr(sys, '_is_gil_enabled', lambda: True)()"
    free = evaluate_in_job_python(has_lock, "sys") != "True\n"
    return pytest.mark.skipif(free, reason="without the interpreter lock no stacks are sampled")


def skip_torch_before(version: str, reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test for a PyTorch older than `version`."""
    old = has_module("torch") and get_torch_version() < _parse_version(version)
    return pytest.mark.skipif(old, reason=f"PyTorch before {version}: {reason}")


def skip_if_unsupported(stderr: bytes) -> None:
    """Skip a test whose job failed because this version of a framework lacks what the job uses."""
    lines = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    pytest.skip(
        f"the job does not run there without us either: {lines[-1][:120] if lines else '?'}"
    )


def drop_framework_logs(output: bytes) -> bytes:
    """Drop log lines that differ between runs: deprecations, times of day, how ranks met."""
    printed = rb"(?m)^([WI]\d{4} [\d:.]+ |\[Gloo\] Rank \d).*\n"
    return re.sub(printed, b"", output) if IS_ANOTHER else output


def _parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.strip().split(".")[:2])
