"""What to do where an imported trace shows that data were late, and not why."""

from __future__ import annotations

from clusterprof.remedies.base import Filled, Mend, Rule
from clusterprof.remedies.commands import run
from clusterprof.remedies.scene import Scene

_PLUMBER = "up to 47x for pipelines that were set up wrongly (Plumber, MLSys 2022)"


def _loads_itself(scene: Scene) -> bool:
    workers = scene.number("loader.workers_count")
    return workers is not None and workers.value == 0


def _workers(scene: Scene) -> Filled:
    return Filled(
        run("DataLoader(num_workers=4, persistent_workers=True)")
        + " in the place of num_workers=0",
        ("the training process loads its batches itself, between steps",),
    )


def _record(scene: Scene) -> Filled:
    return Filled(
        f"{run('clusterprof record -- COMMAND')} for a minute: it shares the same wait out among"
        " disks, servers, CPUs and the loader's set-up",
        ("a profiler's trace marks the wait and shows nothing of what the loader did",),
    )


REMEDIES = (
    Mend(
        "load-in-workers", ("input-wait",), "Load batches in workers beside the training process",
        "DataLoader(num_workers=N)", _workers, seen=("loader.workers_count",), published=_PLUMBER,
        moves="the wait for data falls",
        worse="each worker needs memory for its copy of the data set and the batches it holds",
        unless=(Rule("has-workers", "the loader has workers, or it is not known whether",
                     lambda s: not _loads_itself(s)),),
        effort="setting",
    ),
    Mend(
        "record-the-loader", ("input-wait",), "Learn what the loader waits for",
        "record with clusterprof: threads, disks and connections tell", _record,
        seen=("input.unseen_ratio",), moves="the wait has a cause", diagnose=True, place="job",
        effort="setting",
    ),
)  # fmt: skip
