"""One answer to what fixing a cause wins: the replay's, in device time, wherever it could be made.

    worth       the job would end 10 s sooner     of 8 devices
    finding     fixing only this wins 80 s        of device time

What findings are worth by the sums of attribution (`attribution/gain`, `blame_gains`) is said only
where nothing could be played again: those know nothing of what hides behind what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clusterprof.engine.gained import STRUCTURE, UNSEEN
from clusterprof.engine.worth import AT_MOST, OUTSIDE
from clusterprof.findings import Culprit, Finding
from clusterprof.worth import CauseWorth, Worth

_NO_ANSWER = (STRUCTURE, UNSEEN, OUTSIDE, AT_MOST)
"""Reasons that lie in the cause: no other way of counting knows better."""


def with_wins(findings: Sequence[Finding], worth: Worth) -> tuple[Finding, ...]:
    """Return the findings with what fixing them wins; `worth` has a line for each, in order."""
    return tuple(
        _with_wins(one, said, worth.gpus) for one, said in zip(findings, worth.causes, strict=True)
    )


def _with_wins(finding: Finding, said: CauseWorth, gpus: int) -> Finding:
    if said.saved_ns is None:
        return replace(finding, recoverable_ns=None) if said.why_missing in _NO_ANSWER else finding
    won_ns = max(said.saved_ns, 0) * gpus
    culprits = tuple(_at_most(one, won_ns, len(finding.culprits)) for one in finding.culprits)
    return replace(finding, recoverable_ns=won_ns, culprits=culprits)


def _at_most(one: Culprit, won_ns: int, count: int) -> Culprit:
    """Fixing one culprit wins no more than fixing the cause; of the only one, just that."""
    if one.recoverable_ns is None:
        return one
    return replace(one, recoverable_ns=won_ns if count == 1 else min(one.recoverable_ns, won_ns))
