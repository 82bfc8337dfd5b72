"""`clusterprof.analyze`: the analysis as one call from Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import clusterprof
from clusterprof.analysis.node.selection import Progress
from clusterprof.errors import NoRecording, UsageError

RECORDING = Path(__file__).resolve().parents[1] / "recordings" / "dlrm-8rank"


def test_a_recording_path_may_be_text_or_a_path_object() -> None:
    report = clusterprof.analyze(RECORDING)
    assert len(report.ranks) == 8
    assert report.lost_ns > 0 and report.findings
    assert report.title == str(RECORDING)
    assert clusterprof.analyze(str(RECORDING)) == report


def test_several_paths_are_analyzed_as_a_single_run() -> None:
    nodes = sorted(folder for folder in RECORDING.iterdir() if folder.is_dir())
    assert len(nodes) == 2
    together, whole = clusterprof.analyze(nodes), clusterprof.analyze(RECORDING)
    assert together.ranks == whole.ranks and together.findings == whole.findings
    assert len(clusterprof.analyze(nodes[0]).nodes) == 1


def test_the_keyword_arguments_take_effect() -> None:
    steps: list[Progress] = []
    report = clusterprof.analyze(RECORDING, history=True, on_progress=steps.append)
    assert report.history is not None
    assert steps[-1].nodes == steps[-1].all_nodes == 2
    assert clusterprof.analyze(RECORDING, history=False).history is None
    priced = clusterprof.analyze(RECORDING, facts={"gpu_price_per_hour": 2.0})
    assert priced.impact is not None and priced.impact != clusterprof.analyze(RECORDING).impact


def test_the_documented_errors_are_raised(tmp_path: Path) -> None:
    with pytest.raises(NoRecording):
        clusterprof.analyze(tmp_path / "missing")
    with pytest.raises(UsageError):
        clusterprof.analyze([])
    with pytest.raises(UsageError):
        clusterprof.analyze(RECORDING, limits={"no-such-cause": {}})
    note = tmp_path / "note.txt"
    note.write_text("not a recording", encoding="utf-8")
    copy = shutil.copytree(RECORDING, tmp_path / "run")
    with pytest.raises(NoRecording):
        clusterprof.analyze([copy, note])
    assert len(clusterprof.analyze([copy, note], leave_unknown=True).ranks) == 8


def test_the_analysis_is_imported_at_its_first_use() -> None:
    code = (
        "import sys, clusterprof\n"
        "heavy = {'numpy', 'msgspec', 'typing', 'clusterprof.analysis'}\n"
        "assert heavy.isdisjoint(sys.modules), heavy & set(sys.modules)\n"
        "from clusterprof import analyze\n"
        "assert 'numpy' in sys.modules and analyze is clusterprof.analyze\n"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True, env=_list_paths())


def _list_paths() -> dict[str, str]:
    """Return the environment for a Python without `site`, whose .pth files load modules."""
    return {"PYTHONPATH": ":".join(path for path in sys.path if path)}


def test_an_unknown_attribute_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'analyse'"):
        clusterprof.analyse  # type: ignore[attr-defined]  # noqa: B018
