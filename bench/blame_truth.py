"""Who was at fault? Blame beside rules of thumb, on the same synthetic jobs, 8 to 4,096 ranks.

One fault per job: a random rank, cause and size (10 to 100 % of a step's work), in every step or in
half of them, with 2 % jitter. Every other job also has a decoy: a rank that loads data for six
tenths of its time and computes that much less, so that no rank ever waits for it. A rule is right
when it names the rank at fault. The last column counts only jobs in which the slowest total compute
does not reveal the culprit; the target is about those. Exits with 1 when blame is right in less
than 99 % of them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
sys.path.insert(0, str(FOLDER))

from baselines.rules import RULES

from tests.support.synthetic.scenarios import draw_fault
from tests.support.synthetic.score import blame_job, find_peer_groups, rank_culprits

# Layout, ranks, jobs, steps.
JOBS = (
    ("data parallel", 8, 60, 20),
    ("data parallel", 64, 60, 20),
    ("data parallel", 512, 30, 20),
    ("data parallel", 4096, 10, 10),
    ("nodes and world", 8, 60, 20),
    ("nodes and world", 64, 60, 20),
    ("nodes and world", 512, 30, 20),
    ("nodes and world", 4096, 10, 10),
    ("pipeline", 8, 40, 10),
    ("pipeline", 64, 30, 10),
    ("pipeline", 512, 10, 6),
    ("pipeline", 4096, 3, 4),
)
OURS = "blame"
TARGET_RATIO = 0.99


def main() -> int:
    """Print a table of rules by layout; return 1 when blame misses its target."""
    layouts = list(dict.fromkeys(row[0] for row in JOBS))
    names = [*layouts, "decoy", "all", "hard"]
    right = {name: dict.fromkeys(names, 0) for name in [OURS, *RULES]}
    count = dict.fromkeys(names, 0)
    began, missed = time.process_time(), []
    for layout, ranks, jobs, steps in JOBS:
        for seed in range(jobs):
            job = draw_fault(layout, ranks, 1000 + seed, steps, decoy=seed % 2 == 1)
            guilty = job.faults[0].rank
            books = blame_job(job)
            culprits = rank_culprits(books, find_peer_groups(job.ops, ranks))
            says = {OURS: culprits[0][0] if culprits else -1}
            says.update({name: rule(job) for name, rule in RULES.items()})
            hard = says["slowest total compute"] != guilty
            columns = [layout, "all", *["decoy"] * (seed % 2), *["hard"] * hard]
            for column in columns:
                count[column] += 1
                for name, rank in says.items():
                    right[name][column] += rank == guilty
            if says[OURS] != guilty:
                missed.append(f"{layout}, {ranks} ranks, seed {1000 + seed}")
    print(f"{'right':<24}" + "".join(f"{name:>17}" for name in names))
    for name, by in right.items():
        print(f"{name:<24}" + "".join(f"{by[c]:>9} of {count[c]:>4}" for c in by))
    for job_name in missed:
        print(f"missed: {job_name}")
    print(f"{time.process_time() - began:.0f} CPU-s; target {TARGET_RATIO:.0%} of all and of hard")
    kept = all(right[OURS][c] >= TARGET_RATIO * count[c] for c in ("all", "hard"))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
