"""Reports with a hostile string in every place."""

from __future__ import annotations

import dataclasses
from typing import Any

from clusterprof.report.model import Report
from tests.support.code_profiles import add_code_profile
from tests.support.histories import make_one_hour_job
from tests.support.reports import make_storage_report, make_underused_report

# what our own spelling of a report says; everything else is a text that a machine may have chosen
OURS = {"unit", "grade", "source", "bound"}


def poison_strings(value: Any, poison: str) -> Any:
    """Put the poison into every string of a report that a recording can set."""
    if isinstance(value, tuple):
        return tuple(poison_strings(item, poison) for item in value)
    if isinstance(value, str):
        return poison
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {k: v if k in OURS else poison_strings(v, poison) for k, v in fields.items()}
        return type(value)(**changed)
    return value


def make_full_report(ranks: int = 2) -> Report:
    """Make a small report that has everything a report can have."""
    batch, item = make_one_hour_job(2, ranks, 20, 30), make_storage_report()
    whole = dataclasses.replace(
        batch,
        device_utilization=make_underused_report().device_utilization,
        metrics=item.metrics,
        notes=item.notes,
        findings=(*batch.findings, *item.findings),
    )
    return add_code_profile(whole)
