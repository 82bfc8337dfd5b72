"""Rewrite a recording without the paths of its machine: rewrite.py FROM TO OLD=NEW ...

The two recordings beside this file are of bench/gpu_check.py on an NVIDIA H200 (27 November 2026,
driver 580.159.04, PyTorch 2.11): its loops `slow-dataset` and `sleep`, with what CUPTI measured in
truth.json.
"""

from __future__ import annotations

import dataclasses
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Clock, Header
from clusterprof.trace.writer import RecordingWriter

RENAMED = tuple(item.partition("=")[::2] for item in sys.argv[3:])


def convert(value: Any) -> Any:
    """Rename the paths in a value, however deep; turn arrays into those that are written."""
    if isinstance(value, np.ndarray):
        return array("d" if value.dtype.kind == "f" else "q", value.tolist())
    if isinstance(value, str):
        for old, new in RENAMED:
            value = value.replace(old, new)
        return value
    if isinstance(value, dict):
        return {key: convert(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(convert(item) for item in value)
    return value


def main(source: Path, target: Path) -> None:
    """Rewrite the recording of one node."""
    frames = list(NodeReader(source).frames())
    header, clock = frames[0][0], frames[1][0]
    assert isinstance(header, Header) and isinstance(clock, Clock)
    host = dict(header.host)
    host["mounts"] = [mount for mount in host["mounts"] if not mount["point"].startswith("/mnt/")]
    header = dataclasses.replace(header, host=host, launcher=convert(header.launcher))
    writer = RecordingWriter(target / header.node["key"], header, lambda: clock, keep_free_bytes=0)
    for records in frames[2:]:
        writer.append(
            *(
                dataclasses.replace(
                    record,
                    **{
                        field.name: convert(getattr(record, field.name))
                        for field in dataclasses.fields(record)
                    },
                )
                for record in records
            )
        )
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
