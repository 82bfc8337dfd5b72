"""The job's own sitecustomize runs in our place, with its own successes and failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.probe_jobs import collect_output, install_probe, run_python

BODIES = {
    "nothing": "",
    "output": "import sys; print('mine'); print('mine', file=sys.stderr)",
    "state": "import builtins; builtins.mine = 1; name = __name__, __spec__.name",
    "RuntimeError": "raise RuntimeError('mine')",
    "SystemExit": "raise SystemExit(3)",
    "SystemExit-text": "raise SystemExit('mine')",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "ImportError": "raise ImportError('mine')",
    "missing import": "import no_such_module_of_mine",
    "its own name": "raise ImportError('mine', name='sitecustomize')",
    "nested": "def f():\n    g()\ndef g():\n    raise SystemExit(5)\nf()",
    "chained": "try:\n    1 // 0\nexcept ZeroDivisionError:\n    raise SystemExit(5)",
    "SyntaxError": "def broken(:",
    "os._exit": "import os; os._exit(9)",
    "deletes itself": "import sys; del sys.modules['sitecustomize']",
}
JOB = """
import builtins, sys
print(sys.path, getattr(builtins, "mine", None))
try:
    import sitecustomize
    print(sitecustomize.__file__, sorted(vars(sitecustomize)))
except ImportError as error:
    print(repr(error), error.name)
sys.exit(7)
"""


@pytest.mark.parametrize("body", BODIES)
def test_a_user_sitecustomize_behaves_the_same_with_the_probe(tmp_path: Path, body: str) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text(BODIES[body])
    run_dir = install_probe(tmp_path / "run")
    environ = {"PYTHONPATH": str(mine), "PYTHONDONTWRITEBYTECODE": "1"}
    with_probe = run_python("-c", JOB, run_dir=run_dir, **environ)
    without = run_python("-c", JOB, run_dir=None, **environ)
    assert collect_output(with_probe) == collect_output(without)
    probed = run_python(
        "-c", "print('_clusterprof_probe' in __import__('sys').modules)", run_dir=run_dir
    )
    assert probed.stdout == b"True\n"


def test_a_missing_user_sitecustomize_is_not_an_error(tmp_path: Path) -> None:
    run_dir = install_probe(tmp_path / "run")
    with_probe = run_python("-c", JOB, run_dir=run_dir)
    assert collect_output(with_probe) == collect_output(run_python("-c", JOB, run_dir=None))
    assert with_probe.returncode == 7


def test_a_user_sitecustomize_runs_once_after_the_probe(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    body = "import sys; print('mine', '_clusterprof_probe' in sys.modules)"
    (mine / "sitecustomize.py").write_text(body)
    run_dir = install_probe(tmp_path / "run")
    result = run_python("-c", "import sitecustomize", run_dir=run_dir, PYTHONPATH=str(mine))
    assert collect_output(result) == (0, b"mine True\n", b"")


def test_a_nested_recording_starts_only_the_inner_probe(tmp_path: Path) -> None:
    outer = install_probe(tmp_path / "outer")
    inner = install_probe(tmp_path / "inner")
    code = (
        "import sys; print(sys.modules['_clusterprof_probe'].run_dir)\n"
        "print(len([f for f in sys.meta_path if 'clusterprof' in type(f).__module__]))"
    )
    result = run_python("-c", code, run_dir=inner, PYTHONPATH=str(outer / "probe"))
    assert collect_output(result) == (0, f"{inner}\n1\n".encode(), b"")
