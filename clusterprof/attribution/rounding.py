"""From the finer unit in which claims are kept to whole nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping

from clusterprof.attribution.partial import SHARE


def largest_remainder(units: Mapping[tuple[str, str], int], total_ns: int) -> dict:
    """Round amounts in 1/SHARE ns to whole ns that add up to `total_ns`; ties go by name.

    Requires sum(units) == total_ns * SHARE. 1.5, 1.5 and 1.0 of 4 become 2, 1 and 1.
    """
    assert sum(units.values()) == total_ns * SHARE, "claims do not add up to the lost time"
    whole = {key: amount // SHARE for key, amount in units.items()}
    missing = total_ns - sum(whole.values())
    for key in sorted(units, key=lambda key: (-(units[key] % SHARE), key))[:missing]:
        whole[key] += 1
    return whole
