"""What to do where data are on their way for long: look at the path, overlap, send less or rarer.

Which of these helps is a matter of how many operations a step has and how large they are:

    many of a few MiB       larger buckets: each costs a start and a round trip of its own
    one or two of 25 MiB    smaller buckets: the first is on its way while the rest is computed
    one of 3 MiB            neither; where it takes long, the path is slow
"""

from __future__ import annotations

from clusterprof.remedies.base import Filled, Mend, Rule
from clusterprof.remedies.commands import run
from clusterprof.remedies.rules import without
from clusterprof.remedies.scene import Scene
from clusterprof.units import human

_LONG_TRIP_NS = 1e6
MANY_OPERATIONS = 4
"""In a step: of fewer nothing is won by putting them together."""
SMALL_BYTES = 8 << 20
"""Sent by a rank in an operation: a bucket of 25 MiB, as DistributedDataParallel makes them, sends
25 MiB between two ranks and nearly 50 between many."""
LARGE_BYTES = 24 << 20
"""From here on one operation is worth being cut, so that it begins earlier."""
FAST_RATIO = 0.5
"""Of what the path ought to give: from here on it is not the path."""


def _size(scene: Scene) -> float | None:
    found = scene.number("network.operation_bytes")
    return None if found is None else found.value


def _per_step(scene: Scene) -> float | None:
    found = scene.number("network.operations_per_step_count")
    return None if found is None else found.value


def many_small(scene: Scene) -> bool:
    """True where a step has many operations that are small: they could be put together."""
    size, count = _size(scene), _per_step(scene)
    if size is None or count is None:
        return False
    return size < SMALL_BYTES and count >= MANY_OPERATIONS


def _said(scene: Scene) -> tuple[str, ...]:
    size, count = _size(scene), _per_step(scene)
    if size is None or count is None:
        return ()
    return (
        f"a step has {count:.3g} operation{'' if count == 1 else 's'} of {human(size, 'bytes')}",
    )


def _path(scene: Scene) -> Filled:
    rate = scene.number("network.bytes_per_second")
    what = "Measure the path between ranks by itself, without the job"
    if rate is not None:
        what = f"Find out why ranks get {human(rate.value, 'bytes/s')}: measure their path alone"
    if scene.nodes < 2:
        size = max(int(_size(scene) or 0) >> 20, 1)
        test = run(f"all_reduce_perf -b {size}M -e {size}M -g {max(scene.ranks, 2)}")
        return Filled(
            f"{test} of nccl-tests on this node; with NCCL_DEBUG=INFO the job must say P2P or SHM,"
            " not NET/Socket (gloo always takes sockets: GLOO_SOCKET_IFNAME=lo)",
            _said(scene), what,
        )  # fmt: skip
    test = run("iperf3 -c OTHER_NODE -P 4")
    return Filled(
        f"{test} (or all_reduce_perf of nccl-tests) between the nodes; NCCL_DEBUG=INFO says which"
        " interface the job took: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name another",
        _said(scene), what,
    )  # fmt: skip


def _overlap(scene: Scene) -> Filled:
    size, count = _size(scene), _per_step(scene)
    if size is None or count is None:
        how = run("FSDP(model, forward_prefetch=True)")
        return Filled(f"{how}; DistributedDataParallel overlaps by itself: look at its buckets")
    if count < MANY_OPERATIONS:
        cut = run("DistributedDataParallel(model, bucket_cap_mb=5)")
        return Filled(
            f"{cut}: {human(size, 'bytes')} wait for the whole backward pass, parts of it do not",
            _said(scene), "Cut the gradients into smaller buckets, so that the first leave early",
        )  # fmt: skip
    how = run("FSDP(model, forward_prefetch=True)")
    return Filled(
        f"{how}; DistributedDataParallel: gradients in the order of the backward pass"
        " (static_graph=True)", _said(scene),
    )  # fmt: skip


def _accumulate(scene: Scene) -> Filled:
    return Filled(f"{run('with model.no_sync():')} for all micro-batches of a step but the last")


def _window(scene: Scene) -> Filled:
    return Filled(
        run('sysctl -w net.core.rmem_max=268435456 net.ipv4.tcp_rmem="4096 131072 268435456"')
        + f" on both nodes; {run('export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4')}"
    )


def _counters(scene: Scene) -> Filled:
    holes = "; ".join(f"{what}: {remedy}" for what, remedy in scene.holes[:2])
    return Filled(
        holes
        or "clusterprof doctor says which counters of links are not read; ask whoever runs"
        " the switches for the same times",
        what="Record the counters that would name the reason",
    )


def _larger_messages(scene: Scene) -> Filled:
    nearer = "; nodes nearer to each other" if not SHORT_TRIP.holds(scene) else ""
    return Filled(
        run("DistributedDataParallel(model, bucket_cap_mb=100)") + f" in the place of 25{nearer}",
        _said(scene),
    )


def _less(scene: Scene) -> Filled:
    hook = run("model.register_comm_hook(None, ddp_comm_hooks.default_hooks.bf16_compress_hook)")
    return Filled(f"{hook} halves what is sent; local SGD (PostLocalSGDOptimizer) sends rarely")


def _ratio(scene: Scene, name: str) -> float:
    return scene.value(name) or 0.0


