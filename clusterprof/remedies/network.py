"""What to do about the paths that data take between ranks."""

from __future__ import annotations

import re
import shlex

from clusterprof.remedies.base import Filled, Mend, Rule
from clusterprof.remedies.commands import run
from clusterprof.remedies.scene import Scene

_LOSS = "half of a link's rate lost costs a collective up to 57 % (arXiv 2606.01680)"
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
)  # fmt: skip
