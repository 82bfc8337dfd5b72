"""Keeps the names of columns out of most frames.

What hardly ever changes is written as a *layout* in the first two frames that need it and then
ever more rarely; the others refer to it by a key that is made from its content, so a reader that
lost one definition takes any other, from any segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clusterprof.trace.frame import layout_key

_DEFINED_EVERY = 64  # uses between two definitions, once a layout is established


@dataclass(slots=True)
class _Layout:
    identity: tuple[Any, ...]
    key: int
    definition: bytes
    uses: int = 0


class LayoutTable:
    """The layouts that are in use, one per collector or table."""

    def __init__(self, encode: Callable[[Any], bytes]) -> None:
        self._encode = encode
        self._layouts: dict[tuple[type, str], _Layout] = {}

    def define_again(self) -> None:
        """Write every layout anew: at the start of a segment, and after frames were lost."""
        for layout in self._layouts.values():
            layout.uses = 0

    def refer(self, kind: type, identity: tuple[Any, ...], definitions: list[bytes]) -> int:
        """Return the key of `kind(*identity)`; add its definition to the frame's when it is due.

        The first of `identity` is the name of the collector or table.
        """
        name = (kind, identity[0])
        known = self._layouts.get(name)
        if known is None or known.identity != identity:
            definition = self._encode(kind(*identity))
            known = _Layout(identity, layout_key(definition), definition)
            self._layouts[name] = known
        uses = known.uses
        # 0, 1, 3, 7, 15, 31, 63, then every 64th: one damaged place never takes the only copy.
        if uses & (uses + 1) == 0 if uses < _DEFINED_EVERY else (uses + 1) % _DEFINED_EVERY == 0:
            definitions.append(known.definition)
        known.uses += 1
        return known.key
