"""What a node may simply not have: collectors whose absence is no gap, in a reader's words."""

from __future__ import annotations

NOT_EVERYWHERE: dict[str, str] = {
    "mounts": "NFS",
    "lustre": "Lustre",
    "cifs": "CIFS",
    "ethtool": "cards that count pauses",
    "rdma": "RDMA",
    "cpu_clock": "CPU clocks",
    "gpu_nvidia": "NVIDIA GPUs",
    "kernel_log": "NVIDIA's kernel log",
    "gpu_amd": "AMD GPUs",
    "gpu_intel": "Intel GPUs",
    "gpu_gaudi": "Gaudi",
    "gpu_neuron": "Trainium",
    "gpu_tpu": "TPU",
    "gpu_emulated": "emulated devices",
}
"""Collector -> what it reads; of every other one a node without it is told why."""
_OF_MOST_NODES = "gpu_nvidia"


def is_elsewhere(collector: str, kind: str, remedy: str, accelerators: bool) -> bool:
    """True when a collector is absent because this node has no such thing: nothing is missed.

    kind, remedy: of the reason; what somebody could install is missed. accelerators: the node has
    some of any maker; a node without any misses NVIDIA's, for all makers.
    """
    if kind != "absent" or collector not in NOT_EVERYWHERE:
        return False
    return accelerators if collector == _OF_MOST_NODES else not remedy
