"""TPU by the monitoring part of `libtpu`, else by the command `tpu-info`.

https://cloud.google.com/tpu/docs/tpu-monitoring-library,
https://github.com/AI-Hypercomputer/cloud-accelerator-diagnostics (tpu_info). Both ask the process
that has the TPU, on localhost port 8431; without one there are no values. The service there speaks
gRPC, whose library is twice as large as all of ours: it is not asked directly.

This package runs in the helper process: no signals, nothing heavy before `libtpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from clusterprof.collectors.tpu.where import why_absent
from clusterprof.errors import Unavailable

__all__ = ["library", "why_absent"]


def library(mark: Callable[[int, str], None], skip: Collection[int] = ()) -> Any:
    """Open libtpu, else tpu-info; raises Unavailable with the reasons of both."""
    from clusterprof.collectors.tpu import info, sdk  # the recorder needs neither

    try:
        return sdk.Library(mark)
    except Unavailable as of_library:
        try:
            return info.Library()
        except Unavailable as of_tool:
            kind = "failed" if "failed" in (of_library.kind, of_tool.kind) else "absent"
            message = f"{of_library.message}; {of_tool.message}"
            remedy = of_library.remedy or of_tool.remedy
            raise Unavailable(kind, message, remedy) from None  # type: ignore[arg-type]
