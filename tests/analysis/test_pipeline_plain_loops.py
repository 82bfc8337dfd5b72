"""Loops that no framework marks: validation, logs, loaders of several epochs, CPUs taken away."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.output.renderers.plain import Plain
from clusterprof.probe import layout
from clusterprof.report.model import Finding, Report
from tests.support.recordings import MAIN, SECOND, Script, make_training
from tests.support.report_laws import analyze_script

STEP_S, STEPS = 0.3, 60
WORKERS, FETCH_S, COMPUTE_S, EPOCH_STEPS = 2, 1.6, 0.3, 15


def lost_seconds(report: Report) -> dict[str, float]:
    """Seconds by cause of the only rank, without those below 0.3 s."""
    [ledger] = report.ranks
    return {id_: ns / SECOND for id_, ns in ledger.buckets if ns >= 0.3 * SECOND}


def named(report: Report, cause: str) -> Finding:
    return next(finding for finding in report.findings if finding.cause.id == cause)


def plain_loop(pauses: dict[int, str], device: bool = True) -> Script:
    """60 steps of 0.3 s; step `number` is longer by what the main thread does in pauses[number],
    in which the device has nothing to do."""
    script = Script(end=0.0, busy=[] if device else None, variables={"RANK": "0"})
    script.worker, script.written = "I1", 1 << 10
    main, busy, at = ["U1"], [], 1.0
    for number in range(STEPS):
        doing = pauses.get(number, "")
        pause = sum(float(word[1:]) for word in doing.split())
        end = round(at + STEP_S + pause, 6)
        script.main_spans.append((layout.STEP, at, end, number))
        busy.append((round(at + pause, 6), end))
        main += [doing, f"U{STEP_S}"]
        at = end
    script.main, script.end = " ".join(main), round(at + 1.0, 6)
    script.busy = busy if device else None
    return script


@pytest.mark.parametrize(
    ("pause", "device"),
    [("U0.9", True), ("F0.5", True), ("F0.5", False)],
    ids=["validation", "log", "log without a device"],
)
def test_unmarked_host_work_counts_as_evaluation_or_logging(
    pause: str, device: bool, tmp_path: Path
) -> None:
    """In every tenth step, validation on the CPU for 0.9 s, or a log blocked for 0.5 s.

    Without a device, a thread that computes loses nothing that can be known.
    """
    report = analyze_script(plain_loop(dict.fromkeys(range(5, STEPS, 10), pause), device), tmp_path)
    assert lost_seconds(report) == {"eval-host": pytest.approx(6 * float(pause[1:]), abs=0.3)}
    assert report.findings[0].cause.id == "eval-host"


def loader_of(epochs: int) -> Script:
    """A loader with two workers that are always busy, new ones in each epoch.

    Batch i of an epoch is made in [0.8 i, 0.8 i + 1.6) s, by the two in turn: a step takes 0.8 s,
    of which 0.5 s are a wait for its batch.
    """
    script = Script(end=0.0, variables={"RANK": "0"})
    script.worker = "I1"
    main, busy, number, begin = ["U1"], [], 0, 1.0
    for epoch in range(epochs):
        period = FETCH_S / WORKERS
        pids = [301 + WORKERS * epoch + at for at in range(WORKERS)]
        spans: dict[int, list[tuple]] = {pid: [] for pid in pids}
        for pid in pids:
            spans[pid].append((layout.WORKER_START, begin, begin, pid - pids[0], WORKERS, MAIN))
        script.main_spans.append((layout.LOADER_START, begin, begin, WORKERS, 0, 1, 0))
        at = begin
        for batch in range(EPOCH_STEPS):
            pid, made = pids[batch % WORKERS], round(begin + period * batch + FETCH_S, 6)
            fetch = round(made - FETCH_S, 6), made, 8, round(FETCH_S * SECOND), 0, 0
            spans[pid].append((layout.FETCH, *fetch))
            end = round(made + COMPUTE_S, 6)
            script.main_spans += [
                (layout.DATA_WAIT, at, made, number, pid, WORKERS, batch == 0),
                (layout.STEP, at, end, number),
            ]
            main += [f"I{round(made - at, 6)}", f"U{COMPUTE_S}"]
            busy.append((made, end))
            at, number = end, number + 1
        for pid in pids:
            first, last = spans[pid][1][1], spans[pid][-1][2]
            script.others[pid] = (first, f"U{round(last - first, 6)}", spans[pid])
        begin = at
    script.main, script.busy, script.end = " ".join(main), busy, round(begin + 1.0, 6)
    return script


@pytest.mark.parametrize("epochs", [1, 2, 4])
def test_workers_of_finished_epochs_leave_the_verdict_unchanged(
    epochs: int, tmp_path: Path
) -> None:
    report = analyze_script(loader_of(epochs), tmp_path)
    lost = lost_seconds(report)
    preparing = named(report, "cpu-preprocess")
    assert report.findings[0] is preparing
    # All but the first waits, in which workers start: 0.5 s in each step.
    waited = epochs * (EPOCH_STEPS - 1) * (FETCH_S / WORKERS - COMPUTE_S)
    assert lost["cpu-preprocess"] >= 0.85 * waited
    assert lost.get("cpu-loader-config", 0.0) <= 0.1 * waited
    count = {item.name: item.value for item in preparing.evidence}["loader.workers_count"]
    assert count == WORKERS
    assert all(advice.id != "prefetch-more" for f in report.findings for advice in f.advice)


def test_contention_names_the_process_that_takes_the_cpus(tmp_path: Path) -> None:
    """The main thread waits for a CPU for 0.2 s of each step of 0.5 s; another child computes."""
    script = make_training([(0.0, 0.5)] * STEPS)
    script.main_spans = [span for span in script.main_spans if span[0] == layout.STEP]
    script.worker_spans, script.worker = [], "I1"
    script.busy = [(1.2 + 0.5 * number, 1.5 + 0.5 * number) for number in range(STEPS)]
    script.main = "U1 " + " ".join(["R0.2 U0.3"] * STEPS)
    script.others[4711] = (0.0, f"U{script.end}", [])
    report = analyze_script(script, tmp_path)
    contention = report.findings[0]
    assert contention.cause.id == "cpu-contention"
    (advice,) = (item for item in contention.advice if item.id == "find-the-neighbour")
    assert advice.what.startswith("Move python (pid 4711) of the job: it keeps 1.0 CPUs busy")
    assert "renice 19 -p 4711" in advice.commands
    assert "python (pid 4711) 1.0" in advice.because


def test_a_cold_cache_finding_states_refaults_and_disk_read_rate(tmp_path: Path) -> None:
    """Of 2 MiB a second that the worker reads, 384 pages of 4 KiB, three quarters, are refaults."""
    script = make_training([(0.24, 0.26)] * 50)
    script.network["disk.read_bytes_total", "vda"] = 2 << 20
    script.network["memory.refaults_total", ""] = 384
    report = analyze_script(script, tmp_path)
    evidence = {item.name: item for item in named(report, "storage-cold-cache").evidence}
    assert evidence["memory.refaulted_ratio"].value == pytest.approx(0.75, abs=0.01)
    assert evidence["disk.read_bytes_per_second"].value == pytest.approx(2 << 20, rel=0.05)
    text = Plain().render(report)
    assert "were read again after the page cache had dropped them" in text
    assert "read from the disk in those waits, first reads included" in text
