"""Recommendations for paths and links between ranks, and for long transfers.

Which of those for transfers helps depends on how many operations a step has and how large they are:

    many of a few MiB       larger buckets: each has a start-up cost and a round trip
    one or two of 25 MiB    smaller buckets: the first is sent during computation
    one of 3 MiB            neither; if it takes long, the path is slow
"""

from __future__ import annotations

import shlex

from clusterprof.analysis.advice.base import (
    ExclusionRule,
    FilledRecommendation,
    Recommendation,
    mark_command,
)
from clusterprof.analysis.advice.context import AdviceContext
from clusterprof.analysis.advice.rules import (
    ONE_NODE,
    get_evidence_value,
    make_missing_evidence_rule,
)
from clusterprof.report.model import EvidenceSign
from clusterprof.units import format_quantity

_LOSS = "half of a link's rate lost costs a collective up to 57 % (arXiv 2606.01680)"


def find_faster_device(context: AdviceContext) -> str:
    """Find the idle device that is faster than the one in use; "" if the evidence has none."""
    return _find_device(context, "faster-device-idle")


def find_unused_port(context: AdviceContext) -> str:
    """Find the RDMA port that was unused while TCP carried the traffic; "" for none."""
    return _find_device(context, "port-unused")


def _find_device(context: AdviceContext, sign: EvidenceSign) -> str:
    return next((item.device for item in context.evidence if item.sign == sign), "")


def _format_nccl_port(port: str) -> str:
    """Format an RDMA port in NCCL's notation: mlx5_0/1 is mlx5_0:1."""
    return shlex.quote(port.replace("/", ":"))


def _quote_path_device(context: AdviceContext) -> str:
    return shlex.quote(context.resource) if context.resource else "DEVICE"


def _is_hca(device: str, context: AdviceContext) -> bool:
    return device.partition("/")[0] in context.machine.hcas


def _fill_interface(context: AdviceContext) -> FilledRecommendation:
    device = find_faster_device(context)
    name = shlex.quote(device)
    if _is_hca(device, context):
        change = f"{mark_command(f'export NCCL_IB_HCA={_format_nccl_port(device)}')} on every rank"
    else:
        command = mark_command(f"export NCCL_SOCKET_IFNAME={name} GLOO_SOCKET_IFNAME={name}")
        change = (
            f"{command} on every rank; {mark_command(f'ping -I {name} NODE')} to another node first"
        )
    return FilledRecommendation(change, what=f"Point the job at {name}")


def _fill_rdma(context: AdviceContext) -> FilledRecommendation:
    name = _format_nccl_port(find_unused_port(context))
    return FilledRecommendation(
        f"{mark_command(f'export NCCL_IB_HCA={name} NCCL_IB_DISABLE=0')}; NCCL_DEBUG=INFO must say"
        " NET/IB and not NET/Socket; in a container:"
        f" {mark_command('--device=/dev/infiniband --ulimit memlock=-1')}",
        what=f"Let the job use RDMA by {name}",
    )


def _quote_hcas(context: AdviceContext) -> str:
    return ",".join(shlex.quote(hca) for hca in context.machine.hcas)


def _fill_even_rails(context: AdviceContext) -> FilledRecommendation:
    hcas = _quote_hcas(context) or "ALL,RAILS"
    return FilledRecommendation(
        f"{mark_command(f'export NCCL_IB_HCA={hcas}')}; {mark_command('ibstat')} or"
        f" {mark_command('ip -br link')} says which is down",
        what="Let the job use all rails evenly",
    )


