"""Finding NVML, and its errors in our words."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from clusterprof.errors import Unavailable

_LIBRARY_NAME = "libnvidia-ml.so.1"

_INSTALL = "install the NVIDIA driver, or run the container with the NVIDIA runtime"
_UPDATE = "update the NVIDIA driver"
_RESET = "look for Xid lines in the kernel log; the GPU needs a reset or the node a reboot"
_PERMIT = "an administrator must run it, or set NVreg_RestrictProfilingToAdminUsers=0"
_ERRORS: dict[int, Unavailable] = {
    3: Unavailable("absent", "not supported by this GPU or driver"),
    4: Unavailable("denied", "NVML: no permission", _PERMIT),
    6: Unavailable("absent", "NVML: not found"),
    9: Unavailable("absent", "the NVIDIA driver is not loaded", _INSTALL),
    10: Unavailable("failed", "NVML: timed out"),
    12: Unavailable("absent", f"{_LIBRARY_NAME} was not found", _INSTALL),
    13: Unavailable("absent", "the NVIDIA driver is too old for this value", _UPDATE),
    15: Unavailable("failed", "GPU is lost", _RESET),
    16: Unavailable("failed", "GPU requires a reset", _RESET),
    18: Unavailable("failed", "NVML and the driver have different versions", "reboot the node"),
    999: Unavailable("failed", "NVML: unknown error", _RESET),
}
FATAL = frozenset({15, 16, 999})
"""Codes after which a handle must not be used again."""
NOT_FOUND = 6


def why_absent(
    environ: Mapping[str, str],
    driver: Sequence[str] = ("/dev/nvidiactl", "/proc/driver/nvidia/version"),
    loader_cache: str = "/etc/ld.so.cache",
) -> Unavailable | None:
    """Say why NVML need not even be tried on this node; None when it may be there.

    Saves nodes without a GPU the helper process. Looks at the device node and where the loader
    looks, and asks the driver nothing.
    """
    if any(os.path.exists(path) for path in driver):
        return None
    folders = environ.get("LD_LIBRARY_PATH", "").split(":")
    if any(folder and os.path.exists(f"{folder}/{_LIBRARY_NAME}") for folder in folders):
        return None
    try:
        with open(loader_cache, "rb") as cache:
            known = _LIBRARY_NAME.encode() in cache.read()
    except OSError:
        return None  # a system without that cache: the loader itself must say
    return None if known else _ERRORS[12]


def load() -> Any:
    """Import the binding; raises Unavailable (absent) when it is not installed."""
    try:
        import pynvml
    except ImportError:
        remedy = "pip install nvidia-ml-py"
        raise Unavailable("absent", "the Python package nvidia-ml-py is missing", remedy) from None
    return pynvml


def reason_of(code: int, name: str = "NVML") -> Unavailable:
    """Translate an error code into our words; `name` stands for one that has none."""
    return _ERRORS.get(code) or Unavailable("failed", f"{name} ({code})")


def explain(nvml: Any, error: Exception) -> Unavailable:
    """Translate what a call raised into our words."""
    if isinstance(error, Unavailable):
        return error
    if isinstance(error, nvml.NVMLError):
        # Not str(error): it asks the library for its words, outside of any mark.
        return reason_of(int(getattr(error, "value", -1)), type(error).__name__)
    if isinstance(error, AttributeError):
        return Unavailable(
            "absent", "nvidia-ml-py is too old for this value", "update nvidia-ml-py"
        )
    return Unavailable("failed", f"NVML: {error}")
