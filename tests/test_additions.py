"""Add a cause and a collector: one new file and one line in a registry each, nothing else.

The package is copied (as links), gets the new file and the new line, and runs as a user
would run it. Nothing else in the copy differs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import clusterprof
from clusterprof.analysis.detectors.registry import DETECTORS
from clusterprof.signals import CATALOG, register_signal

PACKAGE = Path(clusterprof.__file__).resolve().parent
RUN = Path(__file__).resolve().parent / "recordings" / "dlrm-8rank"
ID = "storage-dummy"
CHECK = "run `dummyctl --watch` on the node while it trains: it counts up."

CAUSE_FILE = f'''"""The dummy is slow.

## What it sees

Lost time inside Python's garbage collector, which another cause would claim too.

## Why the GPU waits

Because of the dummy, which every rank of the job has to ask first.

## How it decides

It claims the whole of every such interval, whatever else happened in it.

## What to do

Remove the dummy from the package: it is there for a test only.

## Where it is blind

Time in operations with other ranks is never claimed by a detector, nor by this one.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.analysis.detectors.base import Claims, select_phases
from clusterprof.analysis.timeline.model import PHASE_GC, DataWaitBreakdown, LostTime, Rank
from clusterprof.report.model import Cause, Evidence


class StorageDummy:
    """Claims what `cpu-gc` would claim, and is served before it."""

    cause = Cause(
        "{ID}",
        "storage",
        "The dummy is slow",
        "Remove the dummy",
        precedence=115,
        tone=3,
        hidden_cost="batch",
        manual_check="{CHECK}",
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for the dummy."""

        claimed_ratio: float = 1.0
        """Share of each lost interval that is claimed."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims:
        """Claim every lost interval inside a collection."""
        share = select_phases(lost, PHASE_GC) * limits.claimed_ratio
        return Claims(share, "A", (Evidence("dummy.asked_total", 7.0, "count", "of dummies"),))
'''

COLLECTOR_FILE = '''"""Count upwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from clusterprof.agent.collectors.base import Context, Value
from clusterprof.signals import Signal, register_signal

COUNTED = register_signal("dummy.counted_total", "dial", "What the dummy counted.")


class DummyCollector:
    """Counts upwards by 3 in every tick."""

    name: ClassVar[str] = "dummy"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self, context: Context) -> None:
        self._count = 0

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Return the only column."""
        return [(COUNTED, "left")]

    def sample(self) -> Sequence[Value]:
        """Return the count."""
        self._count += 3
        return [self._count]

    def close(self) -> None:
        """Do nothing."""
'''

COMMANDS = """
import contextlib, io, json, sys
from clusterprof.cli.app import main
out = {}
for name, words in json.load(sys.stdin).items():
    text, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(errors):
        code = main(words)
    out[name] = (code, text.getvalue(), errors.getvalue())
print(json.dumps(out))
"""


def copy_package(folder: Path) -> Path:
    """Copy the package as links; only what is then written is a file of its own."""
    copied = folder / "clusterprof"
    shutil.copytree(PACKAGE, copied, copy_function=os.symlink)
    return copied


def register(registry: Path, module: str, name: str, entry: str, before: str) -> None:
    """Add an import and one line to a registry of the copied package."""
    text = registry.read_text(encoding="utf-8")
    assert text.count(before) == 1
    registry.unlink()  # the link, not the file it leads to
    text = text.replace(before, f"    {entry}\n{before}")
    start = text.index("from clusterprof.")
    added = f"from {module} import {name}\n"
    registry.write_text(text[:start] + added + text[start:], encoding="utf-8")


def list_own_files(package: Path) -> set[str]:
    """List the files in which the copied package differs from ours."""
    files = (path for path in package.rglob("*") if not path.is_symlink() and path.is_file())
    return {str(path.relative_to(package)) for path in files if path.suffix != ".pyc"}


def run(folder: Path, *words: str, **options: str) -> str:
    """Run Python with the copied package and return what it printed."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Return exit code and output of every command, in a package with one more cause."""
    folder = tmp_path_factory.mktemp("cause")
    package = copy_package(folder)
    detectors = package / "analysis" / "detectors"
    (detectors / "storage" / "dummy.py").write_text(CAUSE_FILE, encoding="utf-8")
    register(
        detectors / "registry.py",
        "clusterprof.analysis.detectors.storage.dummy",
        "StorageDummy",
        "StorageDummy(),",
        "    CpuPreprocess(),\n",
    )
    assert list_own_files(package) == {
        "analysis/detectors/registry.py",
        "analysis/detectors/storage/dummy.py",
    }
    report = str(folder / "report.json")
    analyze = {
        format_: ["analyze", str(RUN), "--format", format_]
        for format_ in ("terminal", "plain", "json", "markdown", "html", "openmetrics")
    }
    commands = {
        **analyze,
        "stored": ["analyze", str(RUN), "--json", "-o", report],
        "gate": ["gate", str(RUN), "--assert", f"stall.{ID} <= 1%"],
        "gate-stored": ["gate", report, "--max-stall", f"{ID}=1%"],
        "causes": ["explain"],
        "page": ["explain", ID],
        "family": ["explain", "storage"],
        "metric": ["explain", f"stall.{ID}"],
    }
    return json.loads(run(folder, "-c", COMMANDS, input=json.dumps(commands)))


def test_an_added_cause_appears_in_attribution_and_report(
    outputs: dict[str, tuple[int, str, str]],
) -> None:
    code, text, _ = outputs["json"]
    report = json.loads(text)
    finding = report["findings"][0]
    assert code == 0 and (finding["cause"], finding["family"]) == (ID, "storage")
    assert finding["evidence"][0]["name"] == "dummy.asked_total"
    assert [
        metric["value"] for metric in report["metrics"] if metric["name"] == f"stall.{ID}_ratio"
    ]
    # Served before cpu-gc, which is the cause of most of this recording: nothing is left to it.
    assert "cpu-gc" not in {finding["cause"] for finding in report["findings"]}


@pytest.mark.parametrize("format_", ["terminal", "plain", "markdown", "html", "openmetrics"])
def test_every_renderer_shows_the_added_cause(
    format_: str, outputs: dict[str, tuple[int, str, str]]
) -> None:
    code, text, errors = outputs[format_]
    assert (code, errors) == (0, "") and ID in text
    assert "The dummy is slow" in text or format_ == "openmetrics"


def test_the_page_draws_the_added_cause_in_its_color(
    outputs: dict[str, tuple[int, str, str]],
) -> None:
    text = outputs["html"][1]
    assert 'class="k-storage tone3"' in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    cause = next(cause for cause in data["causes"] if cause["id"] == ID)
    assert (cause["family"], cause["tone"]) == ("storage", 3)


def test_the_advice_of_an_added_cause_is_its_manual_check(
    outputs: dict[str, tuple[int, str, str]],
) -> None:
    advice = json.loads(outputs["json"][1])["findings"][0]["remedies"]
    assert [(advice_item["id"], advice_item["change"]) for advice_item in advice] == [
        ("follow-manual-check", CHECK)
    ]


def test_explain_and_gate_accept_the_added_cause(outputs: dict[str, tuple[int, str, str]]) -> None:
    assert re.search(rf"^  {ID} +The dummy is slow$", outputs["causes"][1], re.MULTILINE)
    assert outputs["page"][1].startswith(f"# {ID}: The dummy is slow\n")
    assert "## How to verify it by hand" in outputs["page"][1] and "dummyctl" in outputs["page"][1]
    assert "| `claimed_ratio` | 1.0 |" in outputs["page"][1]
    assert ID in outputs["family"][1]
    assert outputs["metric"][1].startswith(f"# stall.{ID}_ratio: a metric of the report")
    assert "dummyctl" in outputs["metric"][1]
    for name in ("gate", "gate-stored"):
        code, text, errors = outputs[name]
        # No device was measured in this recording: its losses are upper bounds.
        assert (code, errors) == (4, "") and f"stall.{ID}_ratio <= 1.0 %" in text


def test_an_added_collector_is_recorded_and_dumped(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    collectors = package / "agent" / "collectors"
    (collectors / "dummy.py").write_text(COLLECTOR_FILE, encoding="utf-8")
    register(
        collectors / "registry.py",
        "clusterprof.agent.collectors.dummy",
        "DummyCollector",
        "DummyCollector,",
        "    DiskCollector,\n",
    )
    assert list_own_files(package) == {"agent/collectors/dummy.py", "agent/collectors/registry.py"}
    run(tmp_path, "-m", "clusterprof.agent", "-o", "out", "--duration", "1s")
    lines = run(tmp_path, "-m", "clusterprof", "dump", "out").splitlines()
    columns = [item for item in map(json.loads, lines) if item.get("collector") == "dummy"]
    assert {(*column["signals"], *column["devices"]) for column in columns} == {
        ("dummy.counted_total", "left")
    }
    counted = [value for column in columns for value in column["values"][0]]
    assert len(counted) > 3 and counted == [3 * tick for tick in range(1, len(counted) + 1)]


def test_detector_precedences_are_unique() -> None:
    order = [detector.cause.precedence for detector in DETECTORS]
    assert min(order) > 0 and len(set(order)) == len(order)


def test_a_signal_is_declared_once() -> None:
    with pytest.raises(ValueError, match="is declared twice"):
        register_signal(CATALOG[0].name, "", "Another meaning.")
