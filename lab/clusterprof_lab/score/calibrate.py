"""How often what was said with some confidence is right, and what to say instead.

    python -m clusterprof_lab.score.calibrate SCORE.json      # of the split dev, nothing else

Isotonic regression by pooling adjacent violators: the closest to the outcomes, in squares, of all
functions that never fall as the confidence rises.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clusterprof_lab.score.figures import NO_FIGURE, TWO_SIDED, Figure, draws

BINS = 10


@dataclass(frozen=True, slots=True)
class Bin:
    """Claims with nearly the same confidence."""

    low: float
    high: float
    said: float
    """Mean confidence."""
    right: float
    """Part that was right."""
    n: int


def reliability(pairs: Sequence[tuple[float, bool]]) -> tuple[tuple[Bin, ...], float]:
    """Return the bins that hold something, and the expected calibration error over them.

    ECE = sum over bins of n / N * |right - said|; 0 without claims.
    """
    held: dict[int, list[tuple[float, bool]]] = {}
    for sure, right in pairs:
        held.setdefault(min(BINS - 1, max(0, int(sure * BINS))), []).append((sure, right))
    bins = []
    for number, some in sorted(held.items()):
        said = sum(sure for sure, _ in some) / len(some)
        right = sum(right for _, right in some) / len(some)
        bins.append(Bin(number / BINS, (number + 1) / BINS, said, right, len(some)))
    ece = sum(one.n * abs(one.right - one.said) for one in bins) / max(len(pairs), 1)
    return tuple(bins), ece


def ece_over(jobs: Sequence[Sequence[tuple[float, bool]]]) -> Figure:
    """Return the ECE over the claims of all jobs, with a bootstrap of whole jobs."""
    claims = [one for one in jobs if one]
    if not claims:
        return NO_FIGURE
    # of each job and bin: claims, their confidence, how many were right
    sums = np.zeros((len(claims), BINS, 3))
    for job, some in enumerate(claims):
        for sure, right in some:
            sums[job, min(BINS - 1, max(0, int(sure * BINS)))] += 1, sure, right

    def ece(of: np.ndarray) -> np.ndarray:
        off = np.abs(of[..., 2] - of[..., 1]).sum(axis=-1)
        return np.asarray(off / of[..., 0].sum(axis=-1))

    value = float(ece(sums.sum(axis=0)))
    if len(claims) == 1:
        return Figure(value, None, None, 1)
    drawn = draws(len(claims))
    low, high = np.quantile([float(ece(sums[rows].sum(axis=0))) for rows in drawn], TWO_SIDED)
    return Figure(value, float(low), float(high), len(claims))


def isotonic(pairs: Sequence[tuple[float, bool]]) -> list[tuple[float, float, float, int]]:
    """Return (lowest confidence, highest, probability of being right, claims), rising.

    Claims of equal confidence are one block from the start.
    """
    blocks: list[list[float]] = []  # low, high, right, n
    for sure, right in sorted(pairs):
        if blocks and blocks[-1][1] == sure:
            blocks[-1][2] += right
            blocks[-1][3] += 1
        else:
            blocks.append([sure, sure, float(right), 1.0])
    pooled: list[list[float]] = []
    for block in blocks:
        pooled.append(block)
        while len(pooled) > 1 and _part(pooled[-2]) >= _part(pooled[-1]):
            _, high, right, n = pooled.pop()
            pooled[-1] = [pooled[-1][0], high, pooled[-1][2] + right, pooled[-1][3] + n]
    return [(low, high, right / n, int(n)) for low, high, right, n in pooled]


def _part(block: Sequence[float]) -> float:
    return block[2] / block[3]


def table(pairs: Sequence[tuple[float, bool]]) -> str:
    """Return the steps as Python that `clusterprof.analysis.attribution.confidence` can hold."""
    lines = ["# (confidence from, probability of being right), claims behind it"]
    lines += [f"({low:.3f}, {part:.3f}),  # {n}" for low, _, part, n in isotonic(pairs)]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the table of stored scores; 2 when one is not of the split dev."""
    pairs: list[tuple[float, bool]] = []
    for name in arguments:
        document = json.loads(Path(name).read_text(encoding="utf-8"))
        if document.get("split") != "dev":
            print(
                f"{name}: split {document.get('split')!r}: only dev may be learnt from",
                file=sys.stderr,
            )
            return 2
        pairs += [(sure, right) for sure, right, *_ in document["claims"]]
    if not pairs:
        print("give score.json files that hold claims with a confidence", file=sys.stderr)
        return 2
    bins, ece = reliability(pairs)
    print(table(pairs))
    print(f"# {len(pairs)} claims in {len(bins)} bins, ECE before: {ece:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
