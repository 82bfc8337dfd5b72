"""NVML, the NVIDIA driver's own library: what is asked of it, how often, and what its errors mean.

https://docs.nvidia.com/deploy/nvml-api/. One guarded call per value or pair of values that NVML
returns together, so that one call that fails takes nothing else with it. Every call is timed: one
whose median is above 5 ms is made ten times less often. In between, a slow value is repeated, at
most for its own period; after an error nothing is repeated. A GPU that is lost, needs a reset or
answers "unknown error" is not asked again until NVML is opened anew: drivers crash on that.

`calls` is the table of what is asked, `plans` which of it of which device; `gpm` reads performance
counters, `health` links and memory, `mig` the instances of GPUs that are split up, `facts` what the
header says.

This package runs in the helper process and stays light (15 MB with the driver's library): no
dataclasses, no signals, no `pynvml` before `errors.load()`.
"""

from clusterprof.collectors.nvml.driver import Library
from clusterprof.collectors.nvml.errors import why_absent

__all__ = ["Library", "why_absent"]
