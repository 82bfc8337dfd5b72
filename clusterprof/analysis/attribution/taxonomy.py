"""Derive from the registry of causes what the attribution needs to know about all of them.

All causes by id, the families, the precedence of claims, and the ids under which time may
be claimed. Every fact about one cause is on the cause itself (`report.model.Cause`).
"""

from __future__ import annotations

from clusterprof.analysis.detectors.cross_rank import PEER_CAUSES
from clusterprof.analysis.detectors.registry import DETECTORS
from clusterprof.report import families
from clusterprof.report.model import Cause

FAMILIES: dict[str, Cause] = {
    family.name: Cause(
        family.name, family.name, family.title, family.advice, hidden_cost=family.hidden_cost
    )
    for family in families.FAMILIES
}
"""Families as causes, named when the cause itself cannot be decided."""
CAUSES: dict[str, Cause] = {
    **FAMILIES,
    **{cause.id: cause for cause in PEER_CAUSES},
    **{detector.cause.id: detector.cause for detector in DETECTORS},
}


FAMILY_CLAIMS = ("storage", "cpu", "launch", "h2d", "eval")
"""Families for which time is claimed without a cause."""
PRECEDENCE: tuple[str, ...] = tuple(
    sorted((detector.cause.id for detector in DETECTORS), key=lambda id_: CAUSES[id_].precedence)
)
"""Causes that claim time of a rank, in the order in which their claims are served."""
STARTUP = "startup"
CLAIMABLE_CAUSES = (*PRECEDENCE, *FAMILY_CLAIMS)
"""Causes under which the time of a rank may be claimed."""
