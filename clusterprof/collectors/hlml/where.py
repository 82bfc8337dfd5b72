"""Whether there can be a Gaudi at all, told without starting anything."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from clusterprof.errors import Unavailable
from clusterprof.linux.programs import find

TOOL = "hl-smi"
INSTALL = "install the Intel Gaudi driver and habanalabs-thunk, or run the container with it"
_SIGNS = ("/sys/module/habanalabs", "/dev/hl0", "/usr/lib/habanalabs/libhlml.so")


def why_absent(environ: Mapping[str, str], signs: Sequence[str] = _SIGNS) -> Unavailable | None:
    """Say why this node has no Gaudi to be asked; None when it may have one."""
    if any(os.path.exists(path) for path in signs) or find(TOOL, environ):
        return None
    return Unavailable("absent", "no Gaudi: neither its driver nor hl-smi was found")
