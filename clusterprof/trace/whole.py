"""Writes the recording of a node whose records are all known: what imported files become.

    write_node(folder, node.header(), node.records())

The recorder's writer (`trace.writer`) drops what the disk does not take, for a job must not wait;
here nobody waits, and an error is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from clusterprof.trace.encode import Encoder
from clusterprof.trace.schema import Header, Record
from clusterprof.trace.segments import segment_name


def write_node(folder: Path, header: Header, records: Iterable[Sequence[Record]]) -> None:
    """Write one segment: the header, then the records, those given together in shared frames.

    `folder` is made (mode 0700) when it is not there. Raises OSError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    encoder = Encoder()
    with open(folder / segment_name(1), "xb") as file:
        file.write(b"".join(encoder.frames([header])))
        for some in records:
            file.write(b"".join(encoder.frames(some)))
