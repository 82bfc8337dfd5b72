"""The importer: hooks run after an import, and no import ever notices."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.support import job_python
from tests.support.probe_jobs import install_probe, run_python

HEAD = """
import sys
import _clusterprof_probe as probe, _clusterprof_probe.import_hooks as import_hooks
import _clusterprof_probe.hooks as hooks, types
installed = []
hook = types.ModuleType("_clusterprof_probe.hooks.spy")
hook.install = lambda module: installed.append((module.__name__, module.value)) or True
sys.modules[hook.__name__] = hook
"""
WATCH = "import_hooks.watch_imports([('wanted', 'spy'), ('box.inner', 'spy')])\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "modules"
    (place / "box").mkdir(parents=True)
    (place / "wanted.py").write_text("value = 1\n")
    (place / "box/__init__.py").write_text("")
    (place / "box/inner.py").write_text("value = 2\n")
    (place / "broken.py").write_text("import no_such_module\n")
    return place


def out(tmp_path: Path, code: str, path: Path) -> str:
    run_dir = install_probe(tmp_path / "run")
    result = run_python("-c", HEAD + code, run_dir=run_dir, PYTHONPATH=str(path))
    assert (result.returncode, result.stderr) == (0, b""), result.stderr.decode()
    return result.stdout.decode().strip()


def test_a_hook_runs_after_the_module_is_imported(tmp_path: Path, folder: Path) -> None:
    code = WATCH + "import wanted, box.inner; print(installed)"
    assert out(tmp_path, code, folder) == "[('wanted', 1), ('box.inner', 2)]"


def test_an_already_imported_module_is_hooked_immediately(tmp_path: Path, folder: Path) -> None:
    code = "import wanted\n" + WATCH + "print(installed)"
    assert out(tmp_path, code, folder) == "[('wanted', 1)]"


def test_a_hooked_module_keeps_the_original_loader_and_spec(tmp_path: Path, folder: Path) -> None:
    code = WATCH + (
        "import wanted, importlib.machinery as machinery\n"
        "loader = wanted.__spec__.loader\n"
        "print(type(loader) is machinery.SourceFileLoader, loader is wanted.__loader__)\n"
        "print(sorted(vars(loader)), wanted.__spec__.origin == wanted.__file__, probe.on)"
    )
    assert out(tmp_path, code, folder) == "True True\n['name', 'path'] True True"


def test_a_reloaded_module_is_hooked_again(tmp_path: Path, folder: Path) -> None:
    code = WATCH + "import wanted, importlib; importlib.reload(wanted); print(len(installed))"
    assert out(tmp_path, code, folder) == "2"


def test_find_spec_runs_no_module_or_hook(tmp_path: Path, folder: Path) -> None:
    code = WATCH + (
        "import importlib.util\n"
        "print(importlib.util.find_spec('wanted').name, importlib.util.find_spec('absent'))\n"
        "print(installed, 'wanted' in sys.modules)"
    )
    assert out(tmp_path, code, folder) == "wanted None\n[] False"


@pytest.mark.skipif(
    job_python.get_python_version() < (3, 10), reason="zipimport has no exec_module: no hooks"
)
def test_modules_that_share_a_loader_are_each_hooked(tmp_path: Path, folder: Path) -> None:
    archive = tmp_path / "modules.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in folder.rglob("*.py"):
            file.write(path, path.relative_to(folder))
    code = WATCH + "import wanted, box.inner, box; print(installed, 'zip/' in wanted.__file__)"
    assert out(tmp_path, code, archive) == "[('wanted', 1), ('box.inner', 2)] True"


def test_a_failed_import_looks_the_same_without_the_probe(tmp_path: Path, folder: Path) -> None:
    code = (
        "import_hooks.watch_imports([('broken', 'spy'), ('absent', 'spy')])\n"
        "import traceback\n"
        "for name in ('broken', 'absent'):\n"
        "    try: __import__(name)\n"
        "    except ImportError as error:\n"
        "        print(error, len(traceback.extract_tb(error.__traceback__)))\n"
        "print(installed, probe.on)"
    )
    # broken: the line above and its own; absent: the line above. Python 3.10 raises again on a copy
    # of the traceback, in which our line stays.
    lines = 2 if job_python.get_python_version() >= (3, 11) else 3
    text = f"No module named 'no_such_module' {lines}\nNo module named 'absent' 1\n[] True"
    assert out(tmp_path, code, folder) == text


@pytest.mark.parametrize(
    "error, on",  # ValueError, StopIteration: a name that is not among those of a function
    [
        ("AttributeError", True),
        ("ValueError", True),
        ("StopIteration", True),
        ("ZeroDivisionError", False),
    ],
)
def test_a_failed_hook_is_noted(tmp_path: Path, folder: Path, error: str, on: bool) -> None:
    code = (
        f"def fail(module): raise {error}('x')\n"
        "hook.install = fail\n"
        + WATCH
        + "import wanted; print(wanted.value, import_hooks.notes[-1], probe.on)"
    )
    assert out(tmp_path, code, folder) == f"1 (0, 0) {on}"


def test_an_error_of_the_jobs_finder_reaches_the_job(tmp_path: Path, folder: Path) -> None:
    code = WATCH + (
        "class Odd:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'wanted': raise OSError('odd')\n"
        "sys.meta_path.insert(1, Odd())\n"
        "try: import wanted\n"
        "except OSError as error: print(error, probe.on)"
    )
    assert out(tmp_path, code, folder) == "odd True"


def test_two_hook_finders_do_not_recurse_endlessly(tmp_path: Path, folder: Path) -> None:
    code = WATCH + (
        "sys.meta_path.insert(0, import_hooks.HookFinder())\n"
        "import wanted; print(set(installed), len(installed) <= 2, probe.on)"
    )
    assert out(tmp_path, code, folder) == "{('wanted', 1)} True True"
