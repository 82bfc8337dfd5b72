"""Reports with a hostile string in every place."""

from __future__ import annotations

import dataclasses
from typing import Any

from clusterprof.report.model import Report
from tests.support.code_profiles import with_code
from tests.support.histories import hour
from tests.support.reports import storage_verdict, underfilled

# what our own spelling of a report says; everything else is a text that a machine may have chosen
OURS = {"unit", "grade", "source", "bound"}


def poisoned(value: Any, poison: str) -> Any:
    """Put the poison into every string of a report that is not one of our own words."""
    if isinstance(value, tuple):
        return tuple(poisoned(item, poison) for item in value)
    if isinstance(value, str):
        return poison
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {k: v if k in OURS else poisoned(v, poison) for k, v in fields.items()}
        return type(value)(**changed)
    return value


def everything(ranks: int = 2) -> Report:
    """A report with all there can be, small."""
    batch, item = hour(2, ranks, 20, 30), storage_verdict()
    whole = dataclasses.replace(
        batch,
        device_utilization=underfilled().device_utilization,
        metrics=item.metrics,
        notes=item.notes,
        findings=(*batch.findings, *item.findings),
    )
    return with_code(whole)