PATH_RECOMMENDATIONS = (
    Recommendation(
        "fast-interface",
        ("net-path",),
        "Point the job at the fast interface",
        "NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME",
        _fill_interface,
        evidence_names=("link_bytes_per_second",),
        published=_LOSS,
        expected_change="network.link_bytes_per_second of what is in use rises",
        worse="that interface may be reserved for storage",
        unless=(
            ExclusionRule(
                "no-faster",
                "no idle interface of a node is faster",
                lambda s: not find_faster_device(s),
            ),
        ),
        effort="setting",
    ),
    Recommendation(
        "use-rdma",
        ("net-path",),
        "Let the job use RDMA",
        "NCCL_IB_HCA, devices in the container",
        _fill_rdma,
        evidence_names=("rdma.link_bytes_per_second",),
        published=_LOSS,
        expected_change="the RDMA port carries the traffic",
        worse="the container needs locked memory",
        unless=(
            ExclusionRule(
                "rdma-used", "no RDMA port was unused", lambda s: not find_unused_port(s)
            ),
        ),
        effort="setting",
    ),
    Recommendation(
        "even-rails",
        ("net-path",),
        "Let the job use all rails evenly",
        "NCCL_IB_HCA, cables",
        _fill_even_rails,
        evidence_names=("rail_ratio",),
        published=_LOSS,
        expected_change="rdma.rail_ratio rises to 1",
        unless=(
            ExclusionRule(
                "rails-even",
                "no rail carries less than the others",
                lambda s: s.find_evidence("rail_ratio") is None,
            ),
        ),
        effort="setting",
    ),
    Recommendation(
        "check-rate",
        ("net-path",),
        "Check why the link came up at a lower rate than its peers",
        "cable, port, ethtool DEVICE",
        lambda s: FilledRecommendation(
            f"{mark_command(f'ethtool {_quote_path_device(s)}')} ({mark_command('ibstat')} for"
            " InfiniBand) on the node and on another: speed, lanes and cable must be the same"
        ),
        evidence_names=("link_bytes_per_second", "rail_ratio"),
        published=_LOSS,
        expected_change="link_bytes_per_second is that of the peers",
        unless=(
            ExclusionRule(
                "path-known",
                "an idle interface that is faster, or a quiet rail, was found",
                lambda s: bool(
                    find_faster_device(s) or find_unused_port(s) or s.find_evidence("rail_ratio")
                ),
            ),
        ),
        addressee="node",
        effort="look",
    ),
)


_CONGESTION = "congestion lengthened jobs by 15 %, large ones by 35 % (Greyhound, ATC 2025)"


def _fill_drain_link(context: AdviceContext) -> FilledRecommendation:
    culprits = context.finding.culprits
    node = shlex.quote(culprits[0].node) if culprits else "NODE"
    device = _quote_path_device(context)
    command = mark_command(f"ethtool -S {device}")
    if _is_hca(context.resource, context):
        command = f"{mark_command('perfquery -x')} and {mark_command('mlxlink -c')}"
    removal = {
        "slurm": mark_command(f"scontrol update NodeName={node} State=DRAIN Reason=link"),
        "kubernetes": mark_command(f"kubectl cordon {node}"),
    }.get(context.machine.launcher, f"leave {node} out of the next run")
    return FilledRecommendation(
        f"{removal}; on the node {command}; reseat or replace cable and transceiver"
    )


_NODE_NAMED = ExclusionRule("node-named", "one node stands out", lambda s: bool(s.finding.culprits))
_NO_NODE_NAMED = ExclusionRule(
    "nobody-named",
    "no node stands out: with two nodes both ends see the same losses",
    lambda s: not s.finding.culprits,
)

