"""The foreign formats we read: a line each, loaded when files are first asked about it.

Loading all of them takes twenty times as long as asking one whether it knows a file, so those
behind the one that recognises it stay unread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import overload

from clusterprof.importers.base import Importer

_PLACES = (
    "kineto:Kineto",
    "nsys:Nsys",
    "nccl_dumps:FlightRecorder",
    "nccl_inspector_log:NcclInspector",
    "megatron_pipeline:MegatronPipeline",
    "traceml:TraceML",
    "nccl_text:NcclOutput",
    "perfetto:Perfetto",
    "prometheus:Prometheus",
    "nvidia_smi:NvidiaSmi",
    "rocm_smi:RocmSmi",
    "dynolog:Dynolog",
    "gpu_tables:GpuTables",
    "tensorboard:TensorBoard",
    "step_times:StepTimes",
    "rank_series:RankSeries",
    "dftracer:Dftracer",
    "dlio:Dlio",
    "mllog:Mllog",
    "operator_table:OperatorTable",
)
"""Module in this folder, and class in it."""


@cache
def _loaded(place: str) -> Importer:
    module, _, name = place.partition(":")
    made: Importer = getattr(import_module(f"clusterprof.importers.{module}"), name)()
    return made


class _Importers(Sequence[Importer]):
    """All of them, each loaded when it is come to."""

    def __len__(self) -> int:
        return len(_PLACES)

    def __iter__(self) -> Iterator[Importer]:
        return map(_loaded, _PLACES)

    @overload
    def __getitem__(self, at: int) -> Importer: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Importer, ...]: ...

    def __getitem__(self, at: int | slice) -> Importer | tuple[Importer, ...]:
        if isinstance(at, int):
            return _loaded(_PLACES[at])
        return tuple(map(_loaded, _PLACES[at]))


IMPORTERS: Sequence[Importer] = _Importers()
"""Asked in this order; the first that recognises a file reads it."""


def importer_of(head: bytes, path: Path) -> Importer | None:
    """Return who reads a file that begins like this; None when nobody does."""
    return next((one for one in IMPORTERS if one.recognises(head, path)), None)


def importer_named(name: str) -> Importer | None:
    """Return the importer of a format by its name; None when there is none."""
    return next((one for one in IMPORTERS if one.name == name), None)
