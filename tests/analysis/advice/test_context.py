"""The devices that the evidence of a path names are those that its remedies are about."""

from __future__ import annotations

from clusterprof.analysis.advice.context import AdviceContext, Machine
from clusterprof.analysis.advice.registry import select_advice
from clusterprof.analysis.attribution.network.counters import find_symptoms
from clusterprof.analysis.attribution.network.split import _make_rate_symptom, make_zero_limits
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.report.model import Evidence, Finding
from tests.support.networks import GB, make_hca, make_links, make_nic


def path(evidence: tuple[Evidence, ...]) -> AdviceContext:
    finding = Finding(CAUSES["net-path"], 10**10, 0.2, 10**10, 0.9, "A", False, False)
    return AdviceContext(finding, evidence, machine=Machine("n0", hcas=("mlx5_0",)))


def test_advice_names_the_faster_idle_interface() -> None:
    node_links = make_links(0, {**make_nic("eth0", 10 * GB, GB), **make_nic("eth1", 0, 10 * GB)})
    assert node_links.faster == ("eth1", 10 * GB)
    (advice,) = select_advice(path((_make_rate_symptom(node_links, 2.0).evidence,)))
    assert advice.id == "fast-interface" and advice.change.startswith(
        "export NCCL_SOCKET_IFNAME=eth1 "
    )


def test_advice_names_the_unused_rdma_port_in_nccl_notation() -> None:
    node_links = make_links(0, {**make_nic("eth0", 10 * GB, GB), **make_hca("mlx5_0/1", 0)})
    assert node_links.unused == ("mlx5_0/1",)
    signs = find_symptoms(node_links, make_zero_limits(build_limits({})))
    advice = select_advice(
        path(tuple(sign.evidence for sign in signs if "RDMA" in sign.evidence.note))
    )
    assert advice[0].id == "use-rdma" and advice[0].what == "Let the job use RDMA by mlx5_0:1"
    assert advice[0].change.startswith("export NCCL_IB_HCA=mlx5_0:1 ")
