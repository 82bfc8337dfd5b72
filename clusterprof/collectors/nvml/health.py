"""Links and memory of a GPU: NVLink traffic, states and errors, rows and pages put out of use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clusterprof.collectors.nvml.errors import FATAL, reason_of
from clusterprof.errors import Unavailable

_ALL_LINKS = 0xFFFFFFFF
"""What nvml.h has instead of a link's number where all are meant."""
_KIB = 1024
_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
NO_LINKS = Unavailable("absent", "the GPU has no NVLink")
_LINKS_AT_MOST = 64
_NOT_SUPPORTED, _INVALID = 3, 2


def fields(nvml: Any, handle: Any, wanted: Sequence[tuple[int, int]]) -> list[Any]:
    """Return the values of (field, scope), each a number or `Unavailable`, by one call."""
    found = nvml.nvmlDeviceGetFieldValues(handle, list(wanted))
    return [
        reason_of(int(one.nvmlReturn)) if one.nvmlReturn else _number(one)
        for one in (found[at] for at in range(len(wanted)))
    ]


def nvlink_bytes(nvml: Any, handle: Any) -> tuple[Any, ...]:
    """Bytes of data received and sent since the driver was loaded, all links (fields in KiB)."""
    received = nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
    sent = nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
    found = fields(nvml, handle, ((received, _ALL_LINKS), (sent, _ALL_LINKS)))
    return tuple(one if isinstance(one, Unavailable) else one * _KIB for one in found)


def nvlink_errors(nvml: Any, handle: Any) -> tuple[Any, ...]:
    """Replays, recoveries, and errors of flits and of data together, of all links."""
    replays, recoveries, flits, data = fields(
        nvml,
        handle,
        (
            (nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 0),
            (nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 0),
            (nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 0),
            (nvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, 0),
        ),
    )
    damaged = flits if isinstance(flits, Unavailable) else data
    if not isinstance(damaged, Unavailable):
        damaged = flits + data
    return (replays, recoveries, damaged)


def nvlinks(nvml: Any, handle: Any) -> list[bool]:
    """Return for each NVLink of the GPU whether it is up; raises Unavailable where it has none."""
    states: list[bool] = []
    try:
        while len(states) < _LINKS_AT_MOST:
            states.append(bool(nvml.nvmlDeviceGetNvLinkState(handle, len(states))))
    except nvml.NVMLError as error:
        if error.value in FATAL or error.value not in (_NOT_SUPPORTED, _INVALID):
            raise
    if not states:
        raise NO_LINKS.with_traceback(None)
    return states


def remapped_rows(nvml: Any, handle: Any) -> tuple[int, ...]:
    """Rows remapped for corrected and uncorrected errors; whether one is pending, or failed."""
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return (corrected, uncorrected, int(bool(pending)), int(bool(failed)))


def retired_pages(nvml: Any, handle: Any) -> tuple[int, ...]:
    """Pages retired for repeated single-bit errors and for double-bit errors; whether any waits."""
    causes = (
        nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    pages = sum(len(nvml.nvmlDeviceGetRetiredPages(handle, cause)) for cause in causes)
    return (pages, int(bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))))


def _number(found: Any) -> int | float:
    kind = int(found.valueType)
    if not 0 <= kind < len(_TYPES):
        raise ValueError(f"a value of the unknown type {kind}")
    value: int | float = getattr(found.value, _TYPES[kind])
    return value
