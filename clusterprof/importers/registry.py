"""The foreign formats we read. Nothing else happens here."""

from __future__ import annotations

from pathlib import Path

from clusterprof.importers.base import Importer
<<<<<<< HEAD
from clusterprof.importers.kineto import Kineto

IMPORTERS: tuple[Importer, ...] = (Kineto(),)
=======
from clusterprof.importers.megatron_pipeline import MegatronPipeline
from clusterprof.importers.nccl_dumps import FlightRecorder
from clusterprof.importers.nccl_inspector_log import NcclInspector
from clusterprof.importers.nccl_text import NcclOutput
from clusterprof.importers.nsys import Nsys
from clusterprof.importers.perfetto import Perfetto
from clusterprof.importers.traceml import TraceML

IMPORTERS: tuple[Importer, ...] = (
    Nsys(), FlightRecorder(), NcclInspector(), MegatronPipeline(), TraceML(), NcclOutput(),
    Perfetto(),
)  # fmt: skip
>>>>>>> nsys
"""Asked in this order; the first that recognises a file reads it."""


def importer_of(head: bytes, path: Path) -> Importer | None:
    """Return who reads a file that begins like this; None when nobody does."""
    return next((one for one in IMPORTERS if one.recognises(head, path)), None)
