"""Signals of accelerators that are no GPUs: what means something else than NVML's values.

Where the meaning is the same they use the names of `signals` (memory, power, energy, errors …).
"""

from __future__ import annotations

ACCELERATORS: tuple[tuple[str, str, str], ...] = (
    (
        "gpu.power_utilisation_ratio",
        "gpu",
        "Power drawn, from that of a device at rest (0) to its limit (1): what Gaudi calls "
        "utilisation, and no share of time.",
    ),
    ("gpu.soc_clock_hertz", "gpu", "Clock of the whole chip (Gaudi)."),
    ("gpu.soc_clock_max_hertz", "gpu", "Highest clock of the whole chip (Gaudi)."),
    (
        "gpu.core_busy_ratio",
        "core",
        "Share of the averaging period in which the core executed, as its tool says it (Neuron).",
    ),
    (
        "gpu.averaged_over_ns",
        "core",
        "Averaging period of the share in the same sample; absent while nobody uses the core.",
    ),
    (
        "gpu.duty_cycle_ratio",
        "gpu",
        "Share of the last seconds in which the device worked: a sliding mean, of which no "
        "integral can be made (TPU).",
    ),
    ("gpu.tensorcore_ratio", "gpu", "Use of the matrix units in one short look a second (TPU)."),
    (
        "gpu.executions_total",
        "core",
        "Programs that processes using the core have finished, on all of their cores (Neuron).",
    ),
    (
        "gpu.execution_errors_total",
        "core",
        "Errors of the programs of processes that use the core (Neuron).",
    ),
    ("gpu.execution_p50_ns", "core", "Median time of a program on the device, last period."),
    ("gpu.execution_p99_ns", "core", "99 % quantile of a program's time on it, last period."),
)
"""(name, of what there is one value each, meaning)."""
