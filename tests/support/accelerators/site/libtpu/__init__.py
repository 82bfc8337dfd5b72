"""A simulated `libtpu`: `sdk.tpumonitoring` says what FAKETPU (JSON) has, by name of the metric."""

__version__ = "0.0.19"
