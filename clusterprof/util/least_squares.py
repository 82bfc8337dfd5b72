"""Solve small least-squares problems whose unknowns lie between 0 and 1.

Source: Lawson and Hanson, "Solving Least Squares Problems" (1974), for least squares with bounds;
here by coordinate descent, which converges for them (Luo and Tseng, 1992).
"""

from __future__ import annotations

from operator import mul

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_ROUNDS, _CONVERGED = 200, 1e-5


def solve_within_bounds(matrix: Floats, target: Floats) -> Floats:
    """Minimize x * matrix * x / 2 - target * x for 0 <= x <= 1: float64[k].

    matrix: float64[k, k], positive definite. target: float64[k].
    """
    solved = np.asarray(np.linalg.solve(matrix, target) if target.size else target, np.float64)
    if (solved < 0).any() or (solved > 1).any():
        solved = _descend(matrix, target, np.clip(solved, 0.0, 1.0))
    return solved


def _descend(matrix: Floats, target: Floats, shares: Floats) -> Floats:
    """Minimize x * matrix * x / 2 - target * x for 0 <= x <= 1, from these shares: float64[k]."""
    values = shares.tolist()
    rows = tuple(zip(matrix.tolist(), np.diag(matrix).tolist(), target.tolist()))
    for _ in range(_ROUNDS):
        converged = True
        for at, (row, own, wanted) in enumerate(rows):
            old = values[at]
            new = (wanted - sum(map(mul, row, values)) + own * old) / own
            values[at] = new = 0.0 if new < 0.0 else 1.0 if new > 1.0 else new
            if abs(new - old) >= _CONVERGED:
                converged = False
        if converged:
            break
    return np.array(values)
