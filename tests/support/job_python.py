"""Which Python runs the jobs of these tests, and what is installed there.

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
def ask(expression: str, *modules: str) -> str:
    """Return what the jobs' Python says to an expression that uses these modules."""
    code = "".join(f"import {module}\n" for module in modules) + f"print({expression})"
    return subprocess.run([PYTHON, "-c", code], check=True, capture_output=True, text=True).stdout


def version() -> tuple[int, ...]:
    """Return major and minor version of the jobs' Python."""
    return _numbers(ask("'%d.%d' % sys.version_info[:2]", "sys"))


def is_there(module: str) -> bool:
    """Return whether a job could import a module; nothing is imported but what it is part of."""
    try:
        spec = f"importlib.util.find_spec({module!r}) is not None"
        return ask(spec, "importlib.util") == "True\n"
    except subprocess.CalledProcessError:  # not even the package it would be part of
        return False


def needs_torch(at_least: str = "2.0", reason: str = "") -> None:
    """Skip a whole file without PyTorch, or with one from before what the file tests was there."""
    if not is_there("torch"):
        message = "needs PyTorch: pip install 'clusterprof[torch]'"
        pytest.skip(message, allow_module_level=True)
    result = torch_version()
    if result < _numbers(at_least):
        text = ".".join(str(number) for number in result)
        pytest.skip(f"PyTorch {text}: {reason}", allow_module_level=True)


@functools.cache
def torch_version() -> tuple[int, ...]:
    """Return major and minor version of the PyTorch that jobs import."""
    return _numbers(ask("importlib.metadata.version('torch')", "importlib.metadata"))


def torch_before(version: str, reason: str) -> pytest.MarkDecorator:
    """Return what skips a test for a PyTorch older than `version`."""
    old = is_there("torch") and torch_version() < _numbers(version)
    return pytest.mark.skipif(old, reason=f"PyTorch before {version}: {reason}")


def skip_what_cannot_run(stderr: bytes) -> None:
    """Skip a test whose job failed without us: frameworks of another version lack what it uses."""
    lines = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    pytest.skip(
        f"the job does not run there without us either: {lines[-1][:120] if lines else '?'}"
    )


def without_log(output: bytes) -> bytes:
    """Drop what another version logs: what it misses, by the time of day, and how ranks met."""
    printed = rb"(?m)^([WI]\d{4} [\d:.]+ |\[Gloo\] Rank \d).*\n"
    return re.sub(printed, b"", output) if IS_ANOTHER else output


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.strip().split(".")[:2])
