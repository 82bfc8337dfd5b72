"""Jobs of ranks that wait for each other, recorded by hand."""

from __future__ import annotations

from pathlib import Path

from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from clusterprof.report.model import Report
from tests.support.recordings import MAIN, SECOND, WORKER, Script, write_recording
from tests.support.report_laws import check_conservation

GROUP = 7
STEPS = 60
TRANSFER_S = 0.1


def make_scripts(*ranks: tuple[float, float], steps: int = STEPS) -> list[Script]:
    """One script per rank (wait_s, compute_s); every step ends with an all-reduce of all.

    For half of a wait a worker reads, then it decodes. All leave together, 0.1 s after the last
    has come.
    """
    step_s = max(wait + compute for wait, compute in ranks) + TRANSFER_S
    return [_make_script(number, rank, step_s, steps) for number, rank in enumerate(ranks)]


def _make_script(rank: int, rows: tuple[float, float], step_s: float, steps: int) -> Script:
    wait, compute = rows
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a job"}
    script = Script(end=round(2.0 + steps * step_s, 6), variables=variables)
    main, worker = ["U1.0"], ["I1.0"]
    script.worker_spans.append((layout.WORKER_START, 0.5, 0.5, 0, 1, MAIN))
    for number in range(steps):
        at = round(1.0 + number * step_s, 6)
        leave = round(at + step_s, 6)
        come = round(at + wait + compute, 6)
        half = wait / 2
        if wait:
            cpu = [round((wait - half) * SECOND), 0]
            script.worker_spans.append((layout.FETCH, at, at + wait, 8, *cpu, 1 << 20))
            first = number == 0
            script.main_spans.append((layout.DATA_WAIT, at, at + wait, number, WORKER, 1, first))
            main.append(f"I{wait}")
            worker += [f"D{half}", f"U{half}"]
        reduce = (layout.COLLECTIVE, come, leave, GROUP, number, 1000, layout.ALL_REDUCE)
        script.main_spans += [reduce, (layout.STEP, at, leave, number)]
        main += [f"U{compute}", f"I{round(leave - come, 6)}"]
        worker.append(f"I{round(step_s - wait, 6)}")
    script.main, script.worker = " ".join(main), " ".join(worker)
    return script


def record_and_analyze(scripts: list[Script], folder: Path) -> Report:
    for number, script in enumerate(scripts):
        write_recording(script, folder / f"node-{number}")
    report = analyze(folder)
    check_conservation(report)
    return report


def sum_rank_seconds(report: Report, rank: int) -> dict[str, float]:
    return {id_: round(ns / SECOND, 3) for id_, ns in report.ranks[rank].buckets if ns}


def make_scripts_with_devices(*ranks: tuple[float, float], steps: int = STEPS) -> list[Script]:
    """The job with devices: busy while a rank computes, idle in every wait."""
    scripts = make_scripts(*ranks, steps=steps)
    for script, (wait, compute) in zip(scripts, ranks):
        starts = [span[1] for span in script.main_spans if span[0] == 3]  # steps
        script.busy = [(start + wait, start + wait + compute) for start in starts]
    return scripts