FAULT_RECOMMENDATIONS = (
    Recommendation(
        "drain-link",
        ("net-link",),
        "Take the node with the bad link out of service, and repair it",
        "drain; ethtool -S, perfquery; cable and transceiver",
        _fill_drain_link,
        evidence_names=(
            "retransmit_ratio",
            "errors_total",
            "rate_ratio",
            "loss_limit_bytes_per_second",
        ),
        published=_LOSS,
        expected_change="errors of the link stop rising",
        worse="one node less",
        unless=(_NO_NODE_NAMED,),
        addressee="node",
        effort="site",
    ),
    Recommendation(
        "look-at-both-ends",
        ("net-link",),
        "Find out which end of the link is bad",
        "counters of both nodes and of the switch",
        FilledRecommendation(
            f"{mark_command('ethtool -S DEVICE')} and {mark_command('ip -s link')}"
            f" ({mark_command('perfquery')} for InfiniBand) on both nodes, and the counters of the"
            " switch ports: the end whose own errors rise is the bad one"
        ),
        evidence_names=("retransmit_ratio", "errors_total", "loss_limit_bytes_per_second"),
        published=_LOSS,
        expected_change="errors of the link stop rising",
        unless=(_NODE_NAMED,),
        addressee="node",
        effort="look",
    ),
    Recommendation(
        "move-other-traffic",
        ("net-congestion",),
        "Find whose traffic fills the link, and move it",
        "sar -n DEV, iftop; storage on another network",
        lambda s: FilledRecommendation(
            f"{mark_command('sar -n DEV 1')}, and"
            f" {mark_command(f'iftop -i {_quote_path_device(s)}')} on the node, say how much and"
            " with whom; mount storage over another interface, move backups and copies to another"
            " hour",
            what="Find whose traffic fills the link, and move it",
        ),
        evidence_names=("others_ratio",),
        published=_CONGESTION,
        expected_change="network.others_ratio falls",
        worse="the traffic that is moved",
        addressee="node",
        unless=(
            make_missing_evidence_rule(
                "others_ratio", "the traffic was the job's own, or its owner is unknown"
            ),
        ),
        effort="look",
    ),
    Recommendation(
        "check-congestion-control",
        ("net-congestion",),
        "Check congestion control and routing",
        "PFC, ECN, adaptive routing",
        lambda s: FilledRecommendation(
            mark_command(f"ethtool -S {_quote_path_device(s)} | grep -E 'pause|ecn|cnp|prio'")
            + "; check with the operators of the fabric: PFC and ECN on the priority NCCL uses"
            " (NCCL_IB_TC), adaptive routing"
        ),
        evidence_names=(
            "marks_total",
            "pause_frames_total",
            "transmit_wait_ratio",
            "job_rtt_ns",
            "others_ratio",
            "discards_total",
        ),
        published=_CONGESTION,
        expected_change="marks and pauses become rarer",
        addressee="node",
        effort="look",
    ),
    Recommendation(
        "spread-over-rails",
        ("net-congestion",),
        "Spread the traffic over all rails",
        "NCCL_IB_HCA with all devices",
        lambda s: FilledRecommendation(
            mark_command(f"export NCCL_IB_HCA={_quote_hcas(s)}"),
            (f"the node has {len(s.machine.hcas)} RDMA devices",),
        ),
        published=_CONGESTION,
        expected_change="all rails carry equal traffic",
        unless=(
            ExclusionRule(
                "one-rail",
                "the node has one RDMA device, or none",
                lambda s: len(s.machine.hcas) < 2,
            ),
        ),
        effort="setting",
    ),
    Recommendation(
        "closer-nodes",
        ("net-congestion",),
        "Ask for nodes that are close to each other",
        "sbatch --switches, topology-aware scheduling",
        lambda s: FilledRecommendation(
            {
                "slurm": mark_command("sbatch --switches=1")
                + ", or a reservation of nodes under one switch",
                "kubernetes": "podAffinity with topologyKey of the rack, or Kueue's topology-aware"
                " scheduling",
            }.get(s.machine.launcher, "ask for nodes under one switch")
        ),
        published=_CONGESTION,
        expected_change="round trips get shorter",
        worse="the job may wait longer in the queue",
        unless=(ONE_NODE,),
        addressee="job",
        effort="setting",
    ),
)


_LONG_ROUND_TRIP_NS = 1e6
MANY_OPERATIONS = 4
"""Operations per step; combining fewer gains nothing."""
SMALL_BYTES = 8 << 20
"""Bytes that a rank sends in a small operation, at most.

A 25 MiB bucket of DistributedDataParallel sends 25 MiB between two ranks and nearly
50 MiB between many.
"""
LARGE_BYTES = 24 << 20
"""Bytes from which splitting one operation pays, because its first part starts earlier."""
FAST_RATIO = 0.5
"""Share of the expected rate of the path; from here on the path is not the problem."""


def _get_operation_bytes(context: AdviceContext) -> float | None:
    return get_evidence_value(context, "network.operation_bytes")


def _get_operations_per_step(context: AdviceContext) -> float | None:
    return get_evidence_value(context, "network.operations_per_step_count")


def has_many_small_operations(context: AdviceContext) -> bool:
    """Return whether a step has many small operations, which could be combined."""
    size, count = _get_operation_bytes(context), _get_operations_per_step(context)
    return (
        size is not None and count is not None and size < SMALL_BYTES and count >= MANY_OPERATIONS
    )


def _describe_operations(context: AdviceContext) -> tuple[str, ...]:
    size, count = _get_operation_bytes(context), _get_operations_per_step(context)
    if size is None or count is None:
        return ()
    return (
        f"a step has {count:.3g} operation{'' if count == 1 else 's'} of"
        f" {format_quantity(size, 'bytes')}",
    )


