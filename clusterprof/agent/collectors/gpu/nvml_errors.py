"""Find NVML and translate its errors to readable reasons."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from clusterprof.errors import Unavailable

_LIBRARY_NAME = "libnvidia-ml.so.1"

_INSTALL_REMEDY = "install the NVIDIA driver, or run the container with the NVIDIA runtime"
_UPDATE_REMEDY = "update the NVIDIA driver"
_RESET_REMEDY = "check for Xid lines in the kernel log; the GPU needs a reset or the node a reboot"
_PERMIT_REMEDY = "an administrator must run it, or set NVreg_RestrictProfilingToAdminUsers=0"
_ERRORS: dict[int, Unavailable] = {
    3: Unavailable("absent", "not supported by this GPU or driver"),
    4: Unavailable("denied", "NVML: no permission", _PERMIT_REMEDY),
    6: Unavailable("absent", "NVML: not found"),
    9: Unavailable("absent", "the NVIDIA driver is not loaded", _INSTALL_REMEDY),
    10: Unavailable("failed", "NVML: timed out"),
    12: Unavailable("absent", f"{_LIBRARY_NAME} was not found", _INSTALL_REMEDY),
    13: Unavailable("absent", "the NVIDIA driver is too old for this value", _UPDATE_REMEDY),
    15: Unavailable("failed", "GPU is lost", _RESET_REMEDY),
    16: Unavailable("failed", "GPU requires a reset", _RESET_REMEDY),
    18: Unavailable("failed", "NVML and the driver have different versions", "reboot the node"),
    999: Unavailable("failed", "NVML: unknown error", _RESET_REMEDY),
}
FATAL_CODES = frozenset({15, 16, 999})
"""Codes after which a handle must not be used again."""
NOT_FOUND_CODE = 6


def explain_absence(
    environ: Mapping[str, str],
    driver: Sequence[str] = ("/dev/nvidiactl", "/proc/driver/nvidia/version"),
    loader_cache: str = "/etc/ld.so.cache",
) -> Unavailable | None:
    """Return why NVML cannot be available on this node; None when it may be.

    This saves nodes without a GPU the helper process. It checks the device node and the
    loader's search paths, and never calls the driver.
    """
    if any(os.path.exists(path) for path in driver):
        return None
    folders = environ.get("LD_LIBRARY_PATH", "").split(":")
    if any(folder and os.path.exists(f"{folder}/{_LIBRARY_NAME}") for folder in folders):
        return None
    try:
        with open(loader_cache, "rb") as cache:
            is_installed = _LIBRARY_NAME.encode() in cache.read()
    except OSError:
        return None  # a system without that cache: only the loader itself can find out
    return None if is_installed else _ERRORS[12]


def load_pynvml() -> Any:
    """Import the binding.

    Raises: Unavailable ("absent") when it is not installed.
    """
    try:
        import pynvml
    except ImportError:
        message, remedy = "the Python package nvidia-ml-py is missing", "pip install nvidia-ml-py"
        raise Unavailable("absent", message, remedy, by_user=True) from None
    return pynvml


def explain_code(code: int, name: str = "NVML") -> Unavailable:
    """Translate an error code to a reason; `name` is used for an unknown code."""
    return _ERRORS.get(code) or Unavailable("failed", f"{name} ({code})")


def explain_error(nvml: Any, error: Exception) -> Unavailable:
    """Translate an exception of a call to a reason."""
    if isinstance(error, Unavailable):
        return error
    if isinstance(error, nvml.NVMLError):
        # Not str(error): it calls the library for its message, outside of any mark.
        return explain_code(int(getattr(error, "value", -1)), type(error).__name__)
    if isinstance(error, AttributeError):
        return Unavailable(
            "absent", "nvidia-ml-py is too old for this value", "update nvidia-ml-py"
        )
    return Unavailable("failed", f"NVML: {error}")
