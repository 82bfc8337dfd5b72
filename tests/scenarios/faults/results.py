"""The stored results: an entry per fault, test file and mutated format, with date and machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.scenarios.faults.model import Fault
from tests.scenarios.faults.promises import list_test_files

ROOT = Path(__file__).resolve().parents[3]
STORE = ROOT / "bench" / "results" / "faults.json"
FORMAT, SCHEMA = "clusterprof-faults", 1
TEST_TIMEOUT_S = 1800


def load_results(path: Path = STORE) -> dict[str, Any]:
    """Return the stored results, empty ones when nothing is stored.

    Raises: ValueError for a file of another format.
    """
    if not path.is_file():
        return {"format": FORMAT, "schema": SCHEMA, "faults": {}, "tests": {}}
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if (document.get("format"), document.get("schema")) != (FORMAT, SCHEMA):
        raise ValueError(f"{path}: not results of faults of schema {SCHEMA}")
    return document


def store_outcome(path: Path, fault: Fault, values: Mapping[str, Any]) -> None:
    """Replace the entry of a fault."""
    document = load_results(path)
    document["faults"][fault.name] = {**describe_run(), **values}
    write_results(path, document)


def store_mutations(path: Path, name: str, counts: Mapping[str, Any]) -> None:
    """Replace the entry of a format whose files were mutated."""
    document = load_results(path)
    document.setdefault("mutations", {})[name] = {**describe_run(), **counts}
    write_results(path, document)


def write_results(path: Path, document: Mapping[str, Any]) -> None:
    """Write the results, sorted by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(path)


def describe_run() -> dict[str, str]:
    """Return when and on what an entry was measured."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPUs, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}, {'root' if os.geteuid() == 0 else 'no root'}",
    }


def format_outcome(values: Mapping[str, Any], fault: Fault) -> str:
    """Return an outcome in a line."""
    if values.get("not_possible"):
        return f"not possible here: {values['not_possible']}"
    words = [f"{values['trials']:,} trials"]
    if values["injected"] != values["trials"]:
        words.append(f"{values['injected']:,} {fault.counted}")
    words.append(f"{values['broken']} broken")
    if "lost_worst" in values:
        worst, median = values["lost_worst"], values["lost_median"]
        words.append(f"lost: median {median:g}, worst {worst:g} {fault.unit}")
    words += [f"{name} {value}" for name, value in values.get("facts", {}).items()]
    return "; ".join([*words, f"{values['wall_s']:g} s"])


def store_tests(path: Path) -> int:
    """Run every test file that a promise names; store how many cases passed. 1 = some failed."""
    document = load_results(path)
    failed = 0
    for name in list_test_files():
        counts = count_cases(name)
        document["tests"][name] = {**describe_run(), **counts}
        failed += counts["failed"]
        write_results(path, document)
        print(f"{name}: {counts}", flush=True)
    return int(failed > 0)


def count_cases(name: str) -> dict[str, int]:
    """Run a test file or folder in a process of its own; return passed, failed and skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", name, "-m", "not accept and not long"]
        subprocess.run(
            [*command, "-p", "no:cacheprovider", f"--junit-xml={report}"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TEST_TIMEOUT_S,
            check=False,
        )
        if not report.is_file():
            return {"passed": 0, "failed": 1, "skipped": 0}
        cases = Counter(classify_case(case) for case in ElementTree.parse(report).iter("testcase"))
    return {kind: cases[kind] for kind in ("passed", "failed", "skipped")}


def classify_case(case: ElementTree.Element) -> str:
    """Return passed, failed or skipped."""
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"
