"""A report of many nodes, made by hand for any number of them: one culprit, many victims.

Of 300 s in steps each rank lost 12 s in transfers, 4 s to imbalance that wanders and 1 s without
evidence. The culprit read slowly from a remote mount: 31 s itself, and 30 s of every other rank. On
one node preprocessing held its ranks up for 5 s once, and every other rank for 3 s.
"""

from __future__ import annotations

from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.report.history import SlowStepSummary
from clusterprof.report.model import (
    Advice,
    Cause,
    CoverageGap,
    Culprit,
    Evidence,
    Finding,
    JobFacts,
    Metric,
    NodeFacts,
    PeerComparison,
    Persistence,
    RankLedger,
    Report,
)

S = 1_000_000_000


MS = 1_000_000
BLOCKED = "of the waits, the loading thread was blocked on the file system"
COPY = "rsync -a filer:/export/imagenet/ /local/imagenet/"


def make_recommendation(cause: Cause) -> Advice:
    """Make one recommendation with its text; the first cause also has a command to copy."""
    how, commands = "the edit that does it", ()
    if cause is STORAGE:
        how, commands = f"{COPY} before training starts, on each node", (COPY,)
    return Advice(
        cause.advice.rstrip("."),
        "a number",
        how,
        "a gain",
        "a check",
        "",
        "one-remedy",
        effort="data" if commands else "code",
        commands=commands,
    )


STORAGE, PREPROCESS = CAUSES["storage-remote"], CAUSES["cpu-preprocess"]
TRANSFER, IMBALANCE = CAUSES["net-transfer"], CAUSES["sync-imbalance"]


def make_cluster_report(nodes: int = 16, per_node: int = 8) -> Report:
    """Build the report; the ranks of one more node were not recorded."""
    count = nodes * per_node
    guilty = 3 * per_node + 3 if nodes > 3 else 0
    busy = range(count - per_node, count) if nodes > 1 else range(count - 1, count)
    names = [f"gpu-a{number:0{len(str(nodes))}d}" for number in range(1, nodes + 1)]
    ranks = tuple(
        _make_rank(r, names[r // per_node], count, r == guilty, r in busy, len(busy))
        for r in range(count)
    )
    lost = sum(rank.lost_ns for rank in ranks)
    unattributed = sum(dict(rank.buckets)["unattributed"] for rank in ranks)
    in_step = 300 * S * count
    facts = tuple(
        NodeFacts(n, f"{n}-0f1e2d3c-1", "0f1e2d3c", 310 * S, 0, 0, 0.004 + 0.0001 * at)
        for at, n in enumerate(names)
    )
    return Report(
        title="runs/cluster",
        emulated=False,
        nodes=facts,
        ranks=ranks,
        window_ns=301 * S * count,
        unmeasured_ns=0,
        outside_ns=S * count,
        in_step_ns=in_step,
        productive_ns=in_step - lost,
        lost_ns=lost,
        findings=_make_findings(ranks, guilty, busy, in_step),
        unattributed_ns=unattributed,
        unattributed_reasons=(("no-signal", unattributed),),
        outside_buckets=(("startup", S * count),),
        metrics=(Metric("gpu.busy_ratio", 0.8, "ratio"), Metric("step.p99_ns", 1.31 * S, "ns")),
        coverage_gaps=(
            CoverageGap(
                f"ranks {count}-{count + per_node - 1} of {count + per_node:,}",
                "absent",
                "not recorded; the cause of waits for them is not known (sync-unknown-peer)",
                "record on every node of the job",
            ),
            CoverageGap(
                "operations between ranks",
                "failed",
                "1,204 of their spans name no group of ranks; waits in them have no cause",
                "use process groups of torch.distributed",
            ),
        ),
        job=JobFacts(count + per_node, count, 0.998, 18_400),
        slow_step_summary=SlowStepSummary(
            406,
            4,
            740 * S // 1000,
            1310 * S // 1000,
            ((ranks[guilty].node, guilty, 3), (ranks[busy[0]].node, busy[0], 1)),
        ),
        lost_without_culprit=(("net-transfer", 12 * S * count),),
    )


def _make_rank(r: int, node: str, count: int, guilty: bool, busy: bool, many: int) -> RankLedger:
    buckets = (
        ("storage-remote", 31 * S if guilty else 30 * S),
        ("net-transfer", 12 * S),
        ("cpu-preprocess", 5 * S if busy else 3 * S),
        ("sync-imbalance", 4 * S),
        ("unattributed", S + r),
    )
    caused = {
        "storage-remote": 31 * S + 30 * S * (count - 1) if guilty else 0,
        "cpu-preprocess": 5 * S + 3 * S * (count - many) // many if busy else 0,
        "sync-imbalance": 4 * S,
        "unattributed": S + r,
    }
    lost = sum(ns for _, ns in buckets)
    return RankLedger(
        node,
        r,
        4000 + r,
        f"GPU-{r:04x}",
        "device-samples",
        301 * S,
        0,
        S,
        300 * S,
        300 * S - lost,
        lost,
        buckets,
        (("startup", S),),
        406,
        0.998,
        tuple(sorted(((k, v) for k, v in caused.items() if v), key=lambda p: (-p[1], p[0]))),
    )


def _make_findings(
    ranks: tuple[RankLedger, ...], guilty: int, busy: range, in_step: int
) -> tuple[Finding, ...]:
    count, many = len(ranks), len(busy)

    def culprit(r: int, resource: str, own: int, others: int, victims: int) -> Culprit:
        item = ranks[r]
        wins = (own + others) // 2
        return Culprit(item.node, r, item.device, resource, own, others, victims, wins)

    def lost(cause: Cause) -> int:
        return sum(dict(rank.buckets)[cause.id] for rank in ranks)

    def finding(cause: Cause, *culprits: Culprit, wins: int | None, how: Persistence | None):
        ns = lost(cause)
        seen = (Evidence("worker.blocked_ratio", 0.91, "ratio", BLOCKED),)
        return Finding(
            cause,
            ns,
            ns / in_step,
            wins,
            0.95,
            "B",
            False,
            False,
            culprits,
            seen if cause is STORAGE else (),
            how,
            (make_recommendation(cause),),
            beside if cause is STORAGE else None,
        )

    others = len({rank.node for rank in ranks}) - 1
    beside = PeerComparison(
        "nfs.read_latency_ns", "ns", 12.0 * MS, 0.4 * MS, others, "node", "a read"
    )
    slow = culprit(guilty, "/data", 31 * S, 30 * S * (count - 1), count - 1)
    each = 3 * S * (count - many) // many
    preparing = [culprit(r, f"worker pid {9000 + r}", 5 * S, each, count - many) for r in busy]
    uneven = [culprit(r, "", 0, 4 * S, count - 1) for r in range(count)]
    return (
        finding(
            STORAGE,
            slow,
            wins=lost(STORAGE) // 2,
            how=Persistence("steady", 0, 300 * S, 70, 76, 1, 70),
        ),
        finding(TRANSFER, wins=None, how=None),
        finding(
            IMBALANCE,
            *uneven,
            wins=lost(IMBALANCE) // 4,
            how=Persistence("wandering", 0, 300 * S, 68, 76, min(count, 61), 2),
        ),
        finding(
            PREPROCESS,
            *preparing,
            wins=lost(PREPROCESS) // 2,
            how=Persistence("transient", 120 * S, 164 * S, 11, 76, many, 11),
        ),
    )
