"""How often claims with a given confidence are right, and the confidence to print instead.

    python -m clusterprof_lab.score --slice ci --uncalibrated --out FOLDER
    python -m clusterprof_lab.score.calibrate --store FOLDER/score.json    # split dev, nothing else

writes the tables of `clusterprof.analysis.attribution.confidence`, one per kind of
visibility. Claims are gathered in groups of `LEAST_CLAIMS` before they are fitted.

Isotonic regression by pooling adjacent violators: of all functions that never fall as the
confidence rises, the least-squares fit to the outcomes.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.analysis.attribution import confidence
from clusterprof_lab.score.figures import NO_FIGURE, TWO_SIDED, Figure, draw_trials

BINS = 10
LEAST_CLAIMS = 25
"""Claims that are taken together: fewer say too little about how often they are right."""
FOLDS = 5
VISIBILITY_OF_MODE: Mapping[str, str] = {
    "M0": "hooked",
    "M1": "unmatched",
    "M2": "unmarked",
    "M3": "unmarked",
    "M4": "partial",
    "D0": "driver",
    "D2": "unmarked",
    "imported": "imported",
}
"""Mode of a score -> kind of visibility of `confidence.Visibility`."""
KEPT_APART = ("sharded",)
"""Testbeds whose jobs the rules were not built on."""
OUTSIDE = ("startup", "fail-hang", "fail-restart")
"""Causes outside steps: their confidence is not calibrated."""
TABLE_FILE = Path(confidence.__file__).with_name("confidence.json")


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


def compute_reliability(pairs: Sequence[tuple[float, bool]]) -> tuple[tuple[Bin, ...], float]:
    """Return the bins that hold something, and the expected calibration error over them.

    ECE = sum over bins of n / N * |right - said|; 0 without claims.
    """
    held: dict[int, list[tuple[float, bool]]] = {}
    for sure, right in pairs:
        held.setdefault(min(BINS - 1, max(0, int(sure * BINS))), []).append((sure, right))
    bins = []
    for number, bin_pairs in sorted(held.items()):
        confidence = sum(sure for sure, _ in bin_pairs) / len(bin_pairs)
        right = sum(right for _, right in bin_pairs) / len(bin_pairs)
        bins.append(Bin(number / BINS, (number + 1) / BINS, confidence, right, len(bin_pairs)))
    ece = sum(bin_.n * abs(bin_.right - bin_.said) for bin_ in bins) / max(len(pairs), 1)
    return tuple(bins), ece


def estimate_ece(jobs: Sequence[Sequence[tuple[float, bool]]]) -> Figure:
    """Return the ECE over the claims of all jobs, with a bootstrap of whole jobs."""
    claims = [job for job in jobs if job]
    if not claims:
        return NO_FIGURE
    # of each job and bin: claims, their confidence, how many were right
    sums = np.zeros((len(claims), BINS, 3))
    for job, job_claims in enumerate(claims):
        for sure, right in job_claims:
            sums[job, min(BINS - 1, max(0, int(sure * BINS)))] += 1, sure, right

    def ece(of: np.ndarray) -> np.ndarray:
        off = np.abs(of[..., 2] - of[..., 1]).sum(axis=-1)
        return np.asarray(off / of[..., 0].sum(axis=-1))

    value = float(ece(sums.sum(axis=0)))
    if len(claims) == 1:
        return Figure(value, None, None, 1)
    drawn = draw_trials(len(claims))
    low, high = np.quantile([float(ece(sums[rows].sum(axis=0))) for rows in drawn], TWO_SIDED)
    return Figure(value, float(low), float(high), len(claims))


def fit_isotonic(pairs: Sequence[tuple[float, bool]]) -> list[tuple[float, float, float, int]]:
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
        while len(pooled) > 1 and _get_ratio(pooled[-2]) >= _get_ratio(pooled[-1]):
            _, high, right, n = pooled.pop()
            pooled[-1] = [pooled[-1][0], high, pooled[-1][2] + right, pooled[-1][3] + n]
    return [(low, high, right / n, int(n)) for low, high, right, n in pooled]


def _get_ratio(block: Sequence[float]) -> float:
    return block[2] / block[3]


def fit_table(pairs: Sequence[tuple[float, bool]]) -> list[tuple[float, float]]:
    """Fit (confidence, probability of being right), both rising, by groups of claims.

    It begins at (0, 0): below the lowest measured confidence, as where most of the time has no
    cause, the probability falls.
    """
    ordered = sorted(pairs)
    grouped: list[tuple[float, bool]] = []
    at = 0
    while at < len(ordered):
        end = min(at + LEAST_CLAIMS, len(ordered))
        while end < len(ordered) and ordered[end][0] == ordered[end - 1][0]:
            end += 1
        if len(ordered) - end < LEAST_CLAIMS:
            end = len(ordered)
        group = ordered[at:end]
        mean = sum(sure for sure, _ in group) / len(group)
        grouped += [(mean, right) for _, right in group]
        at = end
    steps = [
        (round((low + high) / 2, 3), round(part, 3)) for low, high, part, _ in fit_isotonic(grouped)
    ]
    return [(0.0, 0.0), *steps]


def select_claims(claims: Sequence[Sequence[Any]]) -> dict[str, list[tuple[str, float, bool]]]:
    """Select by kind of visibility the claims to learn from: (job, confidence, right) each.

    Claims about jobs that the rules were not built on are taken alone where there are enough: how
    often the others are right says too much. claims: lines of a score's `claims`: confidence,
    right, leaf or group, mode, testbed, job.
    """
    by_kind: dict[str, list[tuple[str, float, bool]]] = {}
    apart: dict[str, list[tuple[str, float, bool]]] = {}
    for sure, right, name, mode, testbed, job in claims:
        if mode in VISIBILITY_OF_MODE and name not in OUTSIDE:
            by_kind.setdefault(VISIBILITY_OF_MODE[mode], []).append((job, sure, right))
            if testbed in KEPT_APART:
                apart.setdefault(VISIBILITY_OF_MODE[mode], []).append((job, sure, right))
    by_kind |= {
        kind: kind_claims
        for kind, kind_claims in apart.items()
        if len(kind_claims) >= 2 * LEAST_CLAIMS
    }
    return {
        k: kind_claims
        for k, kind_claims in sorted(by_kind.items())
        if len(kind_claims) >= 2 * LEAST_CLAIMS
    }


def fit_tables(claims: Sequence[Sequence[Any]]) -> dict[str, list[tuple[float, float]]]:
    """Fit a table for each kind of visibility with enough claims."""
    return {
        kind: fit_table([(sure, right) for _, sure, right in kind_claims])
        for kind, kind_claims in select_claims(claims).items()
    }


def cross_validate(claims: Sequence[Sequence[Any]]) -> dict[str, tuple[float, float, int]]:
    """Return by kind (ECE before, ECE after, claims), each fifth calibrated on the other jobs."""
    checked = {}
    for kind, kind_claims in select_claims(claims).items():
        folds: list[list[tuple[float, bool]]] = [[] for _ in range(FOLDS)]
        for job, sure, right in kind_claims:
            scenario_and_seed = job.split(".", 1)[-1]  # of all testbeds and modes
            folds[zlib.crc32(scenario_and_seed.encode()) % FOLDS].append((sure, right))
        after = []
        for number, mine in enumerate(folds):
            others = [pair for fold in folds[:number] + folds[number + 1 :] for pair in fold]
            known, hit_rates = zip(*fit_table(others))
            after += [(float(np.interp(sure, known, hit_rates)), right) for sure, right in mine]
        before = [(sure, right) for _, sure, right in kind_claims]
        checked[kind] = (
            compute_reliability(before)[1],
            compute_reliability(after)[1],
            len(kind_claims),
        )
    return checked


def main(arguments: Sequence[str]) -> int:
    """Fit the tables of stored scores; 2 when one is not of the split dev or was calibrated.

    A table that does not lower the error on jobs it was not fitted to is not stored.
    """
    store = "--store" in arguments
    claims: list[Sequence[Any]] = []
    for name in arguments:
        if name == "--store":
            continue
        document = json.loads(Path(name).read_text(encoding="utf-8"))
        if document.get("split") != "dev":
            print(
                f"{name}: split {document.get('split')!r}: only dev may be learnt from",
                file=sys.stderr,
            )
            return 2
        if document.get("calibrated", True):
            print(f"{name}: score it with --uncalibrated first", file=sys.stderr)
            return 2
        claims += document["claims"]
    tables = fit_tables(claims)
    if not tables:
        print("give score.json files that hold claims with a confidence", file=sys.stderr)
        return 2
    checked = cross_validate(claims)
    for kind, table in list(tables.items()):
        before, after, n = checked[kind]
        print(f"{kind}: {n} claims, ECE {before:.3f}, on other jobs {after:.3f}: {table}")
        if after >= before:
            print(f"{kind}: left out, as it does not help on other jobs")
            del tables[kind]
    if store:
        document = {
            "split": "dev",
            "date": date.today().isoformat(),
            "claims": {kind: n for kind, (_, _, n) in checked.items()},
            "tables": tables,
        }
        text = json.dumps(document, indent=1)
        one_line = re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2]", text)
        TABLE_FILE.write_text(one_line + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
