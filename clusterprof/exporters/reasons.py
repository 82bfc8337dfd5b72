"""Why a value is missing: the gaps of a recording, remembered while it passes by."""

from __future__ import annotations

from clusterprof.renderers.text_safety import safe_text
from clusterprof.trace.schema import Gap

UNSAID = "missing, and the recording does not say why"


class Reasons:
    """The last gap of every column, device and collector of one node."""

    def __init__(self) -> None:
        self._gaps: dict[tuple[str, str, str], str] = {}

    def see(self, gap: Gap) -> None:
        """Take one gap."""
        self._gaps[gap.collector, gap.signal, gap.device] = reason_of(gap)

    def of(self, collector: str, signal: str, device: str) -> str:
        """Return why a column has no value: the nearest that was said of it."""
        places = ((signal, device), (signal, ""), ("", device), ("", ""))
        for place in places:
            found = self._gaps.get((collector, *place))
            if found is not None:
                return found
        return UNSAID


def reason_of(gap: Gap) -> str:
    """Return a gap in words, safe to show."""
    return safe_text(f"{gap.kind}: {gap.message}", 1000)
