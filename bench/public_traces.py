"""Are our numbers right on public traces? Plain arithmetic on the raw events, beside our report.

    make -C bench public-traces DATA=DIR      # DIR/<name>/<files>, see public_traces.tsv

The traces are not part of the project. `public_traces.tsv` lists them: name, format, repository,
path, commit and SHA-256 of every file. Nothing of the analysis is imported here: the events are
read and added up in plain Python, and our numbers are taken from the report of the command.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_suffix(".tsv")
WITHIN = 0.01
SMALLEST = {"ratio": 0.001, "ns": 2_000.0, "": 0.001}
"""Difference that counts as none, by unit: one of the last place printed."""
Interval = tuple[float, float]
Truth = dict[str, tuple[float, str]]
"""Name of a number -> its value and unit."""

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "mtia_ccp_events")
COLLECTIVE = re.compile(r"nccl|rccl|oneccl|multimem_all_reduce", re.IGNORECASE)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return what two merged lists have in common."""
    common, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def add_lengths(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def read_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def kineto(files: Sequence[Path]) -> Truth:
    """Steps, busy and lost time of every rank: ProfilerStep spans, else the span of device work."""
    in_step = busy = lost = waited = 0.0
    counts: dict[str, float] = defaultdict(float)
    lengths: list[float] = []
    has_device = False
    for path in files:
        document = json.loads(read_bytes(path), strict=False)
        events = document if isinstance(document, list) else document["traceEvents"]
        spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
        work = [event for event in spans if str(event.get("cat")).lower() in DEVICE]
        operators = [event for event in spans if str(event.get("cat")).lower() in OPERATORS]
        hosts = {event.get("pid") for event in operators}
        steps = [
            _span(event)
            for event in spans
            if str(event.get("name")).startswith("ProfilerStep#") and event.get("pid") in hosts
        ]
        lengths += [end - start for start, end in steps]
        has_device = has_device or bool(work)
        every = steps or [_span(event) for event in work or operators]
        window = [(min(start for start, _ in every), max(end for _, end in every))]
        kernels = [event for event in work if "mem" not in str(event["cat"]).lower()]
        active, rest, collective = (
            intersect(merge(_span(event) for event in chosen), window)
            for chosen in (
                work,
                [event for event in kernels if not COLLECTIVE.search(event["name"])],
                [event for event in kernels if COLLECTIVE.search(event["name"])],
            )
        )
        exposed = add_lengths(collective) - add_lengths(intersect(collective, rest))
        in_step += add_lengths(window)
        busy += add_lengths(active)
        lost += add_lengths(window) - add_lengths(active) + exposed
        loads = merge(_span(event) for event in spans if "DataLoader)#" in str(event.get("name")))
        waited += add_lengths(intersect(loads, window))
        counts["kernels"] += len(kernels)
        counts["copies"] += len(work) - len(kernels)
        counts["operators"] += len(operators)
    truth: Truth = {f"{name} in the note": (count, "") for name, count in counts.items() if count}
    truth["time in steps"] = in_step * 1e3, "ns"
    if lengths:
        truth["steps"] = len(lengths), ""
        truth["median step"] = statistics.median_low(lengths) * 1e3, "ns"
    if has_device:
        truth["busy ratio"] = busy / in_step, "ratio"
        truth["lost time"] = lost * 1e3, "ns"
        truth["data wait ratio"] = waited / in_step, "ratio"
    return truth


OPERATORS = ("cpu_op", "operator")


def _span(event: dict[str, Any]) -> Interval:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def nsys(files: Sequence[Path]) -> Truth:
    """Device time of every process and device: kernels, copies, fills, from first to last."""
    counts, work = {}, defaultdict(list)
    with sqlite3.connect(f"file:{files[0]}?mode=ro", uri=True) as database:
        tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}
        for name, table in (
            ("kernels", "CUPTI_ACTIVITY_KIND_KERNEL"),
            ("copies", "CUPTI_ACTIVITY_KIND_MEMCPY"),
            ("fills", "CUPTI_ACTIVITY_KIND_MEMSET"),
        ):
            if table in tables:
                rows = database.execute(f'SELECT start, "end", deviceId FROM {table}').fetchall()
                counts[f"{name} in the note"] = len(rows), ""
                for start, end, device in rows:
                    work[device].append((start, end))
    if not work:
        return {}
    windows = {device: (min(w)[0], max(end for _, end in w)) for device, w in work.items()}
    in_step = add_lengths(windows.values())
    busy = sum(add_lengths(merge(w)) for w in work.values())
    return {
        **{name: value for name, value in counts.items() if value[0]},
        "devices": (len(work), ""),
        "ranks": (len(work), ""),
        "time in steps": (in_step, "ns"),
        "busy ratio": (busy / in_step, "ratio"),
    }


