"""Tables with a column per device or per measure: DCGM's fields, amd-smi, Omnistat, W&B."""

from __future__ import annotations

from clusterprof.importers.gpu_tables.importer import GpuTables as GpuTables
