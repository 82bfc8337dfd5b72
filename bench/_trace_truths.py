"""Numbers of public traces by plain arithmetic on raw events, without code of clusterprof."""

from __future__ import annotations

import csv
import gzip
import json
import re
import sqlite3
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Interval = tuple[float, float]
Truth = dict[str, tuple[float, str]]
"""Name of a number -> its value and unit."""

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "mtia_ccp_events")
COLLECTIVE = re.compile(
    r"nccl|rccl|oneccl|multimem_all_reduce|::ep::intra|::ep::inter", re.IGNORECASE
)
DEVICE_MARK = "gpu_user_annotation"
LATE_WORK_RATIO = 0.5
"""Of the steps: if the device works for longer beyond them, it is done with the last step then."""
FROM_OR_TO_HOST = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost")


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


@dataclass
class Rank:
    """One trace of PyTorch's profiler, in us."""

    in_step: float
    busy: float
    lost: float
    waited: float
    step_lengths: list[float]
    kernels: int
    copies: int
    operators: int


def compute_kineto(files: Sequence[Path]) -> Truth:
    """Steps, busy and lost time of all ranks: ProfilerStep spans, else the span of device work."""
    ranks = [read_rank(path) for path in files]
    in_step = sum(rank.in_step for rank in ranks)
    lengths = [length for rank in ranks for length in rank.step_lengths]
    truth: Truth = {
        f"{name} in the note": (float(count), "")
        for name in ("kernels", "copies", "operators")
        if (count := sum(getattr(rank, name) for rank in ranks))
    }
    truth["time in steps"] = in_step * 1e3, "ns"
    if lengths:
        truth["steps"] = float(len(lengths)), ""
        truth["median step"] = statistics.median_low(lengths) * 1e3, "ns"
    if "kernels in the note" in truth:
        truth["busy ratio"] = sum(rank.busy for rank in ranks) / in_step, "ratio"
        truth["lost time"] = sum(rank.lost for rank in ranks) * 1e3, "ns"
        truth["data wait ratio"] = sum(rank.waited for rank in ranks) / in_step, "ratio"
    return truth


def read_rank(path: Path) -> Rank:
    """Add up the events of one file."""
    document = json.loads(read_bytes(path), strict=False)
    events = document if isinstance(document, list) else document["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    work = [event for event in spans if str(event.get("cat")).lower() in DEVICE]
    kernels = [event for event in work if "mem" not in str(event["cat"]).lower()]
    operators = [event for event in spans if str(event.get("cat")).lower() in OPERATORS]
    window, lengths = _find_steps(spans, work, operators)

    def cut(chosen: Iterable[dict[str, Any]]) -> list[Interval]:
        return intersect(merge(_get_span(event) for event in chosen), [window])

    active = cut(work)
    computing = cut(event for event in kernels if not COLLECTIVE.search(event["name"]))
    collective = cut(event for event in kernels if COLLECTIVE.search(event["name"]))
    copies = cut(event for event in work if FROM_OR_TO_HOST.search(event["name"]))
    rest = cut(event for event in work if not FROM_OR_TO_HOST.search(event["name"]))
    exposed = add_lengths(collective) - add_lengths(intersect(collective, computing))
    exposed += add_lengths(copies) - add_lengths(intersect(copies, rest))
    in_step, busy = window[1] - window[0], add_lengths(active)
    return Rank(
        in_step,
        busy,
        in_step - busy + exposed,
        add_lengths(cut(event for event in spans if "DataLoader)#" in str(event.get("name")))),
        lengths,
        len(kernels),
        len(work) - len(kernels),
        len(operators),
    )


def _find_steps(
    spans: Sequence[dict[str, Any]],
    work: Sequence[dict[str, Any]],
    operators: Sequence[dict[str, Any]],
) -> tuple[Interval, list[float]]:
    """Find the window of the steps and their lengths.

    If the device is far behind its host, a step ends when the work launched in it has ended.
    """
    hosts = {event.get("pid") for event in operators}
    marks = [event for event in spans if str(event.get("name")).startswith("ProfilerStep#")]
    steps = [
        _get_span(event)
        for event in marks
        if event.get("pid") in hosts and event.get("cat") != DEVICE_MARK
    ]
    covered = steps or [_get_span(event) for event in work or operators]
    start, end = min(start for start, _ in covered), max(end for _, end in covered)
    late_end = _find_end_of_launched(spans, work, start, end) if steps else end
    if late_end - end > LATE_WORK_RATIO * (end - start):
        end = late_end
        begin, late_steps = start, []
        for step_start, step_end in sorted(steps):
            done = max(begin, _find_end_of_launched(spans, work, step_start, step_end))
            late_steps.append((max(begin, step_start), done))
            begin = done
        steps = late_steps
    return (start, end), [step_end - step_start for step_start, step_end in steps]


OPERATORS = ("cpu_op", "operator")


def _find_end_of_launched(
    spans: Sequence[dict[str, Any]], work: Sequence[dict[str, Any]], start: float, end: float
) -> float:
    """Return when the device ended what was launched from `start` to `end`."""
    launched = {
        event.get("args", {}).get("correlation")
        for event in spans
        if str(event.get("cat")).endswith(("_runtime", "_driver", "Runtime"))
        and start <= float(event["ts"]) < end
    }
    launched.discard(None)
    late = [
        _get_span(event) for event in work if event.get("args", {}).get("correlation") in launched
    ]
    return max((late_end for _, late_end in late), default=end)


def _get_span(event: dict[str, Any]) -> Interval:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def compute_nsys(files: Sequence[Path]) -> Truth:
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


def compute_mllog(files: Sequence[Path]) -> Truth:
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
    }
    if spans["eval"]:
        truth["evaluations in the note"] = float(len(spans["eval"])), ""
    if spans["run"]:
        truth["time of the run stated"] = sum(spans["run"]) / 1e3, ""
    return truth


def compute_dlio(files: Sequence[Path]) -> Truth:
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


def compute_step_times(files: Sequence[Path]) -> Truth:
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


def compute_operator_table(files: Sequence[Path]) -> Truth:
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
    truth: Truth = {
        "operations in the note": (float(len(table["rank"])), ""),
        "ranks": (float(len(work)), ""),
        "steps": (float(len(lengths) * len(work)), ""),
        "median step": (statistics.median_low(lengths) * 1e9, "ns"),
        "busy ratio of forward and backward": (
            sum(work.values()) / len(work) / sum(lengths),
            "ratio",
        ),
    }
    *_, second, slowest = sorted(work, key=lambda rank: work[rank])
    if work[slowest] > 1.02 * work[second]:  # else no single rank is the slowest
        truth["slowest rank"] = float(slowest), ""
    return truth


def compute_megatron(files: Sequence[Path]) -> Truth:
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
                passes[event["pid"]].append(_get_span(event))
    truth: Truth = {"passes in the note": (float(sum(map(len, passes.values()))), "")}
    for stage, intervals in sorted(passes.items()):
        window = list(zip(sorted(begin[stage]), sorted(end[stage])))
        busy = add_lengths(merge(intervals))
        truth[f"bubble of stage {stage} in the note"] = 1 - busy / add_lengths(window), "ratio"
        truth[f"work of stage {stage} in the note"] = busy / len(window) / 1e3, ""
    return truth


def compute_nccl(files: Sequence[Path]) -> Truth:
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
    "kineto": compute_kineto,
    "nsys": compute_nsys,
    "mllog": compute_mllog,
    "dlio": compute_dlio,
    "step-times": compute_step_times,
    "operator-table": compute_operator_table,
    "megatron": compute_megatron,
    "nccl": compute_nccl,
}