def _fill_path_check(context: AdviceContext) -> FilledRecommendation:
    rate = context.find_evidence("network.bytes_per_second")
    instruction = "Measure the path between ranks alone, without the job"
    if rate is not None:
        speed = format_quantity(rate.value, "bytes/s")
        instruction = f"Find out why ranks get {speed}: measure their path alone"
    if context.nodes < 2:
        size = max(int(_get_operation_bytes(context) or 0) >> 20, 1)
        test = mark_command(f"all_reduce_perf -b {size}M -e {size}M -g {max(context.ranks, 2)}")
        test += (
            " of nccl-tests on this node; with NCCL_DEBUG=INFO the job must say P2P or SHM, not"
            " NET/Socket (gloo always takes sockets: GLOO_SOCKET_IFNAME=lo)"
        )
    else:
        test = mark_command("iperf3 -c OTHER_NODE -P 4") + (
            " (or all_reduce_perf of nccl-tests) between the nodes; NCCL_DEBUG=INFO shows which"
            " interface the job used: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME select another"
        )
    return FilledRecommendation(test, _describe_operations(context), instruction)


def _fill_overlap(context: AdviceContext) -> FilledRecommendation:
    size, count = _get_operation_bytes(context), _get_operations_per_step(context)
    how = mark_command("FSDP(model, forward_prefetch=True)")
    if size is None or count is None:
        return FilledRecommendation(
            f"{how}; DistributedDataParallel overlaps by itself: look at its buckets"
        )
    if count < MANY_OPERATIONS:
        cut = mark_command("DistributedDataParallel(model, bucket_cap_mb=5)")
        return FilledRecommendation(
            f"{cut}: {format_quantity(size, 'bytes')} wait for all of the backward pass; parts"
            f" would"
            " not",
            _describe_operations(context),
            "Split the gradients into smaller buckets, so that the first are sent early",
        )
    return FilledRecommendation(
        f"{how}; DistributedDataParallel: gradients in the order of the backward pass"
        " (static_graph=True)",
        _describe_operations(context),
    )


def _get_ratio(context: AdviceContext, name: str) -> float:
    return context.value(name) or 0.0


_MOSTLY_EXCESS = ExclusionRule(
    "mostly-beyond",
    "most of it exceeds what the transfers need: look for a fault first",
    lambda s: _get_ratio(s, "network.beyond_ratio") > _get_ratio(s, "network.expected_ratio"),
)
_LITTLE_EXCESS = ExclusionRule(
    "little-beyond",
    "at most a tenth of it exceeds what these transfers need",
    lambda s: _get_ratio(s, "network.beyond_ratio") <= 0.1 * s.finding.share_ratio,
)
SMALL_SHARE = ExclusionRule(
    "small-share",
    "it is less than a twentieth of the time in steps: transfers always take some time",
    lambda s: s.finding.share_ratio < 0.05,
)
SHORT_TRIP = ExclusionRule(
    "short-round-trip",
    "the shortest round trip is below a millisecond, or not known",
    lambda s: (trip := s.find_evidence("min_rtt_ns")) is None or trip.value < _LONG_ROUND_TRIP_NS,
)
FEW_OPERATIONS = ExclusionRule(
    "few-operations",
    f"there is nothing to combine: a step has fewer than {MANY_OPERATIONS} operations, each sends"
    f" {format_quantity(SMALL_BYTES, 'bytes')} or more, or neither is known and round trips are"
    " short",
    lambda s: (
        not has_many_small_operations(s)
        and (SHORT_TRIP.holds(s) or _get_operation_bytes(s) is not None)
    ),
)
_NOTHING_TO_OVERLAP = ExclusionRule(
    "few-and-small",
    f"a step has fewer than {MANY_OPERATIONS} operations that send less than"
    f" {format_quantity(LARGE_BYTES, 'bytes')} each (there is nothing to split), or many small ones"
    " (larger buckets come first)",
    lambda s: (
        has_many_small_operations(s)
        or (
            (c := _get_operations_per_step(s)) is not None
            and c < MANY_OPERATIONS
            and (_get_operation_bytes(s) or 0) < LARGE_BYTES
        )
    ),
)
_PATH_FAST = ExclusionRule(
    "path-fast",
    f"at least {FAST_RATIO:.0%} of the expected rate of the path was reached",
    lambda s: (p := s.find_evidence("network.path_ratio")) is not None and p.value >= FAST_RATIO,
)
_TOO_SMALL = ExclusionRule(
    "messages-small",
    "operations send less than a mebibyte each, or of unknown size: round trips matter rather than"
    " the rate",
    lambda s: (_get_operation_bytes(s) or 0.0) < 1 << 20,
)

