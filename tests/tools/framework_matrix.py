"""Run the probe's tests against the versions of framework_rows.py, and store the results.

python tests/tools/framework_matrix.py [--only TEXT]… [--folder DIR] [--keep] [--list]

Each row gets an environment of its own below DIR (a temporary folder if none is named), one that
stands on its PyTorch's; both are removed again unless they are to be kept for another run. The job
runs in that environment, the tests in this one. What was seen goes to
tests/probe/framework_runs.json, of which docs/frameworks.md is made (`make docs`). Downloads
gigabytes; pip's own settings say from where. On a machine without a GPU a PyTorch built for CUDA
gets shells for CUDA's libraries (cuda_shells.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests/probe"
sys.path.insert(0, str(ROOT))  # `python tests/tools/…` puts this folder there alone
from clusterprof.probe.hooks import HOOKS  # noqa: E402
from tests.support import job_python, probe_jobs  # noqa: E402
from tests.tools.cuda_shells import make_shells  # noqa: E402
from tests.tools.framework_rows import PACKAGES, ROWS, Row  # noqa: E402

RUNS = TESTS / "framework_runs.json"
# What `import torch` needs of its packages; those of CUDA are gigabytes.
TORCH_NEEDS = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec")
_SAYS_NOTHING = re.compile(
    "hint:|note:|See above|-failed|Encountered error|end of output"
)  # of pip
CUDA_NEEDS = ("nvidia-cuda-runtime", "cuda-toolkit")

Run = dict[str, Any]


class RowError(Exception):
    """An environment that cannot be made here, and why."""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", action="append", default=[], help="rows whose name holds this")
    parser.add_argument("--folder", type=Path, help="where environments are made")
    parser.add_argument("--again", action="store_true", help="only what failed the last time")
    parser.add_argument("--base", type=Path, help="a Python that has what rows stand on already")
    parser.add_argument("--keep", action="store_true", help="leave the environments there")
    parser.add_argument("--tests", action="append", help="not all of a row's tests but these")
    parser.add_argument("--short", action="store_true", help="without the tests marked long")
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    asked = parser.parse_args(words)
    rows = [row for row in ROWS if not asked.only or any(text in row.name for text in asked.only)]
    if asked.list:
        print("\n".join(row.name for row in rows))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        bad = [row for row in rows if not run_row(row, rows, folder, asked)]
    return 1 if bad else 0


def run_row(row: Row, rows: list[Row], folder: Path, asked: argparse.Namespace) -> bool:
    """Run one row, keep and print what came of it; False when something failed."""
    earlier: Run = load_results().get(row.name, {}) if asked.again else {}
    try:
        python = make_environment(row, folder, asked.base)
        result = {**list_versions(row, python), **run_tests(row, asked, python, folder, earlier)}
        result["unhooked"] = list_unhooked(PACKAGES[row.library], python, folder)
    except RowError as error:
        result = {"library": row.library, "python": row.python, "problem": str(error)}
    if not asked.keep:
        shutil.rmtree(folder / row.name, ignore_errors=True)
        if row is [value for value in rows if _make_base(value) == _make_base(row)][-1]:
            shutil.rmtree(folder / _make_base(row), ignore_errors=True)
    store_result(row, result)
    counts = [
        f"{result[word]} {word}" for word in ("passed", "failed", "skipped") if word in result
    ]
    print(f"{row.name:45} {', '.join(counts) or result['problem']}", flush=True)
    for name, reason in result.get("failures", {}).items():
        print(f"    {name}: {reason}", flush=True)
    return not result.get("failures") and "problem" not in result


def make_environment(row: Row, folder: Path, base: Path | None) -> Path:
    """Return the Python of a row's environment, made new, on `base` if that is there already."""
    alone = base is None and not row.torch  # else it has the pip of what it stands on
    python = _make_venv(folder / row.name, row.python, *([] if alone else ["--without-pip"]))
    lines = [str(ROOT)]  # jobs that import clusterprof
    if base is not None:
        lines.append(_format_base_line(base))
    elif row.torch:
        base = folder / _make_base(row) / "bin/python"
        if not base.exists():
            try:
                _install_torch(_make_venv(base.parents[1], row.python), row)
            except RowError:
                shutil.rmtree(base.parents[1], ignore_errors=True)
                raise
        lines.append(_format_base_line(base))
    Path(_list_packages(python), "clusterprof_rows.pth").write_text("\n".join(lines) + "\n")
    pins = [pin for pin in row.pins if not pin.startswith("torch==")]
    if pins and not _has_packages(python, row.pins):
        held = folder / "constraints.txt"
        held.write_text(f"torch=={row.torch}\n" if row.torch else "")
        needs = ["ninja", "packaging", "wheel"] if row.library == "DeepSpeed" else []
        isolated = [] if row.library != "DeepSpeed" else ["--no-build-isolation"]
        also = [*row.also, *needs]
        if also:
            _get_pip(python, *also)
        _get_pip(python, "--constraint", str(held), *isolated, *row.also, *pins)
    return python


