"""One training job over all nodes, the same command on each, recorded or not, and its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof_lab.real.node import Node

SCRIPT = Path(__file__).parent / "scripts" / "train_ddp.py"
PORT = 29400
_LEFT_BY_LAUNCHERS = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_", "PET_", "CLUSTERPROF_")
_ENOUGH_S = 120.0
_RECORDER_ENDS_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class NodeOutput:
    """What the command of one node left on stdout and stderr."""

    node: Node
    exit_code: int
    stdout: str
    stderr: str

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """The stopwatches of the node's ranks, by rank."""
        lines = [json.loads(line) for line in self.stdout.splitlines()]
        return sorted(lines, key=lambda line: int(line["rank"]))


def make_environment() -> dict[str, str]:
    """Return an environment as a login would have it on a node, one thread per process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LEFT_BY_LAUNCHERS)}
    return {**kept, "OMP_NUM_THREADS": "1"}


def run_job(
    nodes: Sequence[Node],
    per_node: int,
    options: Sequence[Sequence[str]],
    out: Path | None,
    run_id: str,
) -> list[NodeOutput]:
    """Run torchrun on every node, meeting at the first; return what each node said.

    `options`: of the script, node by node. `out`: the recording's folder, None = not recorded.
    Raises when a node does not end in time or ends with an error.
    """
    record = [] if out is None else ["-m", "clusterprof", "record", "-o", str(out), "--"]
    torchrun = [
        *([sys.executable] if record else []),
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(nodes)}",
        f"--nproc-per-node={per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={nodes[0].name}:{PORT}",
        f"--rdzv-id={run_id}",
        str(SCRIPT),
    ]
    runs = []
    for node, own in zip(nodes, options, strict=True):
        command = [sys.executable, *record, *torchrun, *own]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        runs.append(node.start(*command, folder=Path.cwd(), env=make_environment(), **pipes))
    end = time.monotonic() + _ENOUGH_S
    outputs = []
    for node, run in zip(nodes, runs):
        stdout, stderr = run.communicate(timeout=max(1.0, end - time.monotonic()))
        outputs.append(NodeOutput(node, run.returncode, stdout, stderr))
    for output in outputs:
        if output.exit_code:
            raise RuntimeError(
                f"{output.node.name} exited with {output.exit_code}: {output.stderr[-2000:]}"
            )
    for node in nodes:
        wait_for_recorder(node)
    return outputs


def wait_for_recorder(node: Node) -> None:
    """Wait until a node's recorder is done: then it takes its run directory away."""
    end = time.monotonic() + _RECORDER_ENDS_WITHIN_S
    while any((node.root / "dev/shm").glob("clusterprof-*")):
        if time.monotonic() > end:
            raise RuntimeError(f"the recorder of {node.name} does not end")
        time.sleep(0.05)