TRANSFER_RECOMMENDATIONS = (
    Recommendation(
        "check-path",
        ("net-transfer",),
        "Measure the path between ranks alone",
        "nccl-tests, iperf3, NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME",
        _fill_path_check,
        evidence_names=("network.bytes_per_second",),
        expected_change="network.bytes_per_second rises to the rate of the path alone",
        unless=(SMALL_SHARE, _TOO_SMALL, _PATH_FAST),
        addressee="job",
        effort="look",
    ),
    Recommendation(
        "larger-messages",
        ("net-transfer",),
        "Send fewer and larger messages",
        "larger buckets; nodes closer to each other",
        lambda s: FilledRecommendation(
            mark_command("DistributedDataParallel(model, bucket_cap_mb=100)")
            + " instead of 25"
            + ("" if SHORT_TRIP.holds(s) else "; nodes closer to each other"),
            _describe_operations(s),
        ),
        evidence_names=(
            "network.operations_per_step_count",
            "network.operation_bytes",
            "min_rtt_ns",
            "network.beyond_ratio",
        ),
        expected_change="network.operations_per_step_count falls",
        worse="larger buckets overlap less at the end",
        addressee="job",
        unless=(FEW_OPERATIONS,),
        effort="setting",
    ),
    Recommendation(
        "overlap-communication",
        ("net-transfer",),
        "Overlap transfers with computation",
        "buckets of the right size, prefetch",
        _fill_overlap,
        evidence_names=("network.expected_ratio", "network.beyond_ratio"),
        expected_change="network.expected_ratio falls",
        worse="more operations, each with a start-up cost of its own",
        unless=(_MOSTLY_EXCESS, SMALL_SHARE, _NOTHING_TO_OVERLAP),
        addressee="job",
        effort="setting",
    ),
    Recommendation(
        "accumulate-gradients",
        ("net-transfer",),
        "Communicate once for several micro-batches",
        "no_sync() for all but the last",
        FilledRecommendation(
            f"{mark_command('with model.no_sync():')} for all micro-batches of a step but the last"
        ),
        evidence_names=("network.expected_ratio",),
        expected_change="network.expected_ratio falls",
        worse="a larger batch for the optimizer",
        unless=(_MOSTLY_EXCESS, SMALL_SHARE),
        addressee="job",
        effort="code",
    ),
    Recommendation(
        "larger-window",
        ("net-transfer",),
        "Enlarge the receive window",
        "net.ipv4.tcp_rmem; the receiving process may be slow too",
        FilledRecommendation(
            mark_command(
                'sysctl -w net.core.rmem_max=268435456 net.ipv4.tcp_rmem="4096 131072 268435456"'
            )
            + " on both nodes; "
            + mark_command("export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4")
        ),
        evidence_names=("receiver_limited_ratio", "min_rtt_ns"),
        expected_change="tcp.receiver_limited_ratio falls",
        worse="kernel memory",
        unless=(
            make_missing_evidence_rule(
                "receiver_limited_ratio", "the receiver's window was not full"
            ),
        ),
        addressee="node",
        effort="site",
    ),
    Recommendation(
        "record-counters",
        ("net-transfer",),
        "Record the counters that would name the reason",
        "counters of links that were not read",
        lambda s: FilledRecommendation(
            "; ".join(f"{what}: {remedy}" for what, remedy in s.coverage_gaps[:2])
            or "clusterprof doctor shows which counters of links are not read; ask the operators of"
            " the switches for their counters at these times",
            what="Record the counters that would name the reason",
        ),
        evidence_names=("network.beyond_ratio",),
        expected_change="net-link, net-congestion or net-path is named",
        unless=(_LITTLE_EXCESS,),
        diagnose=True,
        effort="setting",
    ),
    Recommendation(
        "send-less",
        ("net-transfer",),
        "Send less: gradients in lower precision",
        "compression, lower precision, local SGD; try this last, because it changes training",
        FilledRecommendation(
            mark_command(
                "model.register_comm_hook(None, ddp_comm_hooks.default_hooks.bf16_compress_hook)"
            )
            + " halves what is sent; local SGD (PostLocalSGDOptimizer) sends less often"
        ),
        evidence_names=("network.expected_ratio",),
        expected_change="network.moved_bytes falls",
        worse="lower precision and less frequent exchange may cost accuracy",
        unless=(_MOSTLY_EXCESS, SMALL_SHARE),
        addressee="job",
        effort="code",
    ),
)
