"""The metrics that a report can become: names, units and meanings, in the order of an output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Described:
    """One family; a counter's samples are called `<name>_total`, an info's `<name>_info`."""

    name: str
    kind: Literal["counter", "gauge", "info"]
    unit: str
    """"" or the end of the name."""
    help: str

    @property
    def sample(self) -> str:
        """The name that its samples carry."""
        return self.name + {"counter": "_total", "gauge": "", "info": "_info"}[self.kind]


@dataclass(frozen=True, slots=True)
class Point:
    """One number of a family."""

    labels: tuple[tuple[str, str], ...]
    """Names and safe texts."""
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """A family with its points, each set of labels once."""

    described: Described
    points: tuple[Point, ...]


Points = dict[Described, list[Point]]

REPORT = Described(
    "clusterprof_report", "info", "",
    "The recording this is about; emulated is true when no real accelerator was measured.",
)  # fmt: skip
OBSERVED = Described(
    "clusterprof_observed_gpu_seconds", "counter", "seconds",
    "Observed device time by what became of it: productive, lost, outside_steps, unmeasured.",
)  # fmt: skip
LOST = Described(
    "clusterprof_lost_gpu_seconds", "counter", "seconds",
    "Device time lost inside steps where it was felt, by cause; unattributed has no evidence.",
)  # fmt: skip
CAUSED = Described(
    "clusterprof_caused_gpu_seconds", "counter", "seconds",
    "The same lost device time by the rank that caused it: what it lost by itself, and what other"
    " ranks lost waiting for it.",
)  # fmt: skip
OUTSIDE = Described(
    "clusterprof_outside_gpu_seconds", "counter", "seconds",
    "Device time before the first and after the last step, by cause.",
)  # fmt: skip
STEPS = Described("clusterprof_steps", "counter", "", "Optimizer steps that were seen.")
COVERAGE = Described(
    "clusterprof_rank_coverage_ratio", "gauge", "ratio",
    "Share of the observed time for which the device was measured.",
)  # fmt: skip
RECOVERABLE = Described(
    "clusterprof_recoverable_gpu_seconds", "gauge", "seconds",
    "Device time that fixing only this cause would win back.",
)  # fmt: skip
CONFIDENCE = Described(
    "clusterprof_confidence_ratio", "gauge", "ratio", "How sure the cause of a finding is."
)
COST = Described(
    "clusterprof_lost_cost", "gauge", "", "What the lost device time of a cause cost, in currency."
)
SAVED = Described(
    "clusterprof_saved_job_seconds", "gauge", "seconds",
    "How much sooner the job would end with only this cause fixed.",
)  # fmt: skip
STEP = Described(
    "clusterprof_step_seconds", "gauge", "seconds", "Step time that so many steps do not exceed."
)
STALL = Described(
    "clusterprof_stall_ratio", "gauge", "ratio",
    "Share of the time in steps lost to a cause, or to a family of causes, which holds its causes.",
)  # fmt: skip
RECORDED = Described("clusterprof_recorded_seconds", "gauge", "seconds", "Length of a recording.")
DAMAGED = Described(
    "clusterprof_damaged_bytes", "gauge", "bytes", "Bytes of a recording that cannot be read."
)
DROPPED = Described(
    "clusterprof_dropped_spans", "counter", "", "Spans that were produced and not stored."
)
UNKNOWN = Described(
    "clusterprof_unknown", "gauge", "", "1 for a metric that has no value, with the reason."
)
OTHER = Described("clusterprof_metric", "gauge", "", "A metric of the report without a name here.")

OF_METRIC = {
    "gpu.busy_ratio": Described(
        "clusterprof_gpu_busy_ratio", "gauge", "ratio",
        "Share of the time in steps with a kernel resident, all devices together.",
    ),
    "gpu.sm_active_ratio": Described(
        "clusterprof_gpu_sm_active_ratio", "gauge", "ratio",
        "Share of the multiprocessors with work, mean of the time in steps.",
    ),
    "underfill.ratio": Described(
        "clusterprof_underfill_ratio", "gauge", "ratio",
        "Of the time with work, how much of the devices it left empty.",
    ),
    "lost.ratio": Described(
        "clusterprof_lost_ratio", "gauge", "ratio", "Share of the time in steps that was lost."
    ),
    "productive.ratio": Described(
        "clusterprof_productive_ratio", "gauge", "ratio",
        "Share of the time in steps that was not lost.",
    ),
    "au_ratio": Described(
        "clusterprof_accelerator_utilisation_ratio", "gauge", "ratio",
        "MLPerf Storage's AU: productive over running time, from the second step on.",
    ),
    "unattributed.ratio": Described(
        "clusterprof_unattributed_ratio", "gauge", "ratio",
        "Share of the time in steps that was lost without evidence for a cause.",
    ),
    "data_wait.ratio": Described(
        "clusterprof_data_wait_ratio", "gauge", "ratio",
        "Share of the time in steps in which the host waited for data, hidden or not.",
    ),
    "coverage.ratio": Described(
        "clusterprof_coverage_ratio", "gauge", "ratio",
        "Share of the observed time for which devices were measured.",
    ),
    "recorder.cpu_ratio": Described(
        "clusterprof_recorder_cpu_ratio", "gauge", "ratio",
        "CPU time of the recorder over the recorded time, of the node where it is highest.",
    ),
}  # fmt: skip
"""Names of `Report.metrics` -> the family of each."""

_MEAN = ", mean of the time in steps (what dcgm-exporter gives for an instant)."
DCGM_GPU_UTIL = Described(
    "DCGM_FI_DEV_GPU_UTIL", "gauge", "", "Percent of time with a kernel resident" + _MEAN
)
DCGM_SM_ACTIVE = Described(
    "DCGM_FI_PROF_SM_ACTIVE", "gauge", "", "Share of multiprocessors with a warp" + _MEAN
)
DCGM_SM_OCCUPANCY = Described(
    "DCGM_FI_PROF_SM_OCCUPANCY", "gauge", "", "Warps resident over those that fit" + _MEAN
)
DCGM_TENSOR = Described(
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge", "",
    "Share of the time in which tensor cores worked" + _MEAN,
)  # fmt: skip
DCGM_FB_USED = Described(
    "DCGM_FI_DEV_FB_USED", "gauge", "", "Device memory in use in MiB, the most of the run."
)

ALL = (
    REPORT, OBSERVED, LOST, CAUSED, OUTSIDE, STEPS, COVERAGE, RECOVERABLE, CONFIDENCE, COST, SAVED,
    *OF_METRIC.values(), STALL, STEP, OTHER, RECORDED, DAMAGED, DROPPED, UNKNOWN,
    DCGM_GPU_UTIL, DCGM_SM_ACTIVE, DCGM_SM_OCCUPANCY, DCGM_TENSOR, DCGM_FB_USED,
)  # fmt: skip
