"""What NVIDIA's command line tools print: `nvidia-smi`, `dcgmi dmon`."""

from __future__ import annotations

from clusterprof.importers.nvidia_smi.importer import NvidiaSmi as NvidiaSmi
