"""Are our numbers right on public traces? Plain arithmetic on the raw events, beside our report.

    make -C bench public-traces DATA=DIR      # DIR/<name>/<files>, see public_traces.tsv

The traces are not part of the project. `public_traces.tsv` lists them: name, format, repository,
path, commit and SHA-256 of every file. This module imports nothing of the analysis: it reads and
adds up the events in plain Python, and takes our numbers from the report of the command.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench._trace_truths import READERS

LIST = Path(__file__).with_suffix(".tsv")
WITHIN = 0.01
SMALLEST = {"ratio": 0.001, "ns": 2_000.0, "": 0.001}
"""Difference that counts as none, by unit: one of the last place printed."""


def read_report(paths: Sequence[Path]) -> tuple[dict[str, Any], str]:
    """Analyze files with the command; return the report and what was written beside it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "clusterprof", "analyze", *map(str, paths)]
        done = subprocess.run(
            [*command, "--json", "-o", str(out)], capture_output=True, text=True, check=False
        )
        report = json.loads(out.read_text()) if out.exists() else {}
    return report, done.stdout + done.stderr


def find_reported(name: str, report: dict[str, Any], text: str) -> float | None:
    """Return the number that the report states under a name of the truth."""
    metrics = {metric["name"]: metric["value"] for metric in report.get("metrics", ())}
    job_impact = report.get("worth") or {}
    efficiency = {entry["name"]: entry["value"] for entry in job_impact.get("yardsticks", ())}
    ledger = report.get("ledger", {})
    outside = {bucket["cause"]: bucket["ns"] for bucket in ledger.get("outside_buckets", ())}
    notes = "\n".join(map(str, (*report.get("notes", ()), *report.get("answers", ()), text)))
    simple: dict[str, Any] = {
        "time in steps": ledger.get("in_step_ns"),
        "steps": metrics.get("step.count"),
        "median step": metrics.get("step.p50_ns"),
        "busy ratio": metrics.get("gpu.busy_ratio"),
        "busy ratio of forward and backward": metrics.get("gpu.busy_ratio"),
        "lost time": ledger.get("lost_ns"),
        "lost ratio": ledger.get("lost_ns", 0) / (ledger.get("in_step_ns") or 1),
        "data wait ratio": metrics.get("data_wait.ratio"),
        "start-up": outside.get("startup"),
        "recorded": ledger.get("window_ns"),
        "devices": report.get("job", {}).get("gpus"),
        "ranks": len(report.get("ranks", ())),
        "straggler slowdown": metrics.get("yardstick.slowdown_factor"),
        "utilization (AU)": efficiency.get("MLPerf Storage AU"),
        "slowest rank": _find_culprit(report),
    }
    if name in simple:
        return None if simple[name] is None else float(simple[name])
    match = re.search(_PATTERNS.get(name) or _build_pattern(name), notes, re.IGNORECASE)
    if not match:
        return None
    value = float(match[1].replace(",", ""))
    return value / 100 if re.match(r" ?%", match.string[match.end(1) :]) else value


_PATTERNS = {
    "evaluations in the note": r"([\d,]+) eval spans",
    "time of the run stated": r"run_start to run_stop ([\d,.]+) s",
    "utilization (AU) stated": r"published accelerator utilization \(AU\): ([\d.]+) ?%",
    "loading share in the note": r"waiting for data took ([\d.]+) ?%",
    "computing share in the note": r"of the listed steps ([\d.]+) ?% are",
    "passes in the note": r"([\d,]+) forward and backward passes",
    "rows in the note": r"([\d,]+) rows of a table",
    "largest size stated": r"sizes up to ([\d,]+) bytes",
    "its time stated": r"bytes: ([\d,.]+) us",
    "its bus bandwidth stated": r"bus ([\d.]+) GB/s",
    "average bus bandwidth stated": r"([\d.]+) GB/s on average",
}


def _build_pattern(name: str) -> str:
    stage = re.search(r"(bubble|work) of stage (\d+)", name)
    if stage and stage[1] == "bubble":
        return rf"stage {stage[2]}: ([\d.]+) ?% bubble"
    if stage:
        return rf"stage {stage[2]}: .*?, ([\d.]+) ms of work"
    return rf"([\d,]+) {name.split()[0]}"


def _find_culprit(report: dict[str, Any]) -> float | None:
    """Return the rank for which the others waited longest."""
    caused: dict[int, float] = defaultdict(float)
    for finding in report.get("findings", ()):
        for culprit in finding["culprits"]:
            if culprit["rank"] is not None:
                caused[culprit["rank"]] += culprit["others_ns"] or 0
    return float(max(caused, key=lambda rank: caused[rank])) if caused else None


def is_right(truth: float, unit: str, ours: float | None) -> bool:
    """Return whether a number lies within 1 % or one of the last place printed."""
    return ours is not None and abs(truth - ours) <= max(WITHIN * abs(truth), SMALLEST[unit])


def main(arguments: Sequence[str]) -> int:
    if not arguments or not arguments[0]:
        print("no traces: give the folder that holds those of public_traces.tsv")
        return 0
    folder = Path(arguments[0])
    wanted = set(arguments[1:])
    with LIST.open() as lines:
        listed = list(csv.DictReader(lines, delimiter="\t"))
    right = numbers = traces = 0
    for name in dict.fromkeys(row["name"] for row in listed):
        rows = [row for row in listed if row["name"] == name]
        files = [folder / name / row["file"] for row in rows]
        if (wanted and name not in wanted) or not all(path.is_file() for path in files):
            continue
        changed = [
            path
            for path, row in zip(files, rows)
            if hashlib.sha256(path.read_bytes()).hexdigest() != row["sha256"]
        ]
        if changed:
            print(f"{name}: not the listed files: {', '.join(map(str, changed))}")
            return 1
        reader = READERS.get(rows[0]["format"])
        truth = reader(files) if reader else {}
        report, text = read_report(files)
        wrong = []
        for number, (value, unit) in truth.items():
            ours = find_reported(number, report, text)
            if not is_right(value, unit, ours):
                wrong.append(f"{number}: {value:.10g} by the events, {ours} in the report")
        traces += 1
        numbers += len(truth)
        right += len(truth) - len(wrong)
        print(f"{name}: {len(truth) - len(wrong)} of {len(truth)} numbers right", flush=True)
        for line in wrong:
            print(f"    {line}", flush=True)
    share = f" ({100 * right / numbers:.1f} %)" if numbers else ""
    print(f"{traces} traces: {right} of {numbers} numbers right{share}")
    return 0 if numbers and right == numbers else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
