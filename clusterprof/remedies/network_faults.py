"""What to do about bad links and full ones between ranks."""

from __future__ import annotations

import shlex

from clusterprof.remedies.base import Filled, Mend, Rule
from clusterprof.remedies.commands import run
from clusterprof.remedies.rules import ONE_NODE, without
from clusterprof.remedies.scene import Scene

_LOSS = "half of a link's rate lost costs a collective up to 57 % (arXiv 2606.01680)"
_CONGESTION = "congestion lengthened jobs by 15 %, large ones by 35 % (Greyhound, ATC 2025)"


def _device(scene: Scene) -> str:
    return shlex.quote(scene.resource) if scene.resource else "DEVICE"


def _drain_link(scene: Scene) -> Filled:
    culprits = scene.finding.culprits
    node = shlex.quote(culprits[0].node) if culprits else "NODE"
    device = _device(scene)
    look = run(f"ethtool -S {device}")
    if _is_hca(scene):
        look = f"{run('perfquery -x')} and {run('mlxlink -c')}"
    out = {
        "slurm": run(f"scontrol update NodeName={node} State=DRAIN Reason=link"),
        "kubernetes": run(f"kubectl cordon {node}"),
    }.get(scene.machine.launcher, f"leave {node} out of the next run")
    return Filled(f"{out}; on the node {look}; reseat or replace cable and transceiver")


def _is_hca(scene: Scene) -> bool:
    return scene.resource.partition("/")[0] in scene.machine.hcas


def _both_ends(scene: Scene) -> Filled:
    return Filled(
        f"{run('ethtool -S DEVICE')} and {run('ip -s link')} ({run('perfquery')} for InfiniBand) on"
        " both nodes, and the counters of the switch ports: the end whose own errors rise is the"
        " bad one"
    )


def _congested(scene: Scene) -> Filled:
    return Filled(
        run(f"ethtool -S {_device(scene)} | grep -E 'pause|ecn|cnp|prio'")
        + "; check with whoever runs the fabric: PFC and ECN on the priority NCCL uses"
        " (NCCL_IB_TC), adaptive routing"
    )


def _spread(scene: Scene) -> Filled:
    hcas = ",".join(shlex.quote(one) for one in scene.machine.hcas)
    return Filled(
        run(f"export NCCL_IB_HCA={hcas}"),
        (f"the node has {len(scene.machine.hcas)} RDMA devices",),
    )


def _closer(scene: Scene) -> Filled:
    change = {
        "slurm": f"{run('sbatch --switches=1')}, or a reservation of nodes under one switch",
        "kubernetes": "podAffinity with topologyKey of the rack, or Kueue's topology-aware"
        " scheduling",
    }.get(scene.machine.launcher, "ask for nodes under one switch")
    return Filled(change)


def _others(scene: Scene) -> Filled:
    return Filled(
        f"{run('sar -n DEV 1')}, and {run(f'iftop -i {_device(scene)}')} on the node, say how much"
        " and with whom; mount storage over another interface, move backups and copies to another"
        " hour",
        what="Find whose traffic fills the link, and move it",
    )


_NAMED = Rule("node-named", "one node stands out", lambda s: bool(s.finding.culprits))
_NOBODY = Rule(
    "nobody-named", "no node stands out: with two nodes both ends see the same losses",
    lambda s: not s.finding.culprits,
)  # fmt: skip

REMEDIES = (
    Mend(
        "drain-link", ("net-link",), "Take the node of the bad link out of service, and mend it",
        "drain; ethtool -S, perfquery; cable and transceiver", _drain_link,
        seen=("retransmit_ratio", "errors_total", "rate_ratio", "loss_limit_bytes_per_second"),
        published=_LOSS, moves="errors of the link stop rising", worse="one node less",
        unless=(_NOBODY,),
        place="node",
        effort="site",
    ),
    Mend(
        "look-at-both-ends", ("net-link",), "Find out which end of the link is bad",
        "counters of both nodes and of the switch", _both_ends,
        seen=("retransmit_ratio", "errors_total", "loss_limit_bytes_per_second"),
        published=_LOSS, moves="errors of the link stop rising", unless=(_NAMED,),
        place="node",
        effort="look",
    ),
    Mend(
        "move-other-traffic", ("net-congestion",), "Find whose traffic fills the link, and move it",
        "sar -n DEV, iftop; storage on another network", _others, seen=("others_ratio",),
        published=_CONGESTION, moves="network.others_ratio falls", worse="whoever is moved",
        place="node",
        unless=(without("others_ratio", "the traffic was the job's own, or whose is not known"),),
        effort="look",
    ),
    Mend(
        "check-congestion-control", ("net-congestion",), "Check congestion control and routing",
        "PFC, ECN, adaptive routing", _congested,
        seen=("marks_total", "pause_frames_total", "transmit_wait_ratio", "job_rtt_ns",
              "others_ratio", "discards_total"),
        published=_CONGESTION, moves="marks and pauses get fewer",
        place="node",
        effort="look",
    ),
    Mend(
        "spread-over-rails", ("net-congestion",), "Spread the traffic over all rails",
        "NCCL_IB_HCA with all devices", _spread, published=_CONGESTION,
        moves="each rail carries the same",
        unless=(Rule("one-rail", "the node has one RDMA device, or none",
                     lambda s: len(s.machine.hcas) < 2),),
        effort="setting",
    ),
    Mend(
        "closer-nodes", ("net-congestion",), "Ask for nodes that are close to each other",
        "sbatch --switches, topology-aware scheduling", _closer, published=_CONGESTION,
        moves="round trips get shorter", worse="the job may wait longer in the queue",
        unless=(ONE_NODE,),
        place="job",
        effort="setting",
    ),
)  # fmt: skip
