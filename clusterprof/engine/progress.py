"""How far an analysis has come, for whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterprof.engine.spill import bytes_of
from clusterprof.timeline.load import NodeLoad
from clusterprof.timeline.model import Chunk


@dataclass(frozen=True, slots=True)
class Progress:
    """A stand: what was read of what there is."""

    read_bytes: int
    all_bytes: int
    nodes: int
    """Read to their end."""
    all_nodes: int


Tell = Callable[[Progress], None]


class Stand:
    """Adds up what was read, node after node, and tells it."""

    def __init__(self, folders: Sequence[Path], tell: Tell | None) -> None:
        """`tell` None: nobody wants to know, and nothing is looked up."""
        self._tell = tell
        self._sizes = [bytes_of([one]) for one in folders] if tell is not None else []
        self._nodes = 0

    def within(self, read_bytes: int) -> None:
        """Tell how much of the next node was read."""
        if self._tell is not None:
            before, of = sum(self._sizes[: self._nodes]), self._sizes[self._nodes]
            whole = sum(self._sizes)
            self._tell(Progress(before + min(read_bytes, of), whole, self._nodes, len(self._sizes)))

    def node_done(self) -> None:
        """Tell that the next node was read to its end."""
        self._nodes += 1
        if self._tell is not None:
            before, whole = sum(self._sizes[: self._nodes]), sum(self._sizes)
            self._tell(Progress(before, whole, self._nodes, len(self._sizes)))


def watched(load: NodeLoad, within: Callable[[int], None] | None) -> Iterable[Chunk]:
    """Return the chunks of a node; `within` is told the bytes that were read before each."""
    return load.chunks() if within is None else _told(load, within)


def _told(load: NodeLoad, within: Callable[[int], None]) -> Iterator[Chunk]:
    for chunk in load.chunks():
        within(load.read_bytes)
        yield chunk
