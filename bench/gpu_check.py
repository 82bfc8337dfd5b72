"""What does a real GPU say? `make gpu-check`: eight minutes, unattended, on a machine with CUDA.

Measures the driver's calls, the recorder and the probe's hooks against CUPTI on loops with known
faults, and what the probe costs. Writes gpu-check.json and the results of docs/gpu-notes.md; what
could not be tried is written with its reason. `--from FILE` writes the page from a stored result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from clusterprof.agent.collectors.gpu.nvml_library import NvmlLibrary, load_pynvml

PAGE = ROOT / "docs/gpu-notes.md"
BEGIN_MARK, END_MARK = (
    "<!-- results: written by `make gpu-check` -->\n",
    "<!-- end of results -->\n",
)
JOBS = ROOT / "bench/_gpu_jobs.py"
LOOP_S = 7.0
DATA_WAIT, EXPOSED = 1, 8
LOOPS: dict[str, tuple[str, ...]] = {
    "healthy": (),
    "slow-dataset": ("cpu-preprocess",),
    "pageable": ("h2d-copy-bound", "h2d-copy"),
    "sleep": ("host-asleep",),
    "tiny-kernels": ("launch-bound",),
    "item": ("h2d-sync", "launch-bound"),
    "cuda-graph": (),
    "compile": (),
}
"""Causes that may come first in each loop; () = next to nothing is lost."""
KEPT = (
    "slow-dataset-auto",
    "tiny-kernels-auto",
    "item-auto",
    "pageable-auto",
    "sleep-auto",
    "compile-auto",
    "slow-dataset-false",
)
"""Recordings that are stored beside the results."""

Result = dict[str, Any]


def time_driver_calls() -> Result:
    """Time each NVML function that the collector calls, at 10 Hz for 8 s, in µs."""
    nvml = load_pynvml()
    took_us: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    own_us: list[float] = []
    for name in [name for name in dir(nvml) if name.startswith("nvml") and name[4].isupper()]:
        original = getattr(nvml, name)
        if callable(original):
            setattr(nvml, name, _wrap(name, original, took_us, failed))
    library = NvmlLibrary(mark=lambda index, call: None)
    opened = {name: len(values) for name, values in took_us.items()}
    sample_us = []
    for _ in range(80):
        began_s, own_s = time.perf_counter(), time.thread_time()
        for device in library.devices:
            device.sample()
        own_us.append((time.thread_time() - own_s) * 1e6)
        sample_us.append((time.perf_counter() - began_s) * 1e6)
        time.sleep(0.1)
    signals = library.devices[0].signals
    calls = {
        name: [len(us), statistics.median(us), float(np.percentile(us, 99)), max(us)]
        for name, values in took_us.items()
        if (us := values[opened.get(name, 0) :])
    }
    return {
        "calls": calls,
        "failed": failed,
        "sample_us": [statistics.median(sample_us), float(np.percentile(sample_us, 99))],
        "mean_us": [statistics.mean(sample_us), statistics.mean(own_us)],
        "gpm": "gpu.sm_active_ratio" in signals,
        "inventory": library.inventory[0],
    }


def _wrap(
    name: str, original: Callable[..., Any], took_us: dict[str, list[float]], failed: dict[str, str]
) -> Callable[..., Any]:
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return original(*arguments, **keywords)
        except Exception as error:
            failed[name] = str(error)
            raise
        finally:
            took_us.setdefault(name, []).append((time.perf_counter() - began_s) * 1e6)

    return wrapper


def measure_sample_buffer() -> Result:
    """Measure periods and delays of the driver's own samples of utilization, µs."""
    nvml = load_pynvml()
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    newest, stamps, delays = 0, [], []
    for _ in range(200):
        try:
            _, samples = nvml.nvmlDeviceGetSamples(
                handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, newest
            )
        except nvml.NVMLError_NotFound:
            samples = []
        now_us = time.time() * 1e6
        fresh = [s.timeStamp for s in samples if s.timeStamp > newest]
        if fresh:
            newest = max(fresh)
            delays.append(now_us - newest)
            stamps.extend(fresh)
        time.sleep(0.02)
    periods = np.diff(sorted(stamps[-60:]))
    return {
        "samples": len(stamps),
        "period_us": [float(value) for value in np.percentile(periods, (0, 50, 100))],
        "delay_us": [min(delays[1:]), statistics.median(delays[1:]), max(delays[1:])],
    }