def _format_base_line(base: Path) -> str:
    """A line that adds the packages of a base, and obeys what these say at start (`distutils`)."""
    return f"import site; site.addsitedir({_list_packages(base)!r})"


def _has_packages(python: Path, pins: tuple[str, ...]) -> bool:
    """Return whether what an environment stands on has it all already: pip takes long to see."""
    tell = "import importlib.metadata as m, sys; print([m.version(n) for n in sys.argv[1:]])"
    try:
        result = _run_command([str(python), "-c", tell, *[pin.partition("==")[0] for pin in pins]])
    except RowError:
        return False
    return result.strip() == str([pin.partition("==")[2] for pin in pins])


def _make_base(row: Row) -> str:
    return f"base-torch-{row.torch}-py{row.python}"


def _make_venv(place: Path, version: str, *options: str) -> Path:
    program = shutil.which(f"python{version}")
    if program is None or subprocess.run([program, "-V"], capture_output=True).returncode:
        raise RowError(f"no Python {version} here")
    _run_command([program, "-m", "venv", *options, str(place)])
    return place / "bin/python"


def _install_torch(python: Path, row: Row) -> None:
    old = [word for word in row.also if word.startswith(("numpy", "setuptools"))]
    if not any(word.startswith("numpy") for word in old):
        old.append("numpy")
    _get_pip(python, "--no-deps", f"torch=={row.torch}")
    _get_pip(python, *TORCH_NEEDS, *old, "packaging")
    tell = "import importlib.metadata as m; print('\\n'.join(m.requires('torch')))"
    wanted = _run_command([str(python), "-c", tell]).splitlines()
    # Of CUDA's packages only the runtime: it says that there is no GPU here.
    cuda = [re.sub(r"^cuda-toolkit\[.*\]", "cuda-toolkit[cudart]", line) for line in wanted]
    cuda = [line.partition(";")[0] for line in cuda if line.startswith(CUDA_NEEDS)]
    if cuda:
        _get_pip(python, *cuda)
        made = make_shells(Path(_list_packages(python), "torch/lib"))
        print(f"    shells of {', '.join(made)}", flush=True)
        for stated in Path(_list_packages(python)).glob(
            "torch-*.dist-info/METADATA"
        ):  # pip would get them
            kept_lines = re.sub(
                r"(?m)^Requires-Dist: (nvidia-|triton|cuda-).*\n", "", stated.read_text()
            )
            stated.write_text(kept_lines)
    _run_command([str(python), "-c", "import torch; torch.ones(1)"])


def _list_packages(python: Path) -> str:
    tell = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return _run_command([str(python), "-c", tell]).strip()


def _get_pip(python: Path, *what: str) -> None:
    quiet = ["--quiet", "--disable-pip-version-check", "--no-cache-dir", "--prefer-binary"]
    _run_command(["nice", "-n", "19", str(python), "-m", "pip", "install", *quiet, *what])


