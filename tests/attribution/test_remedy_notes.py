"""The devices that the evidence of a path names are those that its remedies are about."""

from __future__ import annotations

from networks import GB, hca, links, nic

from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.net_signs import signs_of
from clusterprof.attribution.net_split import _rate_sign, loosest
from clusterprof.engine.limits import bound
from clusterprof.findings import Evidence, Finding
from clusterprof.remedies.registry import advise
from clusterprof.remedies.scene import Machine, Scene


def path(evidence: tuple[Evidence, ...]) -> Scene:
    found = Finding(CAUSES["net-path"], 10**10, 0.2, 10**10, 0.9, "A", False, False)
    return Scene(found, evidence, machine=Machine("n0", hcas=("mlx5_0",)))


def test_the_idle_interface_that_is_faster() -> None:
    one = links(0, {**nic("eth0", 10 * GB, GB), **nic("eth1", 0, 10 * GB)})
    assert one.faster == ("eth1", 10 * GB)
    (said,) = advise(path((_rate_sign(one, 2.0).evidence,)))
    assert said.id == "fast-interface" and said.change.startswith("export NCCL_SOCKET_IFNAME=eth1 ")


def test_the_port_that_stands_unused_as_nccl_writes_it() -> None:
    one = links(0, {**nic("eth0", 10 * GB, GB), **hca("mlx5_0/1", 0)})
    assert one.unused == ("mlx5_0/1",)
    signs = signs_of(one, loosest(bound({})))
    said = advise(path(tuple(sign.evidence for sign in signs if "RDMA" in sign.evidence.note)))
    assert said[0].id == "use-rdma" and said[0].what == "Let the job use RDMA by mlx5_0:1"
    assert said[0].change.startswith("export NCCL_IB_HCA=mlx5_0:1 ")