_MOSTLY_BEYOND = Rule(
    "mostly-beyond",
    "most of it is beyond what the transfers need: then a fault comes first",
    lambda s: _ratio(s, "network.beyond_ratio") > _ratio(s, "network.expected_ratio"),
)
_LITTLE_BEYOND = Rule(
    "little-beyond",
    "no more than a tenth of it is beyond what these transfers need",
    lambda s: _ratio(s, "network.beyond_ratio") <= 0.1 * s.finding.share_ratio,
)
SMALL_SHARE = Rule(
    "small-share",
    "it is less than a twentieth of the time in steps: data must be on their way for some time",
    lambda s: s.finding.share_ratio < 0.05,
)
SHORT_TRIP = Rule(
    "short-round-trip",
    "the shortest round trip is below a millisecond, or not known",
    lambda s: (trip := s.number("min_rtt_ns")) is None or trip.value < _LONG_TRIP_NS,
)
FEW_OPERATIONS = Rule(
    "few-operations",
    f"a step has fewer than {MANY_OPERATIONS} operations, or each sends"
    f" {human(SMALL_BYTES, 'bytes')} or more, or neither is known: there is nothing to put together"
    " (where round trips are long and neither is known, it is advised)",
    lambda s: not many_small(s) and (SHORT_TRIP.holds(s) or _size(s) is not None),
)
_NOTHING_TO_OVERLAP = Rule(
    "few-and-small",
    f"a step has fewer than {MANY_OPERATIONS} operations that send less than"
    f" {human(LARGE_BYTES, 'bytes')} each (there is nothing to cut), or many small ones (larger"
    " buckets come first)",
    lambda s: (
        many_small(s)
        or (
            (c := _per_step(s)) is not None
            and c < MANY_OPERATIONS
            and (_size(s) or 0) < LARGE_BYTES
        )
    ),
)
_PATH_FAST = Rule(
    "path-fast",
    f"at least {FAST_RATIO:.0%} of what the path ought to give was reached",
    lambda s: (p := s.number("network.path_ratio")) is not None and p.value >= FAST_RATIO,
)
_TOO_SMALL = Rule(
    "messages-small",
    "operations send less than a mebibyte each, or of unknown size: they take round trips rather"
    " than a rate",
    lambda s: (_size(s) or 0.0) < 1 << 20,
)

REMEDIES = (
    Mend(
        "check-path", ("net-transfer",), "Measure the path between ranks by itself",
        "nccl-tests, iperf3, NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME", _path,
        seen=("network.bytes_per_second",),
        moves="network.bytes_per_second rises to what the path gives by itself",
        unless=(SMALL_SHARE, _TOO_SMALL, _PATH_FAST),
        place="job",
        effort="look",
    ),
    Mend(
        "larger-messages", ("net-transfer",), "Send fewer and larger messages",
        "larger buckets; nodes nearer to each other", _larger_messages,
        seen=("network.operations_per_step_count", "network.operation_bytes", "min_rtt_ns",
              "network.beyond_ratio"),
        moves="network.operations_per_step_count falls",
        worse="larger buckets overlap less at the end",
        place="job", unless=(FEW_OPERATIONS,),
        effort="setting",
    ),
    Mend(
        "overlap-communication", ("net-transfer",), "Let data travel while ranks compute",
        "buckets of the right size, prefetch", _overlap,
        seen=("network.expected_ratio", "network.beyond_ratio"),
        moves="network.expected_ratio falls",
        worse="more operations, each of which costs a start of its own",
        unless=(_MOSTLY_BEYOND, SMALL_SHARE, _NOTHING_TO_OVERLAP),
        place="job",
        effort="setting",
    ),
    Mend(
        "accumulate-gradients", ("net-transfer",), "Communicate once for several micro-batches",
        "no_sync() for all but the last", _accumulate, seen=("network.expected_ratio",),
        moves="network.expected_ratio falls", worse="a larger batch for the optimizer",
        unless=(_MOSTLY_BEYOND, SMALL_SHARE),
        place="job",
        effort="code",
    ),
    Mend(
        "larger-window", ("net-transfer",), "Let receivers take more",
        "net.ipv4.tcp_rmem; the receiving process may be slow too", _window,
        seen=("receiver_limited_ratio", "min_rtt_ns"), moves="tcp.receiver_limited_ratio falls",
        worse="memory of the kernel",
        unless=(without("receiver_limited_ratio", "the receiver's window was not full"),),
        place="node",
        effort="site",
    ),
    Mend(
        "record-counters", ("net-transfer",), "Record the counters that would name the reason",
        "counters of links that were not read", _counters,
        seen=("network.beyond_ratio",), moves="net-link, net-congestion or net-path is named",
        unless=(_LITTLE_BEYOND,), diagnose=True,
        effort="setting",
    ),
    Mend(
        "send-less", ("net-transfer",), "Send less: gradients in lower precision",
        "compression, lower precision, local SGD; last, as training itself changes", _less,
        seen=("network.expected_ratio",), moves="network.moved_bytes falls",
        worse="lower precision and rarer exchange may cost accuracy",
        unless=(_MOSTLY_BEYOND, SMALL_SHARE),
        place="job",
        effort="code",
    ),
)  # fmt: skip
