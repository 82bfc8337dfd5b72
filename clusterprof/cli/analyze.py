"""`clusterprof analyze RUN...`: show where the device time went, and why device time was
lost.

This module declares the options of `cli.runs` for typer; `cli.runs` parses usual command
lines without it, and runs the analysis. A test keeps both consistent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from clusterprof.cli import common, runs
from clusterprof.cli.common import OptionalNumber, OptionalText, declare_option

KNOWN_FORMATS = (
    "PyTorch profiler (Kineto) trace",
    "Nsight Systems profile (SQLite)",
    "Nsight Systems report (nsys-rep)",
    "JAX or XLA profile (xplane.pb)",
    "rocprof trace (AMD)",
    "table of kernels (nsys stats, nvprof, Ascend)",
    "PyTorch flight recorder dump",
    "NCCL Inspector log",
    "Megatron pipeline trace (MegatronApp)",
    "TraceML summary",
    "NCCL log or nccl-tests table",
    "Megatron-LM log",
    "Perfetto trace (protobuf)",
    "Prometheus metrics",
    "output of nvidia-smi or dcgmi",
    "output of rocm-smi",
    "Dynolog log",
    "table of GPU readings",
    "TensorBoard scalars",
    "table of step times",
    "series of data readiness by rank",
    "DFTracer trace",
    "PyTorch execution trace or Chakra graph",
    "DLIO or MLPerf Storage output",
    "Darshan log",
    "MLPerf log",
    "operator table of a pipelined job",
    "Horovod timeline",
    "Chrome trace (Trace Event Format)",
)
"""Titles of the importers in order, as literals: loading them takes a third of a second."""
HELP_END = f"Known formats of other tools: {', '.join(KNOWN_FORMATS)}."


def analyze(
    run: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Argument(
            metavar="[RUN...]", help=f"{common.RUN_HELP}; default: the newest.", readable=False
        ),
    ] = None,
    format_: Annotated[str, declare_option(runs.FORMAT)] = "terminal",
    as_json: Annotated[bool, declare_option(common.AS_JSON)] = False,
    output: Annotated[Optional[Path], declare_option(common.OUTPUT)] = None,  # noqa: UP045
    profile: Annotated[Optional[str], declare_option(common.PROFILE)] = None,  # noqa: UP045
    jobs: Annotated[int, declare_option(common.JOBS)] = 1,
    scheduler: Annotated[OptionalText, declare_option(common.SCHEDULER)] = None,
    scheduler_file: Annotated[OptionalText, declare_option(common.SCHEDULER_FILE)] = None,
    workers: Annotated[OptionalNumber, declare_option(common.WORKERS)] = None,
    strict: Annotated[bool, declare_option(runs.STRICT)] = False,
    width: Annotated[int, declare_option(common.WIDTH)] = 0,
    no_color: Annotated[bool, declare_option(common.NO_COLOR)] = False,
    by: Annotated[Optional[list[str]], declare_option(runs.BY)] = None,  # noqa: UP045
    top: Annotated[Optional[int], declare_option(runs.TOP)] = None,  # noqa: UP045
    since: Annotated[Optional[str], declare_option(runs.SINCE)] = None,  # noqa: UP045
    until: Annotated[Optional[str], declare_option(runs.UNTIL)] = None,  # noqa: UP045
    steps: Annotated[Optional[str], declare_option(runs.STEPS)] = None,  # noqa: UP045
    full: Annotated[bool, declare_option(runs.FULL)] = False,
    section: Annotated[Optional[str], declare_option(runs.SECTION)] = None,  # noqa: UP045
    log_to: Annotated[Optional[list[str]], declare_option(runs.LOG_TO)] = None,  # noqa: UP045
    queued_at: Annotated[Optional[str], declare_option(runs.QUEUED_AT)] = None,  # noqa: UP045
) -> None:
    """Show where the GPU time of a recording went, and why."""
    runs.run_analysis(
        run,
        format_,
        as_json,
        output,
        profile,
        jobs,
        strict,
        width,
        no_color,
        by,
        top,
        since,
        until,
        steps,
        scheduler,
        scheduler_file,
        workers,
        full,
        section,
        log_to,
        queued_at,
    )
