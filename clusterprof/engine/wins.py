"""One answer to what fixing a cause wins: the replay's, in device time, wherever it could be made.

    worth       the job would end 10 s sooner     of 8 devices
    finding     fixing only this wins 80 s        of device time

What findings are worth by the sums of attribution (`attribution/gain`, `blame_gains`) is said only
where nothing could be played again: those know nothing of what hides behind what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clusterprof.attribution.blame import IMBALANCE, SLOW_COMPUTE
from clusterprof.engine.besides import CHIEF_RATIO
from clusterprof.engine.gained import STRUCTURE, UNSEEN
from clusterprof.engine.worth import AT_MOST, OUTSIDE
from clusterprof.findings import Culprit, Finding
from clusterprof.worth import CauseWorth, Worth

_NO_ANSWER = (STRUCTURE, UNSEEN, OUTSIDE, AT_MOST)
"""Reasons that lie in the cause: no other way of counting knows better."""


MORE_RATIO = 1.02
"""Of what was lost: a gain that is larger by less needs no words."""


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
    more = _more(finding, gpus) if won_ns > MORE_RATIO * finding.lost_ns else ""
    if more and len(culprits) > 1:
        # What attribution knows of one of several is waiting alone: beside this it would read as if
        # fixing the one that caused nearly all of it won less than what it caused.
        culprits = tuple(replace(one, recoverable_ns=None) for one in culprits)
    return replace(finding, recoverable_ns=won_ns, culprits=culprits, more_why=more)


def _more(finding: Finding, gpus: int) -> str:
    """Say what is won besides what was lost: the sooner end counts for every device."""
    if finding.cause.id in (SLOW_COMPUTE, IMBALANCE) and finding.culprits:
        rank = finding.culprits[0].rank
        alone = len(finding.culprits) == 1 or _caused(finding, 1) < CHIEF_RATIO * _caused(
            finding, 0
        )
        if rank is not None and alone:
            return f"rank {rank} itself is done sooner, too"
        return "the late ranks themselves are done sooner, too"
    return f"all {gpus:,} devices are done sooner, whatever they lost" if gpus > 1 else ""


def _caused(finding: Finding, at: int) -> int:
    one = finding.culprits[at]
    return (one.own_ns or 0) + (one.others_ns or 0)


def _at_most(one: Culprit, won_ns: int, count: int) -> Culprit:
    """Fixing one culprit wins no more than fixing the cause; of the only one, just that."""
    if one.recoverable_ns is None:
        return one
    return replace(one, recoverable_ns=won_ns if count == 1 else min(one.recoverable_ns, won_ns))
