"""The foreign formats we read. Nothing else happens here."""

from __future__ import annotations

from pathlib import Path

from clusterprof.importers.base import Importer
from clusterprof.importers.dftracer import Dftracer
from clusterprof.importers.dlio import Dlio
from clusterprof.importers.dynolog import Dynolog
from clusterprof.importers.gpu_tables import GpuTables
from clusterprof.importers.kineto import Kineto
from clusterprof.importers.megatron_pipeline import MegatronPipeline
from clusterprof.importers.mllog import Mllog
from clusterprof.importers.nccl_dumps import FlightRecorder
from clusterprof.importers.nccl_inspector_log import NcclInspector
from clusterprof.importers.nccl_text import NcclOutput
from clusterprof.importers.nsys import Nsys
from clusterprof.importers.nvidia_smi import NvidiaSmi
from clusterprof.importers.operator_table import OperatorTable
from clusterprof.importers.perfetto import Perfetto
from clusterprof.importers.prometheus import Prometheus
from clusterprof.importers.rank_series import RankSeries
from clusterprof.importers.step_times import StepTimes
from clusterprof.importers.traceml import TraceML

IMPORTERS: tuple[Importer, ...] = (
    Kineto(),
    Nsys(),
    FlightRecorder(),
    NcclInspector(),
    MegatronPipeline(),
    TraceML(),
    NcclOutput(),
    Perfetto(),
    Prometheus(),
    NvidiaSmi(),
    Dynolog(),
    GpuTables(),
    StepTimes(),
    RankSeries(),
    Dftracer(),
    Dlio(),
    Mllog(),
    OperatorTable(),
)
"""Asked in this order; the first that recognises a file reads it."""


def importer_of(head: bytes, path: Path) -> Importer | None:
    """Return who reads a file that begins like this; None when nobody does."""
    return next((one for one in IMPORTERS if one.recognises(head, path)), None)