def mllog(files: Sequence[Path]) -> Truth:
    """Epochs (or blocks) of an MLPerf log, and the time before the first."""
    starts: dict[str, float] = {}
    spans: dict[str, list[float]] = defaultdict(list)
    begin: dict[str, float] = {}
    times = []
    for line in files[0].read_text(errors="replace").splitlines():
        _, mark, text = line.partition(":::MLLOG")
        if not mark:
            continue
        try:
            record = json.loads(text)
        except ValueError:
            continue
        key, ms = str(record["key"]), float(record["time_ms"])
        times.append(ms)
        kind = key.removesuffix("_start").removesuffix("_stop")
        if key.endswith("_start"):
            starts[kind] = ms
            begin.setdefault(kind, ms)
        elif key.endswith("_stop") and kind in starts:
            length = ms - starts.pop(kind)
            if length > 0:
                spans[kind].append(length)
    unit = "epoch" if spans["epoch"] else "block"
    truth = {
        "steps": (float(len(spans[unit])), ""),
        "median step": (statistics.median_low(spans[unit]) * 1e6, "ns"),
        "start-up": ((begin[unit] - min(times)) * 1e6, "ns"),
        "recorded": ((max(times) - min(times)) * 1e6, "ns"),
        "evaluations in the note": (float(len(spans["eval"])), ""),
    }
    if spans["run"]:
        truth["time of the run stated"] = sum(spans["run"]) / 1e3, ""
    return truth


def dlio(files: Sequence[Path]) -> Truth:
    """Steps, loading and utilization of a DLIO run, of the files per rank and the summary."""
    load = compute = total = 0.0
    steps = 0
    for path in files:
        if not path.name.endswith("_output.json"):
            continue
        for epoch in json.loads(path.read_text()).values():
            if not isinstance(epoch, dict) or "load" not in epoch:
                continue
            for block, values in epoch["load"].items():
                steps += len(values)
                load += sum(values)
                compute += sum(epoch["compute"][block])
                total += sum(epoch["proc"][block])
    summary = next(path for path in files if path.name == "summary.json")
    metric = json.loads(summary.read_text())["metric"]
    published = metric["train_au_mean_percentage"]
    truth: Truth = {"utilization (AU) stated": (published / 100, "ratio")}
    if steps:
        truth["utilization (AU)"] = published / 100, "ratio"
        truth["steps"] = float(steps), ""
        truth["loading share in the note"] = load / total, "ratio"
        truth["computing share in the note"] = compute / total, "ratio"
    return truth


def step_times(files: Sequence[Path]) -> Truth:
    """Rows, the wait for the slowest rank of each step, and who that is."""
    by_step: dict[str, dict[str, float]] = defaultdict(dict)
    rows = 0
    with files[0].open() as lines:
        for row in csv.DictReader(lines):
            by_step[row["time"]][row["worker"]] = float(row["batch_time_norm"])
            rows += 1
    ranks = {rank for step in by_step.values() for rank in step}
    whole = [step for step in by_step.values() if len(step) == len(ranks)]
    caused: dict[str, float] = defaultdict(float)
    for step in whole:
        slowest = max(step, key=lambda rank: step[rank])
        caused[slowest] += sum(step[slowest] - own for own in step.values())
    wait = sum(caused.values())
    longest = sum(max(step.values()) for step in whole)
    mean = sum(statistics.mean(step.values()) for step in whole)
    return {
        "steps": (float(rows), ""),
        "ranks": (float(len(ranks)), ""),
        "lost ratio": (wait / (longest * len(ranks)), "ratio"),
        "straggler slowdown": (longest / mean, ""),
        "slowest rank": (float(max(caused, key=lambda rank: caused[rank])), ""),
    }


