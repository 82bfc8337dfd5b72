"""Does the printed bound of clocks hold? 10,000 synthetic clusters.

Offsets of ± 50 ms, drifts of ± 50 ppm; all ranks leave slightly late, one in 50 by 10 to 100 ms.
Exits with 1 when the true error exceeds the bound in any trial.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.synthetic.clocks import align_random_cluster

TRIALS = 10_000


def main(arguments: list[str]) -> int:
    """Print how many trials stayed within the bound."""
    trials = int(arguments[0]) if arguments else TRIALS
    began = time.process_time()
    results = np.array([align_random_cluster(seed) for seed in range(trials)])
    error, bound = results[:, 0], results[:, 1]
    within = int((error <= 1).sum())
    print(f"within the bound: {within} of {trials}; largest error {error.max():.2f} bounds")
    low, middle, high = np.quantile(bound, (0.1, 0.5, 0.9)) / 1e6
    print(f"bound of a node: {middle:.2f} ms in the median ({low:.3f} to {high:.2f}, 8 of 10)")
    print(f"{time.process_time() - began:.0f} CPU-s")
    return 0 if within == trials else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
