"""Where the Neuron tools are, and whether there can be a Neuron device at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from clusterprof.errors import Unavailable
from clusterprof.linux.programs import find

MONITOR, LS = "neuron-monitor", "neuron-ls"
FOLDER = "/opt/aws/neuron/bin"
INSTALL = "install aws-neuronx-tools"
_SIGNS = ("/dev/neuron0", "/sys/module/neuron")


def tool(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of a tool: on PATH, else where its package puts it."""
    return find(name, environ, f"{FOLDER}/{name}")


def why_absent(environ: Mapping[str, str], signs: Sequence[str] = _SIGNS) -> Unavailable | None:
    """Say why this node has no Neuron device to be asked; None when it may have one."""
    if tool(MONITOR, environ):
        return None
    if any(os.path.exists(path) for path in signs):
        return Unavailable("absent", "neuron-monitor was not found", INSTALL)
    return Unavailable(
        "absent", "no Neuron device: neither its driver nor neuron-monitor was found"
    )
