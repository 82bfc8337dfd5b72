"""Who a process is, from what the launchers of the field leave in its environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterprof.linux.roots import Roots
from clusterprof.recorder import identity

TORCHRUN = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "GROUP_RANK": "1"}
SRUN = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
HYDRA = {"PMI_RANK": "4", "MPI_LOCALRANKID": "0"}
PALS = {"PALS_RANKID": "9", "PALS_LOCAL_RANKID": "1", "PBS_JOBID": "12.server"}
FLUX = {"FLUX_TASK_RANK": "8", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_ID": "ƒAbc"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "2"}


@pytest.mark.parametrize(
    ("environ", "rank", "local", "job"),
    [
        ({}, None, None, None),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "exp-1"}, 11, 3, "exp-1"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, 11, 3, "launch-42"),
        (SRUN, 5, 1, "77.2"),
        ({"SLURM_JOB_ID": "77"}, None, None, "77"),
        # srun starts one torchrun per node: Slurm's rank is the node, RANK is the rank
        ({**SRUN, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, 11, 3, "77.2"),
        (OPENMPI, 6, 2, "launch-42"),
        (HYDRA, 4, 0, "launch-42"),
        (PALS, 9, 1, "12.server"),
        (FLUX, 8, 0, "_Abc"),
        (INDEXED_JOB, 2, None, None),
        ({"RANK": "", "OMPI_COMM_WORLD_RANK": "1"}, 1, None, "launch-42"),
        ({"RANK": "-1"}, None, None, "launch-42"),
        ({"RANK": "³"}, None, None, "launch-42"),
        ({"SLURM_JOB_ID": "../../etc"}, None, None, "_.._etc"),
    ],
)
def test_rank_and_job(
    environ: dict[str, str], rank: int | None, local: int | None, job: str | None
) -> None:
    assert identity.global_rank(environ) == rank
    assert identity.node_local_rank(environ) == local
    assert identity.launcher_job(environ, 42) == job


def test_only_launcher_variables_are_kept_and_none_is_long() -> None:
    environ = {"RANK": "1" * 1000, "PATH": "/bin", "AWS_SECRET": "x", "SLURM_JOB_ID": "7"}
    assert identity.launcher_variables(environ) == {"RANK": "1" * 256, "SLURM_JOB_ID": "7"}


def test_start_time_of_a_process_with_a_name_made_to_confuse(tmp_path: Path) -> None:
    folder = tmp_path / "5"
    folder.mkdir()
    fields = " ".join(str(n) for n in range(4, 53))  # field 4 is 4 … field 22 is 22
    (folder / "stat").write_text(f"5 (a) S 1 (b) R {fields}\n")
    assert identity.started_ticks(str(tmp_path), 5) == 22
    assert identity.started_ticks(str(tmp_path), 6) is None
    (folder / "stat").write_text("5 (cut")
    assert identity.started_ticks(str(tmp_path), 5) is None


def test_our_own_start_time_is_that_of_the_kernel() -> None:
    text = Path("/proc/self/stat").read_text()
    assert identity.started_ticks("/proc", os.getpid()) == int(text.rpartition(") ")[2].split()[19])


def test_the_node_key_names_host_boot_and_start(tmp_path: Path) -> None:
    folder = tmp_path / "sys/kernel/random"
    folder.mkdir(parents=True)
    (folder / "boot_id").write_text("471a98e8-78cb-4b83-984a-61997ed367ae\n")
    roots = Roots(proc=tmp_path)
    # 1,700,000,000 s after the epoch: 2023-11-14 22:13:20 UTC, and 7 ms
    key = identity.node_key(roots, 1_700_000_000_007_999_999)
    host = identity.hostname()
    assert key.startswith(host[:4])
    assert key.endswith("-471a98e8-20231114T221320.007")
    assert identity.boot8(Roots(proc=tmp_path / "nothing")) == "00000000"


def test_a_nodes_display_name_is_what_its_manager_calls_it() -> None:
    assert identity.display_name({"SLURMD_NODENAME": "gpu-17"}) == "gpu-17"
    assert identity.display_name({}) == os.uname().nodename
