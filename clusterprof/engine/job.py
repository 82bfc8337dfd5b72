"""What was recorded of the job: how many of its ranks, on what, and which ranks are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterprof.attribution.ledger import RankBooks
from clusterprof.engine.node import NodeResult
from clusterprof.findings import Blind, JobFacts
from clusterprof.hostlists import fold_numbers

_WORLD_SIZES = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PALS_NRANKS",
    "FLUX_JOB_SIZE",
    "JSM_NAMESPACE_SIZE",
    "SLURM_NTASKS",
)
_JOBS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "FLUX_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_NOT_ASKED = "durations alone were compared"
_REMEDY = "record on every node of the job, and give the folders of all: analyze host1/ host2/"


def job_of(identity: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable that names a rank's job, and the name; ("", "") without one."""
    return next(((key, str(identity[key])) for key in _JOBS if identity.get(key)), ("", ""))


def world_size_of(identity: Mapping[str, str]) -> int | None:
    """Return how many ranks the job of a rank has, as its launcher said; None when it did not."""
    for variable in _WORLD_SIZES:
        if variable == "SLURM_NTASKS" and not identity.get("SLURM_STEP_ID"):
            continue  # the batch script itself, which is no rank of a step
        value = str(identity.get(variable, ""))
        if value.isascii() and value.isdigit():
            return int(value)
    return None


def job_facts(
    nodes: Sequence[NodeResult],
    clock_bound_ns: int | None = None,
    clock_why: str = "",
) -> JobFacts:
    """Return what stands in the header beside the sums."""
    books = [one for node in nodes for one in node.books]
    window_ns = sum(one.ledger.window_ns for one in books)
    seen_ns = window_ns - sum(one.ledger.unmeasured_ns for one in books)
    devices = {_device(node, one) for node in nodes for one in node.books if one.ledger.device}
    sizes = [_world_size(some) for some in _by_job(books).values()]
    known = [size for size in sizes if size is not None]
    return JobFacts(
        world_size=sum(known) if known and len(known) == len(sizes) else None,
        gpus=len(devices),
        coverage_ratio=seen_ns / window_ns if window_ns > 0 else None,
        clock_bound_ns=clock_bound_ns,
        clock_why="" if len(nodes) < 2 or clock_bound_ns is not None else clock_why or _NOT_ASKED,
    )


def _device(node: NodeResult, one: RankBooks) -> tuple[str, str]:
    """Return what tells devices apart: a UUID anywhere, another id on its node."""
    device = one.ledger.device
    return ("" if device.startswith(("GPU-", "MIG-")) else node.facts.key), device


def missing_ranks(books: Sequence[RankBooks]) -> list[Blind]:
    """Say which ranks of a job, by the size that its launcher gave, were not recorded."""
    jobs = _by_job(books)
    out = []
    for (_, name), some in jobs.items():
        size = _world_size(some)
        numbers = {one.ledger.rank for one in some}
        if size is None or None in numbers:
            continue
        missing = sorted(set(range(size)) - numbers)
        if missing:
            whose = f" of job {name}" if len(jobs) > 1 and name else ""
            ranks = "rank" if len(missing) == 1 else "ranks"
            what = f"{ranks} {fold_numbers(missing)} of {size:,}{whose}"
            why = "not recorded: what others waited for them has no cause"
            out.append(Blind(what, "absent", why, _REMEDY))
    return out


def _by_job(books: Sequence[RankBooks]) -> dict[tuple[str, str], list[RankBooks]]:
    jobs: dict[tuple[str, str], list[RankBooks]] = {}
    for one in books:
        jobs.setdefault(job_of(one.identity), []).append(one)
    return jobs


def _world_size(books: Sequence[RankBooks]) -> int | None:
    """The largest that any rank gives; a job that shrank on a restart had that many once."""
    sizes = [world_size_of(one.identity) for one in books]
    return max((size for size in sizes if size is not None), default=None)
