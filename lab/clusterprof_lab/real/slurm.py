"""A private Slurm over the lab's nodes: one controller, one slurmd per node, no munge."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from clusterprof_lab.real.node import Node

_DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
_UP_WITHIN_S = 30.0
_NULL_DEVICE = os.makedev(1, 3)
NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


def find_program(name: str) -> str | None:
    """Return the path of one of Slurm's programs, None for none; Debian's have a suffix."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin"
    return shutil.which(name, path=path) or shutil.which(f"{name}-wlm", path=path)


def check_slurm() -> str:
    """Return what is missing, "" for nothing."""
    missing = [name for name in (*_DAEMONS, "srun", "sinfo") if find_program(name) is None]
    if missing:
        return f"no {', '.join(missing)} here; Debian: apt-get install slurm-wlm"
    return ""


def make_configuration(
    nodes: Sequence[Node], folder: Path, gpus: int = 0, settings: Mapping[str, str] = NO_SETTINGS
) -> str:
    """Return a slurm.conf: users are trusted, without confinement or accounting.

    gpus: of each node; each is another /dev/null. settings: more lines, or other values of those
    here.
    """
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    places = "\n".join(
        f"NodeName={node.name} NodeAddr={node.address} CPUs=2{gres}" for node in nodes
    )
    # Plugins are sought where the programs were installed, which may be elsewhere than compiled in.
    prefix = Path(str(find_program("slurmctld"))).parent.parent
    plugins = "".join(
        f"PluginDir={plugins_folder}\n" for plugins_folder in prefix.glob("lib/*/slurm-wlm")
    )
    lines = f"""ClusterName=lab
SlurmctldHost={nodes[0].name}({nodes[0].address})
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}
SlurmdSpoolDir=/dev/shm/tmp
SlurmctldPidFile=/dev/shm/tmp/slurmctld.pid
SlurmdPidFile=/dev/shm/tmp/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
CommunicationParameters=NoCtldInAddrAny
SlurmdParameters=config_overrides
"""
    values = dict(line.split("=", 1) for line in lines.splitlines())
    if gpus:
        values |= {"GresTypes": "gpu", "SelectType": "select/cons_tres"}
    values |= settings
    text = "".join(f"{name}={value}\n" for name, value in values.items())
    return f"{plugins}{text}{places}\nPartitionName=lab Nodes=ALL Default=YES State=UP\n"


@contextmanager
def run_slurm(
    nodes: Sequence[Node], folder: Path, gpus: int = 0, settings: Mapping[str, str] = NO_SETTINGS
) -> Iterator[dict[str, str]]:
    """Run Slurm over connected nodes; yield the variable by which `srun` finds it.

    gpus, settings: see `make_configuration`. The daemons end with the nodes.
    """
    file = folder / "slurm.conf"
    file.write_text(make_configuration(nodes, folder, gpus, settings))
    if gpus:
        files = [folder / f"gpu{number}" for number in range(gpus)]
        for path in files:
            os.mknod(path, stat.S_IFCHR | 0o666, _NULL_DEVICE)
        lines = [f"Name=gpu File={path}\n" for path in files]
        (folder / "gres.conf").write_text("".join(lines))
    own = {"SLURM_CONF": str(file)}
    env = {**os.environ, **own}
    nodes[0].start(str(find_program("slurmctld")), "-D", env=env)
    for node in nodes:
        step = str(find_program("slurmstepd"))
        node.start(str(find_program("slurmd")), "-D", "-N", node.name, "-d", step, env=env)
    end = time.monotonic() + _UP_WITHIN_S
    idle = ("env", f"SLURM_CONF={file}", str(find_program("sinfo")), "-h", "-t", "idle", "-o", "%D")
    while True:
        try:
            if nodes[0].run(*idle).strip() == str(len(nodes)):
                break
        except RuntimeError:
            pass  # the controller does not answer yet
        if time.monotonic() > end:
            raise RuntimeError(f"Slurm does not come up: see {folder}")
        time.sleep(0.2)
    yield own
