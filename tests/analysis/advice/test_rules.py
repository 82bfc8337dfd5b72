"""Every rule that cancels a remedy does, and nothing else does: without the rule it is advised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusterprof.analysis.advice.base import ExclusionRule, Recommendation
from clusterprof.analysis.advice.context import AdviceContext, CodePath, Disk, LoaderSettings, Mount
from clusterprof.analysis.advice.diagnose import DIAGNOSES
from clusterprof.analysis.advice.registry import RECOMMENDATIONS
from clusterprof.probe import layout
from clusterprof.report.code import CodeLocation
from clusterprof.report.model import (
    UNKNOWN_RESOURCE,
    Culprit,
    CulpritGroup,
    Evidence,
    PeerComparison,
    Persistence,
    ResourceFacts,
)
from tests.support.advice_contexts import GIB, LOADER, MACHINE, S, make_context, make_evidence
from tests.support.advice_rules import RULES_OF

Case = tuple[dict[str, float], dict[str, Any]]
ONE = (Culprit("node-a", 3, "GPU-3", "", own_ns=40 * S),)
BOTH = (*ONE, Culprit("node-a", 4, "GPU-4", "", own_ns=39 * S))
SHORT = {"min_available_bytes": 20 * GIB}  # of 256: less than a tenth
LUSTRE, CIFS = (Mount("/data", kind, "server:/x") for kind in ("lustre", "cifs"))
MANY_SMALL = {"network__operation_bytes": 1 << 20, "network__operations_per_step_count": 4}
LARGE = {"network__operation_bytes": 24 << 20, "network__operations_per_step_count": 1}
MANY = {"ranks": 16, "nodes": 2}
TURNS = Persistence("wandering", 0, 60 * S, 20, 20, 2, 12)
TWICE_THE_WORK = PeerComparison("step.worked_ns", "ns", 84e6, 36e6, 1, "rank", "of work a step")
SLOW_LINE = CodePath(CodeLocation("/job/train.py", 14, "augment"), (), 0.9, 40)
FASTER = Evidence(
    "network.link_bytes_per_second",
    1e8,
    "bytes/s",
    "the sentence is for people: eth0 of node-a",
    sign="faster-device-idle",
    device="eth1",
)
UNUSED = Evidence(
    "rdma.link_bytes_per_second",
    1e9,
    "bytes/s",
    "the sentence is for people: mlx5_0 of node-a",
    sign="port-unused",
    device="mlx5_0",
)
BOUND = {"resource": "1 of 16 CPUs", "resource_facts": ResourceFacts("cpu-set")}
NOTED = {"fast-interface": (FASTER,), "use-rdma": (UNUSED,)}

# By remedy: a cause, numbers and settings with which it is advised.
AWAITED = {"awaited__waiting_ratio": 0.9}
OWN_WORK = {"worker__on_cpu_ratio": 0.8, "loader__own_work_ratio": 0.7}
UNEVEN = {"worker__balance_ratio": 0.5}
ADVISED: dict[str, tuple[str, dict[str, float], dict[str, Any]]] = {
    "nconnect": ("storage-client-queue", {"nfs__queued_ratio": 0.5}, {"resource": "/data"}),
    "more-slots": ("storage-client-queue", {"nfs__backlog_count": 9}, {"resource": "/data"}),
    "more-lustre-rpcs": ("storage-client-queue", {}, {"resource": "/data", "mounts": (LUSTRE,)}),
    "multichannel": ("storage-client-queue", {}, {"resource": "/data", "mounts": (CIFS,)}),
    "cache-attributes": ("storage-metadata", {"nfs__metadata_ratio": 0.5}, {}),
    "mend-the-path": ("storage-remote", {"nfs__retransmits_total": 3}, {}),
    "ask-the-server": ("storage-remote", {"nfs__read_bytes_total": GIB}, {}),
    "stage-local": ("storage-remote", {}, {}),
    "pack-records": ("storage-local", {"disk__read_size_bytes": 16384}, {}),
    "more-readers": ("storage-local", {"disk__busy_ratio": 0.3}, {}),
    "read-further-ahead": ("storage-local", {"disk__busy_ratio": 0.3}, {}),
    "faster-disk": ("storage-local", {}, {"resource": "sda"}),
    "fewer-bytes": ("storage-local", {"disk__busy_ratio": 0.97}, {}),
    "raise-memory-limit": ("storage-cold-cache", {}, {"memory_limit_bytes": 64 * GIB}),
    "shard-over-nodes": ("storage-cold-cache", {}, {"nodes": 4}),
    "raise-quota": ("cpu-preprocess", {}, {"throttled_ratio": 0.5}),
    "prefetch-more": ("cpu-loader-config", {"worker__not_ahead_ratio": 0.6}, {}),
    "cheaper-sampler": ("cpu-preprocess", OWN_WORK, {}),
    "even-shards": ("cpu-preprocess", UNEVEN, {}),
    "more-workers": ("cpu-preprocess", {}, {}),
    "persistent-workers": ("cpu-loader-config", {"worker__starting_ratio": 0.1}, {}),
    "prepare-ahead": ("cpu-preprocess", {}, {}),
    "prepare-on-gpu": ("cpu-preprocess", {}, {}),
    "speed-up-awaited-work": ("cpu-preprocess", AWAITED, {"resource": "process python pid 7"}),
    "do-not-wait-for-receivers": ("eval-host", AWAITED, {}),
    "look-at-awaited-work": ("cpu", AWAITED, {}),
    "more-cpus-for-workers": ("cpu-preprocess", {}, {"own_loss_ratio": 0.6}),
    "more-cpus": ("cpu-contention", {}, BOUND),
    "fit-the-quota": ("cpu-throttled", {}, {"quota_cpus": 4.0}),
    "find-the-neighbour": ("cpu-contention", {}, {}),
    "fewer-threads": ("cpu-contention", {}, {"loader": LoaderSettings(9)}),
    "pin-to-numa": ("cpu-contention", {}, {"ranks": 8}),
    "stolen-cpus": ("cpu-contention", {"cpu__steal_ratio": 0.2}, {}),
    "more-memory": ("cpu-memory", {}, {"reclaims": 9}),
    "pin-memory": ("h2d-copy", {"h2d__blocking_ratio": 1.0}, {}),
    "copy-ahead": ("h2d-copy", {}, {}),
    "load-in-workers": ("input-wait", {"loader__workers_count": 0}, {}),
    "pin-copied-memory": ("h2d-copy-bound", {"copy__bytes_per_second": 5e9}, {}),
    "fetch-metrics-rarely": ("h2d-sync", {"sync__waits_per_step_count": 3}, {}),
    "larger-batch": ("launch-bound", {}, {}),
    "copy-less": ("h2d-copy-bound", {}, {}),
    "look-a-step-later": ("h2d-sync", {}, {}),
    "fewer-launches": ("launch-bound", {}, {}),
    "expandable-segments": ("launch-alloc", {}, {}),
    "no-cache-flush": ("memory-free", {}, {}),
    "keep-segments": ("memory-free", {}, {}),
    "pin-once": ("memory-free", {"host__pinning_ratio": 0.5}, {}),
    "wait-once": ("h2d-sync", {}, {"has_framework": False}),
    "switch-off-debugging": (
        "launch-bound",
        {},
        {"debug_mode_ratios": {layout.ANOMALY_DETECTION: 0.1}},
    ),
    "copy-asynchronously": ("h2d-copy-bound", {}, {"has_framework": False}),
    "launch-graphs": ("launch-bound", {}, {"has_framework": False}),
    "allocate-once": ("launch-alloc", {}, {"has_framework": False}),
    "no-empty-cache": ("launch-alloc", {"allocator__frees_total": 9}, {}),
    "smaller-footprint": (
        "launch-alloc",
        {"allocator__retries_total": 9},
        {"gpu_memory_free_ratio": 0.05},
    ),
    "dynamic-shapes": ("launch-recompile", {"compile__again_ratio": 0.5}, {}),
    "compile-early": ("launch-recompile", {"compile__again_ratio": 0.5}, {}),
    "save-in-background": ("checkpoint", {"checkpoint__mean_bytes": GIB}, {}),
    "save-locally-first": ("checkpoint", {"checkpoint__mean_bytes": GIB}, {}),
    "save-shards": ("checkpoint", {}, {"ranks": 2}),
    "log-in-background": ("eval-host", {"thread__writing_ratio": 0.5}, {}),
    "evaluate-less": ("eval-host", {"eval__mean_ns": S}, {}),
    "metrics-on-gpu": ("eval-host", {"thread__on_cpu_ratio": 0.9}, {}),
    "prebuilt-image": ("startup", {"startup__longest_ns": 120 * S}, {}),
    "restore-in-parallel": ("startup", {"startup__longest_ns": 120 * S}, {}),
    "drain-node": ("device-throttled", {}, MANY),
    "fast-interface": ("net-path", {}, {}),
    "use-rdma": ("net-path", {}, {}),
    "even-rails": ("net-path", {"rdma__rail_ratio": 0.1}, {}),
    "check-rate": ("net-path", {}, {}),
    "drain-link": ("net-link", {}, {}),
    "look-at-both-ends": ("net-link", {}, {"culprits": ()}),
    "spread-over-rails": ("net-congestion", {}, {}),
    "move-other-traffic": ("net-congestion", {"network__others_ratio": 0.8}, {}),
    "check-path": ("net-transfer", {"network__operation_bytes": 3 << 20}, {}),
    "larger-messages": ("net-transfer", {**MANY_SMALL}, {}),
    "send-less": ("net-transfer", {"network__expected_ratio": 0.3}, {}),
    "closer-nodes": ("net-congestion", {}, {"nodes": 2}),
    "overlap-communication": ("net-transfer", {"network__expected_ratio": 0.3, **LARGE}, {}),
    "accumulate-gradients": ("net-transfer", {"network__expected_ratio": 0.3}, {}),
    "larger-window": ("net-transfer", {"tcp__receiver_limited_ratio": 0.5}, {}),
    "record-counters": ("net-transfer", {"network__beyond_ratio": 0.2}, {}),
    "compare-devices": ("sync-slow-compute", {}, {}),
    "count-work": ("sync-imbalance", {}, {"peer_comparison": TWICE_THE_WORK}),
    "balance-work": ("sync-imbalance", {}, {}),
    "equal-batches": ("sync-slow-compute", {"step__samples_excess_ratio": 0.5}, {}),
    "look-at-line": ("sync-slow-compute", {}, {"code": (SLOW_LINE,)}),
    "swap-nodes": ("sync-slow-compute", {}, MANY),
    "lighter-last-stage": ("sync-imbalance", {}, {"other_causes": frozenset({"sync-bubble"})}),
    "look-at-the-stack": ("fail-hang", {}, {}),
    "same-order": ("fail-hang", {}, {"culprits": ()}),
    "first-failure": ("fail-restart", {}, {}),
    "exclude-node": ("fail-restart", {}, {}),
    "move-off-training-thread": (*("cpu", {"thread__on_cpu_ratio": 0.9}, {"code": (SLOW_LINE,)}),),
    "record-with-probe": ("storage", {}, {"has_probe": False}),
    "record-what-is-missing": ("storage", {}, {"missing_signals": ("nfs.rtt_ns_total",)}),
    "record-longer": ("storage", {}, {"lost_ns": S}),
    "give-other-ranks": ("sync-unknown-peer", {}, {}),
}
# By rule, or by remedy and rule: what makes it hold, and no other rule of the remedy.
HOLDS: dict[str | tuple[str, str], Case] = {
    "own-work": (OWN_WORK, {}),
    "awaited-work": (AWAITED, {}),
    "no-awaited-work": ({"awaited__waiting_ratio": -1}, {}),
    "workers-uneven": (UNEVEN, {}),
    "workers-compute": ({"loader__own_work_ratio": 0.1}, {}),
    "workers-even": ({"worker__balance_ratio": 0.9}, {}),
    "not-nfs": (
        {"nfs__queued_ratio": -1, "nfs__backlog_count": -1, "nfs__metadata_ratio": -1},
        {"mounts": (LUSTRE,)},
    ),
    ("more-slots", "not-nfs"): (
        {"nfs__backlog_count": -1, "lustre__backlog_count": 9},
        {"mounts": (LUSTRE,)},
    ),
    "many-connections": ({}, {"mounts": (replace(MACHINE.mounts[0], connections=8),)}),
    "no-backlog_count": ({"nfs__backlog_count": 0}, {}),
    "not-lustre": ({}, {"mounts": (CIFS,)}),
    "not-cifs": ({}, {"mounts": (LUSTRE,)}),
    "nothing-sent-again": ({"nfs__retransmits_total": 0}, {}),
    "no-disk": ({}, {"disks": ()}),
    "reads-are-large": ({"disk__read_size_bytes": 256 << 10}, {}),
    "workers-unknown": ({}, {"loader": None}),
    "device-saturated": ({"disk__busy_ratio": 0.9}, {}),
    "workers-fill-cpus": ({}, {"cpus_allowed": 5}),  # 4 workers and the main thread
    "quota-used-up": ({}, {"other_causes": frozenset({"cpu-throttled"})}),
    ("more-workers", "quota-used-up"): ({}, {"throttled_ratio": 0.1}),
    "cpus-contended": ({}, {"other_causes": frozenset({"cpu-contention"})}),
    "memory-short": ({}, SHORT),
    ("more-readers", "memory-short"): ({}, {"other_causes": frozenset({"cpu-memory"})}),
    "no-workers": ({}, {"loader": LoaderSettings(0)}),
    "much-prefetched": ({}, {"loader": replace(LOADER, prefetch=4)}),
    "no-faster-disk": ({}, {"disks": (Disk("sda", True), Disk("sdb", True))}),
    "not-saturated": ({"disk__busy_ratio": 0.89}, {}),
    "no-memory-limit": ({}, {"memory_limit_bytes": None}),
    "no-ceiling": ({}, {"reclaims": 0}),
    "small-share": ({}, {"share_ratio": 0.049}),
    "no-others_ratio": ({"network__others_ratio": 0}, {}),
    "messages-small": ({"network__operation_bytes": (1 << 20) - 1}, {}),
    "path-fast": ({"network__path_ratio": 0.5}, {}),
    "few-operations": ({"network__operations_per_step_count": 3}, {}),
    "few-and-small": ({"network__operation_bytes": (24 << 20) - 1}, {}),
    "one-node": ({}, {"nodes": 1}),
    "no-read_bytes_total": ({"nfs__read_bytes_total": 0}, {}),
    "not-throttled": ({}, {"throttled_ratio": 0.01}),
    "not-ahead": ({"worker__not_ahead_ratio": 0, "worker__without_work_ratio": 0.4}, {}),
    "workers-rest": ({"worker__not_ahead_ratio": 0.5}, {}),
    "workers-stay": ({"worker__starting_ratio": 0.09}, {}),
    "workers-start": ({"worker__starting_ratio": 0.5}, {}),
    "persistent-already": ({}, {"loader": replace(LOADER, persistent=True)}),
    "gpu-memory-full": ({}, {"gpu_memory_free_ratio": 0.19}),
    "gpu-memory-free": ({}, {"gpu_memory_free_ratio": 0.2}),
    "cpus-suffice": ({}, {"own_loss_ratio": 0.2}),  # 5 workers and the main thread; it may use 8
    "whole-node": ({}, {"cpus": 8}),
    "not-bound": ({}, {"resource": "", "resource_facts": UNKNOWN_RESOURCE}),
    "threads-fit-quota": ({}, {"quota_cpus": 5.0}),
    "bound": ({}, BOUND),
    "job-oversubscribes": ({}, {"job_cpus_wanted": 16.5}),  # of 16
    "no-accelerator": ({}, {"has_device": False}),
    "window-only": ({}, {"is_window": True}),
    "one-rank-late": ({}, {"culprits": ONE, "ranks": 2}),
    "job-alone": ({}, {"other_processes_cpu_ratio": 0.09}),
    "workers-fit": ({}, {"loader": LoaderSettings(7)}),
    "others-use-them": ({}, {"other_processes_cpu_ratio": 0.51}),
    "one-numa-node": ({}, {"numa_nodes": 1}),
    "one-rank": ({}, {"ranks": 1}),
    "no-cpu-stolen": ({"cpu__steal_ratio": 0.04}, {}),
    "node-full": ({}, SHORT),
    "no-blocking_ratio": ({"h2d__blocking_ratio": 0}, {}),
    "already-fast": ({"copy__bytes_per_second": 10e9}, {}),
    "no-debugging": ({}, {"debug_mode_ratios": {layout.ANOMALY_DETECTION: 0.09}}),
    "few-waits": ({"sync__waits_per_step_count": 0.09}, {}),
    "no-frees_total": ({"allocator__frees_total": 0}, {}),
    "no-retries_total": ({"allocator__retries_total": 0}, {}),
    "first-time": ({"compile__again_ratio": 0}, {}),
    "compiled-before": ({"compile__again_ratio": 1}, {}),
    "copy-does-not-fit": ({"checkpoint__mean_bytes": 101 * GIB}, {}),  # of 200 that are left
    "no-checkpoint.mean_bytes": ({"checkpoint__mean_bytes": 0}, {}),
    "all-save": ({}, {"culprits": BOTH}),
    "no-writing_ratio": ({"thread__writing_ratio": 0}, {}),
    "no-eval.mean_ns": ({"eval__mean_ns": 0}, {}),
    "no-thread.on_cpu_ratio": ({"thread__on_cpu_ratio": 0}, {}),
    "short-start": ({"startup__longest_ns": 59 * S}, {}),
    "everywhere": ({}, {"ranks": 1, "nodes": 1}),
    "no-faster": ({}, {}),  # without the note
    "rdma-used": ({}, {}),
    "rails-even": ({"rdma__rail_ratio": -1}, {}),
    "path-known": ({"rdma__rail_ratio": 0.1}, {}),
    "nobody-named": ({}, {"culprits": ()}),
    "node-named": ({}, {"culprits": ONE}),
    "one-rail": ({}, {"hcas": ("mlx5_0",)}),
    "mostly-beyond": ({"network__expected_ratio": 0.1, "network__beyond_ratio": 0.2}, {}),
    "no-receiver_limited_ratio": ({"tcp__receiver_limited_ratio": 0}, {}),
    "little-beyond": ({"network__beyond_ratio": 0.04}, {}),  # of 0.4
    "device-throttled": ({}, {"other_causes": frozenset({"device-throttled"})}),
    "whole-stage": ({}, {"culprit_group": CulpritGroup("stage 1", (3,))}),
    "equal-batches": ({"step__samples_excess_ratio": 0}, {}),
    "larger-batches": ({"step__tokens_excess_ratio": 0.1}, {}),
    "not-own-code": ({"thread__on_cpu_ratio": 0}, {}),
    "no-line": ({}, {"code": (replace(SLOW_LINE, share_ratio=0.4),)}),
    "late-in-turn": ({}, {"culprits": BOTH, "persistence": TURNS}),
    "late-in-all-steps": ({}, {"cause": "sync-slow-compute"}),
    "heavy-stage": ({}, {"cause": "sync-imbalance", "message_wait_ratio": 0.5}),
    "as-devices-differ": ({}, {"peer_comparison": replace(TWICE_THE_WORK, value=53e6)}),
    "no-pipeline": ({}, {"other_causes": frozenset()}),
    "rank-named": ({}, {"culprits": ONE}),
    "probe-there": ({}, {"has_probe": True}),
    "nothing-missing": ({}, {"missing_signals": ()}),
    "long-enough": ({}, {"lost_ns": 2 * S}),
    "no-framework": ({}, {"has_framework": False}),
    "framework": ({}, {"has_framework": True}),
    "xla": ({}, {"has_xla": True}),
    "only-pinned": ({"host__pinning_ratio": 0.9, "host__freeing_ratio": 0.05}, {}),
    "no-pinning_ratio": ({"host__pinning_ratio": 0}, {}),
    "ranks-present": ({}, {"cause": "sync-imbalance"}),
    "not-by-steps": ({}, {"cause": "sync-unknown-peer"}),
    "has-workers": ({"loader__workers_count": 4}, {}),
}
ALL: tuple[Recommendation, ...] = (*RECOMMENDATIONS, *DIAGNOSES)  # type: ignore[assignment]
PAIRS = [(item, rule) for item in ALL for rule in item.unless]


def made(remedy: Recommendation, more: Case = ({}, {}), noted: bool = True) -> AdviceContext:
    """The scene in which a remedy is advised, with something changed; a number of -1 is gone."""
    cause, values, settings = ADVISED[remedy.id]
    values = {name: value for name, value in {**values, **more[0]}.items() if value != -1}
    settings = {**settings, **more[1]}
    cause = settings.pop("cause", cause)
    notes = NOTED.get(remedy.id, ()) if noted else ()
    return make_context(cause, (*make_evidence(**values), *notes), **settings)


@pytest.mark.parametrize(
    "remedy", [rule for rule in ALL if rule.unless], ids=lambda advice: advice.id
)
def test_a_remedy_is_advised_when_no_exclusion_rule_holds(remedy: Recommendation) -> None:
    assert remedy.advise(made(remedy)) is not None


@pytest.mark.parametrize(
    ("remedy", "rule"), PAIRS, ids=[f"{advice.id}: {rule.name}" for advice, rule in PAIRS]
)
def test_an_exclusion_rule_alone_cancels_the_remedy(
    remedy: Recommendation, rule: ExclusionRule
) -> None:
    case = HOLDS.get((remedy.id, rule.name)) or HOLDS[rule.name]
    broken = made(remedy, case, noted=rule.name not in ("no-faster", "rdma-used"))
    assert remedy.advise(broken) is None
    others = tuple(item for item in remedy.unless if item.name != rule.name)
    assert len(others) == len(remedy.unless) - 1
    assert replace(remedy, unless=others).advise(broken) is not None


def test_the_rule_tables_list_exactly_the_existing_rules() -> None:
    assert {
        advice.id: {rule.name for rule in advice.unless} for advice in ALL if advice.unless
    } == RULES_OF
    assert set(ADVISED) == set(RULES_OF)
    rules = {rule.name for _, rule in PAIRS}
    pairs = {(advice.id, rule.name) for advice, rule in PAIRS}
    assert {key for key in HOLDS if isinstance(key, str)} <= rules
    assert {key for key in HOLDS if isinstance(key, tuple)} <= pairs


@pytest.mark.parametrize(
    "remedy", [rule for rule in ALL if not rule.unless], ids=lambda advice: advice.id
)
def test_a_remedy_without_rules_is_always_advised(remedy: Recommendation) -> None:
    cause = remedy.causes[0] if remedy.causes else "storage"
    assert remedy.advise(make_context(cause)) is not None
