"""Prometheus: scrapes of exporters, and what its HTTP API answers.

## What is read

The text of exporters (Prometheus and OpenMetrics; one scrape, or many with times), and answers of
`/api/v1/query_range` and `/api/v1/query`: of NVIDIA's dcgm-exporter, of node_exporter, of AMD's
device-metrics-exporter and of Omnistat. Give all files together; one per metric is usual:

    curl -sG "$PROMETHEUS/api/v1/query_range" -d step=15s -d start=-1h -d end=now \\
        --data-urlencode 'query=DCGM_FI_DEV_GPU_UTIL' > util.json

## How it is understood

Readings of a host become a node: its name is the label `Hostname`, `nodename`, `node` or, last, the
host in `instance`; an address that one host's other series name becomes that host. Each GPU is
known by its UUID, else its number. Utilisation is `DCGM_FI_PROF_GR_ENGINE_ACTIVE` where it is
there, else `DCGM_FI_DEV_GPU_UTIL`. Values that DCGM marks as not available stay unknown. Readings
without a time are those of one instant.

## Where it is blind

Nothing tells of processes, ranks or steps: devices that idle may have no job, and no loss is
claimed. What idled beside which cause is only said beside traces of the same job. A gauge holds
from its reading to the next; 15 or 60 seconds hide every single step. Rates (`rate()`) and sums
over hosts have other names, and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.tables import NodeTables
from clusterprof.importers.telemetry.answers import is_answer, read_answer
from clusterprof.importers.telemetry.exposition import Exposition, is_exposition
from clusterprof.importers.telemetry.series import Labelled


class Prometheus:
    """Scrapes and answers."""

    name: ClassVar[str] = "prometheus"
    title: ClassVar[str] = "Prometheus metrics"
    together: ClassVar[bool] = True

    def recognises(self, head: bytes, path: Path) -> bool:
        """By the comments or names of a scrape, or the keys of an answer."""
        return is_answer(head) or is_exposition(head)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield one node for each host."""
        into = Labelled()
        for source, account in zip(sources, accounts):
            if is_answer(source.head):
                read_answer(source, into, account)
            else:
                Exposition(into, account).read(source)
        found = False
        for node in into.nodes(self.name, accounts[0]):
            found = True
            node.shown = "unnamed host"
            yield node
        if not found:
            raise CannotImportError(
                "no metric that is known was found",
                "export DCGM_FI_*, node_*, rocm_* metrics with their labels",
            )
