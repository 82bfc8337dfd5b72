"""What to do about the paths that data take between ranks, and about sending less."""

from __future__ import annotations

import re
import shlex

from clusterprof.remedies.base import Filled, Mend, Rule
from clusterprof.remedies.commands import run
from clusterprof.remedies.rules import without
from clusterprof.remedies.scene import Scene

_LOSS = "half of a link's rate lost costs a collective up to 57 % (arXiv 2606.01680)"
_LONG_TRIP_NS = 1e6
_FASTER = re.compile(r"carried the traffic, (\S+) was idle and is faster")
_UNUSED = re.compile(r"RDMA port without traffic, while TCP carried the job's: (\S+) of ")


def faster_device(scene: Scene) -> str:
    """Return the idle device that is faster than the one in use, as the evidence names it."""
    found = (_FASTER.search(one.note) for one in scene.evidence)
    return next((match[1] for match in found if match), "")


def unused_port(scene: Scene) -> str:
    """Return the RDMA port that stood unused while TCP carried the traffic."""
    found = (_UNUSED.search(one.note) for one in scene.evidence)
    return next((match[1] for match in found if match), "")


def _nccl(port: str) -> str:
    """Write an RDMA port as NCCL does: mlx5_0/1 is mlx5_0:1."""
    return shlex.quote(port.replace("/", ":"))


def _device(scene: Scene) -> str:
    return shlex.quote(scene.resource) if scene.resource else "DEVICE"


def _interface(scene: Scene) -> Filled:
    found = faster_device(scene)
    name = shlex.quote(found)
    if found.partition("/")[0] in scene.machine.hcas:
        change = f"{run(f'export NCCL_IB_HCA={_nccl(found)}')} on every rank"
    else:
        command = run(f"export NCCL_SOCKET_IFNAME={name} GLOO_SOCKET_IFNAME={name}")
        change = f"{command} on every rank; {run(f'ping -I {name} NODE')} to another node first"
    return Filled(
        change,
        what=f"Point the job at {name}",
    )


def _rdma(scene: Scene) -> Filled:
    name = _nccl(unused_port(scene))
    return Filled(
        f"{run(f'export NCCL_IB_HCA={name} NCCL_IB_DISABLE=0')}; NCCL_DEBUG=INFO must say NET/IB"
        " and not NET/Socket; in a container:"
        f" {run('--device=/dev/infiniband --ulimit memlock=-1')}",
        what=f"Let the job use RDMA by {name}",
    )


def _rails(scene: Scene) -> Filled:
    hcas = ",".join(shlex.quote(one) for one in scene.machine.hcas) or "ALL,RAILS"
    return Filled(
        f"{run(f'export NCCL_IB_HCA={hcas}')}; {run('ibstat')} or {run('ip -br link')} says which"
        " is down",
        what="Let the job use all rails alike",
    )


def _overlap(scene: Scene) -> Filled:
    return Filled(
        run("DistributedDataParallel(model, bucket_cap_mb=100)")
        + " in the place of 25, FSDP with forward_prefetch=True; gradients in bfloat16"
        " (ddp_comm_hooks.bf16_compress_hook)"
    )


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
    return Filled(
        run("DistributedDataParallel(model, bucket_cap_mb=100)")
        + " in the place of 25; nodes nearer to each other"
    )


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
_RAIL = Rule(
    "rails-even", "no rail carries less than the others",
    lambda s: s.number("rail_ratio") is None,
)  # fmt: skip

REMEDIES = (
    Mend(
        "fast-interface", ("net-path",), "Point the job at the fast interface",
        "NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME", _interface,
        seen=("link_bytes_per_second",), published=_LOSS,
        moves="network.link_bytes_per_second of what is in use rises",
        worse="that interface may have been left free for storage",
        unless=(Rule("no-faster", "no idle interface of a node is faster",
                     lambda s: not faster_device(s)),),
        effort="setting",
    ),
    Mend(
        "use-rdma", ("net-path",), "Let the job use RDMA", "NCCL_IB_HCA, devices in the container",
        _rdma, seen=("rdma.link_bytes_per_second",), published=_LOSS,
        moves="the RDMA port carries the traffic", worse="locked memory of the container",
        unless=(Rule("rdma-used", "no RDMA port stood unused", lambda s: not unused_port(s)),),
        effort="setting",
    ),
    Mend(
        "even-rails", ("net-path",), "Let the job use all rails alike", "NCCL_IB_HCA, cables",
        _rails, seen=("rail_ratio",), published=_LOSS, moves="rdma.rail_ratio rises to 1",
        unless=(_RAIL,),
        effort="setting",
    ),
    Mend(
        "check-rate", ("net-path",), "Check why the link came up at a lower rate than its peers",
        "cable, port, ethtool DEVICE", lambda s: Filled(
            f"{run(f'ethtool {_device(s)}')} ({run('ibstat')} for InfiniBand) on the node and on"
            " another: speed, lanes and cable must be the same"),
        seen=("link_bytes_per_second", "rail_ratio"), published=_LOSS,
        moves="link_bytes_per_second is that of the peers",
        unless=(Rule("path-known", "an idle interface that is faster, or a quiet rail, was found",
                     lambda s: bool(faster_device(s) or unused_port(s) or s.number("rail_ratio"))),
                ),
        place="node",
        effort="look",
    ),
    Mend(
        "overlap-communication", ("net-transfer",), "Overlap communication, and send less",
        "larger buckets, prefetch, gradients in lower precision", _overlap,
        seen=("network.expected_ratio", "network.beyond_ratio"),
        moves="network.expected_ratio falls",
        worse="lower precision may cost accuracy; larger buckets overlap less at the end",
        unless=(_MOSTLY_BEYOND, SMALL_SHARE),
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
        "larger-messages", ("net-transfer",), "Send fewer and larger messages",
        "larger buckets; nodes nearer to each other", _larger_messages,
        seen=("min_rtt_ns", "network.beyond_ratio"),
        moves="network.beyond_ratio falls", worse="larger buckets overlap less at the end",
        place="job", unless=(SHORT_TRIP,),
        effort="setting",
    ),
    Mend(
        "record-counters", ("net-transfer",), "Record the counters that would name the reason",
        "counters of links that were not read", _counters,
        seen=("network.beyond_ratio",), moves="net-link, net-congestion or net-path is named",
        unless=(_LITTLE_BEYOND,), diagnose=True,
        effort="setting",
    ),
)  # fmt: skip
