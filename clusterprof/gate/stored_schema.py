"""What of a stored report must be there, field by field; every field is required."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from clusterprof.findings import Grade

Ns = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
Natural = Annotated[float, msgspec.Meta(ge=0)]


class Struct(msgspec.Struct, frozen=True):
    """Every field is required."""


class BucketStored(Struct, frozen=True):
    cause: str
    ns: Ns


class ReasonStored(Struct, frozen=True):
    reason: str
    ns: Ns


class LedgerStored(Struct, frozen=True):
    window_ns: Ns
    unmeasured_ns: Ns
    outside_ns: Ns
    in_step_ns: Ns
    productive_ns: Ns
    lost_ns: Ns
    buckets: list[BucketStored]
    outside_buckets: list[BucketStored]
    unattributed_ns: Ns
    unattributed_reasons: list[ReasonStored]


class RankStored(Struct, frozen=True):
    node: str
    rank: Ns | None
    pid: int
    device: str
    source: str
    steps: Ns
    coverage_ratio: Ratio | None
    window_ns: Ns
    unmeasured_ns: Ns
    outside_ns: Ns
    in_step_ns: Ns
    productive_ns: Ns
    lost_ns: Ns
    buckets: list[BucketStored]
    outside_buckets: list[BucketStored]


class CulpritStored(Struct, frozen=True):
    node: str
    rank: Ns | None
    device: str
    resource: str


class FindingStored(Struct, frozen=True):
    cause: str
    family: str
    title: str
    advice: str
    lost_ns: Ns
    share_ratio: Ratio | None
    recoverable_ns: Ns | None
    confidence_ratio: Ratio | None
    grade: Grade
    upper_bound: bool
    outside_steps: bool
    culprits: list[CulpritStored]


class MetricStored(Struct, frozen=True):
    name: str
    value: float | None
    unit: str
    bound: Literal["exact", "at most", "at least"]
    why_missing: str


class NodeStored(Struct, frozen=True):
    name: str
    key: str
    boot_id: str
    duration_ns: Ns
    damaged_bytes: Ns
    dropped_spans: Ns
    recorder_cpu_ratio: Natural | None


class JobStored(Struct, frozen=True):
    world_size: Ns | None
    gpus: Ns
    coverage_ratio: Ratio | None


class BlindStored(Struct, frozen=True):
    what: str
    kind: str
    message: str
    remedy: str


class CauseStored(Struct, frozen=True):
    cause: str
    family: str
    ns: list[Ns]


class StepsStored(Struct, frozen=True):
    width: Annotated[int, msgspec.Meta(ge=1)]
    steps: list[Ns]
    step_ns: list[Ns]
    in_step_ns: list[Ns]
    measured_ns: list[Ns]
    busy_ns: list[Ns]
    lost_ns: list[Ns]
    lost: list[CauseStored]
    lengths: list[str]


class ModelStored(Struct, frozen=True):
    model: str
    gpus: Annotated[int, msgspec.Meta(ge=1)]


class VersionStored(Struct, frozen=True):
    name: str
    version: str


class LikenessStored(Struct, frozen=True):
    started_at_ns: Ns | None
    recordings: list[str]
    gpu_models: list[ModelStored]
    nodes: Ns | None
    world_size: Ns | None
    batch_size: Natural | None
    tokens: Natural | None
    measured_by: list[str]
    frameworks: list[VersionStored]
    drivers: list[str]
    recorder: list[str]
    restarts: Ns


class ReportStored(Struct, frozen=True):
    format: Literal["clusterprof-report"]
    schema_version: Literal[1]
    title: str
    emulated: bool
    job: JobStored | None
    ledger: LedgerStored
    findings: list[FindingStored]
    ranks: list[RankStored]
    metrics: list[MetricStored]
    not_seen: list[BlindStored]
    nodes: list[NodeStored]
    notes: list[str]
    steps: StepsStored | None
    likeness: LikenessStored | None