def record(out: Path, arguments: list[str], profile: str = "", env: Any = None) -> Result:
    """Record one job; returns the truth that it wrote.

    Raises: RuntimeError with the job's last words when it failed.
    """
    truth, options = out.with_suffix(".truth"), []
    if profile:
        options = ["--profile", str(out.with_suffix(".yaml"))]
        Path(options[1]).write_text(profile, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "clusterprof", "record", "-o", str(out)),
            *(*options, "--", *arguments, str(truth)),
        ],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-6000:])
    return json.loads(truth.read_text(encoding="utf-8")) if truth.exists() else {}


def run_command(*arguments: str) -> str:
    """Run a command of clusterprof; returns its output."""
    return subprocess.run(
        [sys.executable, "-m", "clusterprof", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout


def read_recording(out: Path, truth: Result) -> Result:
    """Read what a recording says of the window of the truth: busy time, exposed waits, ns."""
    began_ns, ended_ns = truth["began_ns"], truth["ended_ns"]
    busy: list[tuple[int, int]] = []
    sm: list[float] = []
    exposed_ns = waits = 0
    for line in run_command("dump", str(out)).splitlines():
        row = json.loads(line)
        if row["record"] == "columns" and "gpu.busy_ns_total" in row["signals"]:
            by_name = dict(zip(row["signals"], row["values"]))
            until_ns = by_name.get("gpu.busy_until_ns") or row["t_ns"]
            busy += [p for p in zip(until_ns, by_name["gpu.busy_ns_total"]) if None not in p]
            active = by_name.get("gpu.sm_active_ratio") or [None] * len(row["t_ns"])
            sm += [
                a for t, a in zip(row["t_ns"], active) if a is not None and began_ns < t < ended_ns
            ]
        elif row["record"] == "spans":
            columns = row.get("columns", row)
            for kind, start, end, b in zip(
                *(columns[n] for n in ("kind", "start_ns", "end_ns", "b"))
            ):
                if kind == EXPOSED and start >= began_ns and end <= ended_ns:
                    exposed_ns, waits = exposed_ns + b, waits + 1
    times, totals = (np.array(column, dtype=float) for column in zip(*sorted(set(busy))))
    rise_ns = float(np.diff(np.interp([began_ns, ended_ns], times, totals))[0])
    return {
        "busy_ns": rise_ns,
        "sm_active_ratio": statistics.mean(sm) if sm else None,
        "exposed_ns": exposed_ns,
        "exposed_count": waits,
    }


def read_verdict(out: Path, *selection: str) -> Result:
    """Read lost share, main cause and largest causes from the report of a recording.

    selection: options that select a part of the run.
    """
    report = json.loads(run_command("analyze", str(out), "--format", "json", *selection))
    ledger = report["ledger"]
    return {
        "lost_ratio": ledger["lost_ns"] / ledger["in_step_ns"] if ledger["in_step_ns"] else None,
        "main_cause": report["main_cause"],
        "causes": [[f["cause"], f["share_ratio"]] for f in report["findings"][:4]],
    }


def check_loop(folder: Path, name: str, gpm: str = "auto") -> Result:
    """Record one loop and compare recording and report with its truth."""
    out = folder / f"{name}-{gpm}"
    seconds = str(LOOP_S + (10 if name == "compile" else 0))
    profile = "" if gpm == "auto" else f"sampling: {{gpm: {gpm}}}\n"
    truth = record(out, [sys.executable, str(JOBS), name, seconds], profile)
    result = {"truth": truth, "gpm": gpm}
    result["recording"] = read_recording(out, truth)
    # The first steps warm up, and a trace's end falls into a step: neither is the loop's fault.
    result["verdict"] = read_verdict(out, "--steps", f"20:{truth['steps_before'] - 2}")
    return result


def check_two_ranks(folder: Path, backend: str, env: Any = None, suffix: str = "") -> Result:
    """Record two ranks on one GPU of which rank 1 is late; returns what the report names."""
    out = folder / f"ranks-{backend}{suffix}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    record(
        out, [*launcher, str(JOBS), "rank", "14"], env={"GPU_CHECK_BACKEND": backend, **(env or {})}
    )
    # The first steps wait for CUDA and the loader's workers; they are not the loop's fault.
    verdict = read_verdict(out, "--steps", "50:")
    return {"verdict": verdict, "screen": run_command("analyze", str(out), "--steps", "50:")}


def check_mps(folder: Path) -> Result:
    """Record two ranks that share one GPU through a Multi-Process Service of our own.

    Raises: RuntimeError when the service is not installed or does not start.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise RuntimeError("nvidia-cuda-mps-control is not installed")
    pipe = folder / "mps"
    pipe.mkdir()
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(pipe)}
    env = {**os.environ, **own}
    started = subprocess.run([control, "-d"], env=env, capture_output=True, text=True, check=False)
    if started.returncode:
        raise RuntimeError(f"the service did not start: {started.stderr.strip()}")
    try:
        return check_two_ranks(folder, "gloo", own, "-mps")
    finally:
        subprocess.run([control], env=env, input="quit\n", text=True, timeout=30, check=False)


def check_events(folder: Path, matmuls: int) -> Result:
    """Measure what the probe costs a job: relative growth of a step, 95 % interval, rounds."""
    out = folder / f"events-{matmuls}"
    return record(out, [sys.executable, str(JOBS), out.name, "30"])


def measure(folder: Path, only: str) -> Result:
    """Run the sections whose name begins with `only`; a failure leaves its reason."""
    import torch

    results: Result = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "loops": {},
    }
    sections: list[tuple[str, Callable[[], Any]]] = [
        ("calls_idle", time_driver_calls),
        ("samples", measure_sample_buffer),
        *((f"loops/{name}", lambda name=name: check_loop(folder, name)) for name in LOOPS),
        *(
            (f"loops/{name}, GPM off", lambda name=name: check_loop(folder, name, "false"))
            for name in ("slow-dataset", "tiny-kernels")
        ),
        ("events_short", lambda: check_events(folder, 8)),
        ("events_long", lambda: check_events(folder, 80)),
        ("ranks_nccl", lambda: check_two_ranks(folder, "nccl")),
        ("ranks_gloo", lambda: check_two_ranks(folder, "gloo")),
        ("mps", lambda: check_mps(folder)),
    ]
    for name, section in sections:
        if not name.startswith(only):
            continue
        began_s = time.monotonic()
        place, key = (results["loops"], name[6:]) if name.startswith("loops/") else (results, name)
        try:
            place[key] = section()
        except Exception as error:
            place[key] = {"failed": f"{type(error).__name__}: {error}"}
        print(
            f"{name}: {time.monotonic() - began_s:.0f} s: {json.dumps(place[key])[:600]}",
            flush=True,
        )
    return results


def format_page(results: Result) -> str:
    """Format the results as Markdown."""
    lines = [
        f"Measured on {results['date']} on one {results['gpu']}, PyTorch {results['torch']}, by",
        "`make gpu-check`.",
        "",
        *format_loops(results["loops"]),
        *format_calls(results["calls_idle"]),
        *format_rest(results),
    ]
    return "\n".join(lines) + "\n"


def format_loops(loops: Result) -> list[str]:
    """Format the table of loops: busy time and idle waits against CUPTI, and the verdict."""
    lines = [
        "| loop | busy, CUPTI | recorded | idle data waits, CUPTI | hooks | lost | first cause |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, loop in loops.items():
        if "failed" in loop:
            lines.append(
                f"| {name} | could not be tried: {loop['failed'].splitlines()[-1][:120]} |||||| "
            )
            continue
        truth, seen, verdict = loop["truth"], loop["recording"], loop["verdict"]
        window_ns = truth["ended_ns"] - truth["began_ns"]
        shares = [
            100 * value / window_ns
            for value in (
                truth["busy_ns"],
                seen["busy_ns"],
                truth["idle_in_waits_ns"],
                seen["exposed_ns"],
            )
        ]
        lost = (
            "unknown" if verdict["lost_ratio"] is None else f"{100 * verdict['lost_ratio']:.1f} %"
        )
        cells = " | ".join(f"{share:.1f} %" for share in shares)
        lines.append(f"| {name} | {cells} | {lost} | {verdict['main_cause'] or 'none named'} |")
    return [*lines, ""]


def format_calls(calls: Result) -> list[str]:
    """Format the table of driver calls, the slowest first."""
    if "failed" in calls and "calls" not in calls:
        return [f"Driver calls could not be tried: {calls['failed']}", ""]
    lines = ["| call | calls | median µs | p99 µs | max µs |", "|---|---|---|---|---|"]
    for name, row in sorted(calls["calls"].items(), key=lambda item: -item[1][1]):
        lines.append(f"| {name} | {row[0]} | {row[1]:.0f} | {row[2]:.0f} | {row[3]:.0f} |")
    lines += [
        "",
        "Not available there: " + "; ".join(f"{n} ({e})" for n, e in calls["failed"].items()),
    ]
    (median_us, p99_us), (mean_us, own_us) = calls["sample_us"], calls["mean_us"]
    state = "on" if calls["gpm"] else "off"
    lines += [
        f"One sample of all signals: {median_us:.0f} µs (mean {mean_us:.0f}, p99 {p99_us:.0f}), of",
        f"which {own_us:.0f} µs in the mean are CPU time. `gpm: auto` is {state} there.",
        "",
    ]
    return lines


def format_rest(results: Result) -> list[str]:
    """Format sample buffer, cost of the probe and pairs of ranks."""
    lines = []
    samples = results["samples"]
    if "failed" not in samples:
        period, delay = ([value / 1000 for value in samples[n]] for n in ("period_us", "delay_us"))
        lines.append(
            f"Driver's samples of utilization: one every {period[1]:.0f} ms ({period[0]:.0f} to"
            f" {period[2]:.0f}); the newest is {delay[1]:.0f} ms old when first seen"
            f" ({delay[0]:.0f} to {delay[2]:.0f})."
        )
    for events in (results["events_short"], results["events_long"]):
        if "failed" in events:
            lines.append(f"The probe's cost could not be measured: {events['failed'][-160:]}.")
            continue
        growth = "; ".join(
            f"{label} {100 * events[n][0]:+.2f} % ± {100 * events[n][1]:.2f}"
            for n, label in (("hooks", "hooks"), ("events", "hooks and events"))
        )
        lines.append(f"Growth of a step of {events['step_ns'] / 1e6:.2f} ms: {growth}.")
    for section in ("ranks_nccl", "ranks_gloo", "mps"):
        ranks = results[section]
        label = {"mps": "gloo, MPS"}.get(section, section[6:])
        lines.append(f"Two ranks on one GPU, {label}: {format_ranks(ranks)}")
    return [f"* {line}" for line in lines]


def format_ranks(ranks: Result) -> str:
    """Format what the report says of two ranks, or why they could not be tried."""
    if "failed" in ranks:
        words = ranks["failed"].strip().splitlines()
        reason = next((w for w in words if "Duplicate GPU" in w), words[-1])
        return f"could not be tried: {reason.strip()[:160]}."
    verdict = ranks["verdict"]
    causes = ", ".join(f"{cause} {100 * share:.1f} %" for cause, share in verdict["causes"])
    lost = "unknown" if verdict["lost_ratio"] is None else f"{100 * verdict['lost_ratio']:.1f} %"
    return f"lost {lost}, first cause {verdict['main_cause'] or 'not known'} ({causes})."


def write_page(results: Result) -> None:
    """Put the results between their marks in docs/gpu-notes.md."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN_MARK)
    tail = rest.partition(END_MARK)[2]
    PAGE.write_text(head + BEGIN_MARK + format_page(results) + END_MARK + tail, encoding="utf-8")


def main() -> int:
    """Measure, or read stored results; write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check"), help="folder of gpu-check.json"
    )
    parser.add_argument(
        "--from", dest="stored", type=Path, help="stored results to write the page from"
    )
    parser.add_argument("--only", default="", help="sections that begin so, without the page")
    options = parser.parse_args()
    if options.stored:
        write_page(json.loads(options.stored.read_text(encoding="utf-8")))
        return 0
    try:
        import torch

        has_gpu = torch.cuda.is_available()
    except ImportError:
        has_gpu = False
    if not has_gpu:
        print("Nothing was measured: PyTorch with CUDA and an NVIDIA GPU are needed here.")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), options.only)
        (options.out / "gpu-check.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        for name in KEPT:
            recording = Path(folder) / name
            if recording.is_dir():
                shutil.make_archive(str(options.out / recording.name), "gztar", recording)
    if not options.only:
        write_page(results)
        print(format_page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
