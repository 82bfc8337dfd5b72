"""The foreign formats we read. Nothing else happens here."""

from __future__ import annotations

from pathlib import Path

from clusterprof.importers.base import Importer
from clusterprof.importers.dftracer import Dftracer
from clusterprof.importers.dlio import Dlio
from clusterprof.importers.mllog import Mllog
from clusterprof.importers.operator_table import OperatorTable

IMPORTERS: tuple[Importer, ...] = (
    Dftracer(), Dlio(), Mllog(), OperatorTable(),
)  # fmt: skip
"""Asked in this order; the first that recognises a file reads it."""


def importer_of(head: bytes, path: Path) -> Importer | None:
    """Return who reads a file that begins like this; None when nobody does."""
    return next((one for one in IMPORTERS if one.recognises(head, path)), None)
