"""A node's recording as a stream of chunks: numpy columns for about 60 s at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterprof.timeline.model import Chunk
from clusterprof.trace.schema import Event, Gap, Header, Record

CHUNK_NS = 60_000_000_000


@dataclass(frozen=True, slots=True)
class NodeLoaded:
    """What is known of a node once its recording has been read."""

    header: Header
    first_ns: int
    last_ns: int
    damaged_bytes: int
    damage: tuple[str, ...]
    """One sentence per stretch of the recording that could not be read."""
    dropped_spans: int
    late_spans: int
    """Spans that arrived after their chunk was closed and were left out."""
    gaps: tuple[Gap, ...]
    """The last gap of each column, kind and message: what was not seen, and why."""
    events: tuple[Event, ...]
    """All but process registrations and exits."""


class NodeLoad:
    """Reads one node's folder chunk by chunk; `facts()` is complete after the last chunk."""

    def __init__(self, folder: Path, chunk_ns: int = CHUNK_NS) -> None:
        raise NotImplementedError

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks in order of time; once."""
        raise NotImplementedError

    def facts(self) -> NodeLoaded:
        """Return what was read so far."""
        raise NotImplementedError


def chunks(folder: Path, chunk_ns: int = CHUNK_NS) -> Iterator[Chunk]:
    """Yield one node's recording in chunks."""
    return NodeLoad(folder, chunk_ns).chunks()


def chunks_of(records: Iterable[Record], chunk_ns: int = CHUNK_NS) -> Iterator[Chunk]:
    """Yield the chunks of records that are in memory."""
    raise NotImplementedError
