"""Small recorded runs with a truth beside them, for the tests of the scorer."""

from __future__ import annotations

from pathlib import Path

from clusterprof_lab.truth import Injected, Lost, Place, Truth, write_truth
from tests.support import recordings
from tests.support.waiting_jobs import make_scripts

SECOND = 1_000_000_000
STEPS = 40


def write_two_ranks(folder: Path, name: str, seed: int = 0, ranks: int = 2) -> Path:
    """Two ranks: rank 1's worker reads for 0.15 s of each step of 0.6 s and decodes for 0.05 s;

    rank 0 waits for it in the all-reduce, then both transfer for 0.1 s. In truth 150 and 50 ms
    are lost by each of them to rank 1, and 100 ms to nobody. More ranks wait as rank 0 does.
    """
    run, steps = folder / name, STEPS
    scripts = make_scripts((0.0, 0.3), (0.2, 0.3), *[(0.0, 0.3)] * (ranks - 2), steps=steps)
    for script in scripts:
        script.variables["WORLD_SIZE"] = str(ranks)
    scripts[1].worker = scripts[1].worker.replace("D0.1 U0.1", "D0.15 U0.05")
    scripts[1].worker_spans = [
        (*span[:4], 50_000_000, *span[5:]) if span[0] == recordings.layout.FETCH else span
        for span in scripts[1].worker_spans
    ]
    for rank, script in enumerate(scripts):
        recordings.write_recording(script, run / "recording" / f"node-{rank}")
    each = steps * SECOND // 100
    lost = [
        Lost(cause, culprit, rank, points * each)
        for rank in range(ranks)
        for cause, culprit, points in (
            ("storage-local", 1, 15),
            ("cpu-preprocess", 1, 5),
            ("net-transfer", None, 10),
        )
    ]
    places = tuple(Place(rank, f"node-{rank}", 60 * each, steps) for rank in range(ranks))
    injected = (Injected("storage-local", (1,)),)
    truth = Truth(
        "storage-io-cap",
        "synth",
        "dev",
        "medium",
        seed,
        {},
        places,
        tuple(lost),
        injected,
        step_ns=0.6e9,
        clean_step_ns=0.4e9,
    )
    write_truth(truth, run)
    return run