def _run_command(command: list[str]) -> str:
    environ = {**probe_jobs.clean_environment(), "DS_BUILD_OPS": "0"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        last = [
            each
            for each in done.stderr.splitlines()
            if each.strip() and not _SAYS_NOTHING.search(each)
        ][-1:]
        raise RowError(f"{' '.join(command[1:])}: {''.join(last)}"[-300:])
    return done.stdout


def list_versions(row: Row, python: Path) -> Run:
    """Return what stands in an environment: the names of what is pinned with their versions."""
    names = [pin.partition("==")[0] for pin in row.pins]
    more = ["torch", "numpy"]
    code = (
        "import importlib.metadata as m, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps([sys.version.split()[0], found]))"
    )
    exact, document = json.loads(_run_command([str(python), "-c", code, *names, *more]))
    return {"library": row.library, "python": exact, "versions": document}


def run_tests(row: Row, asked: argparse.Namespace, python: Path, folder: Path, again: Run) -> Run:
    """Run a row's tests with their jobs in its environment; returns counts, failures and skips.

    asked: `tests` and `short` leave some out, which stand in the result then.
    again: an earlier result of the row, of which only what failed is run once more; else empty.
    """
    only = asked.tests
    files = [f"{name}.py" for name in only or row.tests]
    chosen = [name.replace("::", ".py::", 1) for name in again.get("failures", {})] or files
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}"]
    command += ["-m", "not long"] if asked.short else []
    command += [f"--basetemp={folder}/t", *[str(TESTS / name) for name in chosen]]
    environ = {**os.environ, "CLUSTERPROF_JOB_PYTHON": str(python), "PYTHONPATH": str(ROOT)}
    with (folder / f"{row.name}.log").open("w") as log:
        subprocess.run(command, env=environ, cwd=ROOT, stdout=log, stderr=log)
    if not report.exists():
        raise RowError("pytest left no report")
    result: Run = {"passed": again.get("passed", 0), "failed": 0, "skipped": 0}
    result |= {"failures": {}, "skips": dict(again.get("skips", {}))}
    left = again.get("left_out", row.tests if only else ())
    result["left_out"] = [name for name in left if name not in (only or ())]
    result["left_out"] += ["long variants"] if asked.short and not again else []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = case.get("classname", "").removeprefix("tests.probe.").replace(".", "/")
        name = f"{module}::{case.get('name')}"
        problem = case.find("failure") if case.find("error") is None else case.find("error")
        if problem is not None:
            result["failures"][name] = " ".join((problem.get("message") or "").split())[:160]
        elif (skip := case.find("skipped")) is not None:
            # Of a whole file pytest says why in the text alone.
            why = (skip.text or "").rpartition("Skipped: ")[2].strip("')\" ")
            why = why or re.sub(r"^\S+\.py:\d+: ", "", skip.get("message") or "")
            result["skips"][name] = why[:160]
        else:
            result["passed"] += 1
    return {**result, "failed": len(result["failures"]), "skipped": len(result["skips"])}


def list_unhooked(packages: tuple[str, ...], python: Path, folder: Path) -> list[str]:
    """Return the modules that import there, but whose hook is not in place or not whole."""
    names = [name for name, _ in HOOKS]
    looked_at = [name for name in names if name.partition(".")[0] in packages]
    if not looked_at:
        return []
    code = (
        "import importlib\n"
        f"for name in {looked_at!r}:\n"
        "    try: importlib.import_module(name)\n"
        "    except BaseException: pass\n"
        "import _clusterprof_probe as probe\n"
        "probe.emit(64, 1, 2)" + probe_jobs.WAIT
    )
    job_python.PYTHON = str(python)
    run_dir = folder / "hooks"
    shutil.rmtree(run_dir, ignore_errors=True)
    probe_jobs.install_probe(run_dir)
    with probe_jobs.RingWatcher(run_dir) as watcher:
        probe_jobs.run_python("-c", code, run_dir=run_dir, CUDA_VISIBLE_DEVICES="", seconds=600)
    rings = [ring for ring in watcher.read_rings() if ring.of(64)]
    notes = rings[0].of(probe_jobs.HOOK_NOTE) if rings else []
    return [names[note.a] for note in notes if not note.b]


def store_result(row: Row, result: Run) -> None:
    """Put a row's result in the place of its last one."""
    runs = {**load_results(), row.name: result}
    order = [row.name for row in ROWS]
    runs = dict(
        sorted(runs.items(), key=lambda run: order.index(run[0]) if run[0] in order else -1)
    )
    text = json.dumps(runs, indent=1, ensure_ascii=False)
    RUNS.write_text(re.sub(r"/[^\s\"]*/", "…/", text) + "\n")  # no paths of this machine


def load_results() -> dict[str, Run]:
    """Return what is known of every row that was run."""
    return json.loads(RUNS.read_text()) if RUNS.exists() else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
