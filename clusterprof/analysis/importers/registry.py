"""Registry of the foreign formats: one line each, loaded when first needed.

Loading all importers takes twenty times as long as testing one file, so the importers after the one
that recognizes the file are not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import ClassVar, overload

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Importer, Source
from clusterprof.analysis.importers.core.byte_sources import FileSource
from clusterprof.analysis.importers.core.node_tables import NodeTables

_IMPORTER_PATHS = (
    "kineto.importer:Kineto",
    "nsys.importer:Nsys",
    "nsys.report:NsysReport",
    "vendors.xplane:XPlane",
    "vendors.rocprof:Rocprof",
    "vendors.kernel_table:KernelTable",
    "nccl.flight_recorder:FlightRecorder",
    "nccl.inspector:NcclInspector",
    "workloads.megatron:MegatronPipeline",
    "workloads.traceml:TraceML",
    "nccl.text_logs:NcclOutput",
    "workloads.megatron_log:MegatronLog",
    "registry:Perfetto",
    "metrics.prometheus:Prometheus",
    "metrics.nvidia_smi:NvidiaSmi",
    "metrics.rocm_smi:RocmSmi",
    "metrics.dynolog:Dynolog",
    "metrics.gpu_tables:GpuTables",
    "metrics.tensorboard:TensorBoard",
    "workloads.step_times:StepTimes",
    "metrics.rank_series:RankSeries",
    "workloads.dftracer:Dftracer",
    "workloads.chakra:Chakra",
    "workloads.dlio:Dlio",
    "workloads.darshan:Darshan",
    "workloads.mllog:Mllog",
    "workloads.operator_table:OperatorTable",
    "workloads.horovod:HorovodTimeline",
    "kineto.importer:ChromeTrace",
)
"""Module in this folder, and class in it."""


@cache
def _load_importer(path: str) -> Importer:
    module, _, name = path.partition(":")
    importer: Importer = getattr(import_module(f"clusterprof.analysis.importers.{module}"), name)()
    return importer


class _LazyImporters(Sequence[Importer]):
    """Sequence of all importers, each loaded at its first use."""

    def __len__(self) -> int:
        return len(_IMPORTER_PATHS)

    def __iter__(self) -> Iterator[Importer]:
        return map(_load_importer, _IMPORTER_PATHS)

    @overload
    def __getitem__(self, index: int) -> Importer: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Importer, ...]: ...

    def __getitem__(self, at: int | slice) -> Importer | tuple[Importer, ...]:
        if isinstance(at, int):
            return _load_importer(_IMPORTER_PATHS[at])
        return tuple(map(_load_importer, _IMPORTER_PATHS[at]))


IMPORTERS: Sequence[Importer] = _LazyImporters()
"""All importers in the order in which they are tried; the first that recognizes a file reads it."""


def find_importer(head: bytes, path: Path) -> Importer | None:
    """Find the importer that reads a file with this head; None if no importer recognizes it."""
    return next((importer for importer in IMPORTERS if importer.recognizes(head, path)), None)


_LOGS = ("nccl.text_logs:NcclOutput", "workloads.megatron_log:MegatronLog")
"""Formats of single lines, which stand anywhere in the output of a job, also several in one."""


def find_importers(source: FileSource) -> tuple[Importer, ...]:
    """Find the importers that read a source: by its head, of logs also by text from all of it."""
    first = find_importer(source.head, source.path)
    logs = tuple(map(_load_importer, _LOGS))
    if first is not None and first not in logs:
        return (first,)
    text = source.sample_text()
    matching = tuple(log for log in logs if log.recognizes(text, source.path))
    return matching or ((first,) if first is not None else ())


def get_importer(name: str) -> Importer | None:
    """Return the importer with this name; None if there is none."""
    return next((importer for importer in IMPORTERS if importer.name == name), None)


_SUFFIXES = (".pftrace", ".perfetto-trace", ".perfetto", ".pftrace.gz")


class Perfetto:
    """Binary Perfetto traces (protobuf): recognized, and refused with a way to convert them.

    ## How to make the file

    Convert the trace to Chrome JSON first; `traceconv` comes with Perfetto:

        traceconv json trace.pftrace trace.json

    ## How to analyze it

        clusterprof analyze trace.json

    ## What is read

    Nothing of the binary trace. It is recognized so that the error message can name the format.

    ## What it cannot see

    Everything: reading this format needs Perfetto's trace processor, a separate program.
    """

    name: ClassVar[str] = "perfetto"
    title: ClassVar[str] = "Perfetto trace (protobuf)"
    combines_files: ClassVar[bool] = False

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether a file looks like a binary trace: first byte and suffix."""
        return head[:1] == b"\x0a" and path.name.endswith(_SUFFIXES)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Raise CannotImportError with the command that converts the file.

        Raises: CannotImportError always.
        """
        raise CannotImportError(
            "binary Perfetto traces are not read; convert to JSON: traceconv json FILE out.json",
            "traceconv comes with Perfetto",
        )
        yield  # a generator, as all importers are