def operator_table(files: Sequence[Path]) -> Truth:
    """Busy time of the ranks and the step time of an operator table."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(files[0]).to_pydict()
    work: dict[int, float] = defaultdict(float)
    begin: dict[int, float] = {}
    end: dict[int, float] = {}
    for rank, step, kind, start, duration in zip(
        *(table[name] for name in ("rank", "step", "optype", "start_ts", "duration")), strict=True
    ):
        if kind.endswith("compute"):
            work[rank] += duration
        begin[step] = min(begin.get(step, start), start)
        end[step] = max(end.get(step, 0), start + duration)
    lengths = [end[step] - begin[step] for step in begin]
    return {
        "operations in the note": (float(len(table["rank"])), ""),
        "ranks": (float(len(work)), ""),
        "steps": (float(len(lengths) * len(work)), ""),
        "median step": (statistics.median_low(lengths) * 1e9, "ns"),
        "slowest rank": (float(max(work, key=lambda rank: work[rank])), ""),
        "busy ratio of forward and backward": (
            sum(work.values()) / len(work) / sum(lengths),
            "ratio",
        ),
    }


def megatron(files: Sequence[Path]) -> Truth:
    """Passes, and each stage's share of time without a pass."""
    events = json.loads(files[0].read_text())
    opened: dict[tuple[int, str], list[float]] = defaultdict(list)
    passes: dict[int, list[Interval]] = defaultdict(list)
    begin: dict[int, list[float]] = defaultdict(list)
    end: dict[int, list[float]] = defaultdict(list)
    for event in events:
        key = event["pid"], event["name"]
        if event["name"] == "iteration begin":
            begin[event["pid"]].append(event["ts"])
        elif event["name"] == "iteration end":
            end[event["pid"]].append(event["ts"])
        elif event["name"] in ("forward", "backward"):
            if event["ph"] == "B":
                opened[key].append(event["ts"])
            elif event["ph"] == "E":
                passes[event["pid"]].append((opened[key].pop(), event["ts"]))
            elif event["ph"] == "X":
                passes[event["pid"]].append(_span(event))
    truth: Truth = {"passes in the note": (float(sum(map(len, passes.values()))), "")}
    for stage, intervals in sorted(passes.items()):
        window = list(zip(sorted(begin[stage]), sorted(end[stage])))
        busy = add_lengths(merge(intervals))
        truth[f"bubble of stage {stage} in the note"] = 1 - busy / add_lengths(window), "ratio"
        truth[f"work of stage {stage} in the note"] = busy / len(window) / 1e3, ""
    return truth


def nccl(files: Sequence[Path]) -> Truth:
    """Bandwidth of the largest size, and the average that nccl-tests prints."""
    text = files[0].read_text(errors="replace")
    text = re.sub(r"[A-Za-z][\w.-]*:\d+:\d+ \[\d+\] NCCL .*\n", " ", text)  # split rows
    average = re.search(r"Avg bus bandwidth\s*:\s*([\d.]+)", text)
    truth: Truth = {}
    if average:
        truth["average bus bandwidth stated"] = float(average[1]), ""
    rows = re.findall(
        r"^\s*(\d+)\s+\d+\s+\w+\s+(?:\w+\s+)?(?:-?\d+\s+)?([\d.]+)\s+([\d.]+)\s+([\d.]+)\s",
        text,
        re.M,
    )
    if rows:
        size, time_us, _, bus = max(rows, key=lambda row: int(row[0]))
        truth |= {
            "rows in the note": (float(len(rows)), ""),
            "largest size stated": (float(size), ""),
            "its time stated": (float(time_us), ""),
            "its bus bandwidth stated": (float(bus), ""),
        }
    return truth


READERS: dict[str, Callable[[Sequence[Path]], Truth]] = {
    "kineto": kineto,
    "nsys": nsys,
    "mllog": mllog,
    "dlio": dlio,
    "step-times": step_times,
    "operator-table": operator_table,
    "megatron": megatron,
    "nccl": nccl,
}


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
    worth = report.get("worth") or {}
    yardsticks = {entry["name"]: entry["value"] for entry in worth.get("yardsticks", ())}
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
        "lost ratio": metrics.get("lost.ratio"),
        "data wait ratio": metrics.get("data_wait.ratio"),
        "start-up": outside.get("startup"),
        "recorded": ledger.get("window_ns"),
        "devices": report.get("job", {}).get("gpus"),
        "ranks": len(report.get("ranks", ())),
        "straggler slowdown": metrics.get("yardstick.slowdown_factor"),
        "utilization (AU)": yardsticks.get("MLPerf Storage AU"),
        "slowest rank": _find_culprit(report),
    }
    if name in simple:
        return None if simple[name] is None else float(simple[name])
    found = re.search(_PATTERNS.get(name) or _build_pattern(name), notes)
    if not found:
        return None
    value = float(found[1].replace(",", ""))
    return value / 100 if re.match(r" ?%", found.string[found.end(1) :]) else value


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
