"""Signals of accelerators that are no GPUs: what means something else than NVML's values.

Where the meaning is the same they use the names of `signals.gpu` (memory, power, errors …).
"""

from __future__ import annotations

from clusterprof.signals.made import declare as _signal

GPU_POWER_UTILISATION = _signal(
    "gpu.power_utilisation_ratio",
    "gpu",
    "Power drawn, from that of a device at rest (0) to its limit (1): what Gaudi calls "
    "utilisation, and no share of time.",
)
GPU_SOC_CLOCK = _signal("gpu.soc_clock_hertz", "gpu", "Clock of the whole chip (Gaudi).")
GPU_SOC_CLOCK_MAX = _signal(
    "gpu.soc_clock_max_hertz", "gpu", "Highest clock of the whole chip (Gaudi)."
)
CORE_BUSY = _signal(
    "gpu.core_busy_ratio",
    "core",
    "Share of the averaging period in which the core executed, as its tool says it (Neuron).",
)
CORE_AVERAGED_OVER = _signal(
    "gpu.averaged_over_ns",
    "core",
    "Averaging period of the share in the same sample; absent while nobody uses the core.",
)
GPU_DUTY_CYCLE = _signal(
    "gpu.duty_cycle_ratio",
    "gpu",
    "Share of the last seconds in which the device worked: a sliding mean, of which no "
    "integral can be made (TPU).",
)
GPU_TENSORCORE = _signal(
    "gpu.tensorcore_ratio", "gpu", "Use of the matrix units in one short look a second (TPU)."
)
CORE_EXECUTIONS = _signal(
    "gpu.executions_total",
    "core",
    "Programs that processes using the core have finished, on all of their cores (Neuron).",
)
CORE_EXECUTION_ERRORS = _signal(
    "gpu.execution_errors_total",
    "core",
    "Errors of the programs of processes that use the core (Neuron).",
)
CORE_EXECUTION_P50 = _signal(
    "gpu.execution_p50_ns", "core", "Median time of a program on the device, last period."
)
CORE_EXECUTION_P99 = _signal(
    "gpu.execution_p99_ns", "core", "99 % quantile of a program's time on it, last period."
)
