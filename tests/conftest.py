"""Fixtures: recorded machines, files that are open, the rights of an ordinary user."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from clusterprof.agent.linux.files import Roots

# The tests import 500 files and start a thousand Pythons that import the package. Where the
# environment (a container's, say) forbids to keep bytecode, each would compile all of it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Few examples where every change waits for them; `make test-long` looks at many.
settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("long", max_examples=400, deadline=None)
settings.load_profile(os.environ.get("CLUSTERPROF_EXAMPLES", "quick"))

HOSTS = Path(__file__).parent / "hosts"
LAB = Path(__file__).resolve().parents[1] / "lab"
if str(LAB) not in sys.path:
    sys.path.insert(0, str(LAB))  # its package need not be installed to be tested
ALONE_FOLDERS = [Path(__file__).parent / name for name in ("lab/real", "scenarios/training")]
"""Their tests change the machine for others, except those of HARMLESS_FILES."""
HARMLESS_FILES = {
    "lab/real/accept/test_judge.py",
    "lab/real/test_account.py",
    "scenarios/training/test_dives.py",
    "scenarios/training/test_experts.py",
    "scenarios/training/test_hang_autopsy.py",
    "scenarios/training/test_hangs.py",
    "scenarios/training/test_life.py",
    "scenarios/training/test_restarts.py",
    "scenarios/training/test_two_jobs.py",
}
SLOW_FOLDERS = [
    Path(__file__).parent / name
    for name in ("scenarios/training", "probe/hooks", "scenarios", "probe")
]
"""They come first: a worker that began their files last would go on while the others are done."""
NOBODY = 65534

# A shell that starts the tests in the background has them ignore these, and so all they start.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of folders that change the machine `alone`; put the slow folders first."""
    items.sort(key=lambda item: _find_turn(item.path))
    harmless = {Path(__file__).parent / name for name in HARMLESS_FILES}
    for item in items:
        in_folder = any(folder in item.path.parents for folder in ALONE_FOLDERS)
        if in_folder and item.path not in harmless:
            item.add_marker(pytest.mark.alone)


def _find_turn(path: Path) -> int:
    turns = [turn for turn, folder in enumerate(SLOW_FOLDERS) if folder in path.parents]
    return min(turns, default=len(SLOW_FOLDERS))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name packed bytes by their argument: gzip writes the time, and names must not vary."""
    packed = isinstance(val, bytes) and not (val.isascii() and val.decode("ascii").isprintable())
    return argname if packed else None


@pytest.fixture
def host() -> Callable[[str], Roots]:
    """Return the roots of a fixture machine of tests/hosts, to be read only."""

    def roots(name: str) -> Roots:
        assert (HOSTS / name / "README.md").exists(), f"tests/hosts has no {name}"
        return Roots(HOSTS / name / "proc", HOSTS / name / "sys")

    return roots


@pytest.fixture
def host_copy() -> Iterator[Callable[[str], Roots]]:
    """Return the roots of a copy of a fixture machine that the test may change.

    The copy lies where any user may look, unlike tmp_path: see `as_nobody`.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)

        def roots(name: str) -> Roots:
            target = Path(folder) / name
            shutil.copytree(HOSTS / name, target, symlinks=True)
            return Roots(target / "proc", target / "sys")

        yield roots


@pytest.fixture
def as_nobody() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which file permissions hold, even when root runs the tests."""

    @contextmanager
    def context() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)

    return context


@pytest.fixture
def open_files() -> Callable[[], int]:
    """Return a function that counts the open files of this process, after a garbage collection."""

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    return count
