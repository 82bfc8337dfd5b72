"""Who a process is, from what the launchers of the field leave in its environment."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from clusterprof.agent.launch import identity
from clusterprof.agent.linux.files import Roots

TORCHRUN = {
    "RANK": "11",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "8",
}
HYDRA = {"PMI_RANK": "4", "PMI_SIZE": "8", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_SIZE": "4"}
PALS = {
    "PALS_APID": "a-1",
    "PALS_RANKID": "9",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "2",
    "PMI_SIZE": "12",
    "PBS_JOBID": "12.server",
}
FLUX = {
    "FLUX_JOB_ID": "ƒAbc",
    "FLUX_TASK_RANK": "8",
    "FLUX_TASK_LOCAL_ID": "0",
    "FLUX_JOB_SIZE": "16",
    "FLUX_JOB_NNODES": "2",
}
JSRUN = {
    "LSB_JOBID": "5",
    "JSM_NAMESPACE_RANK": "7",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_SIZE": "12",
}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2"}
TRAINER_POD = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}
RAY_TRAIN = {
    "RAY_JOB_ID": "02000000",
    "RAY_RAYLET_PID": "99",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
}
DEEPSPEED = {
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "LOCAL_SIZE": "8",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
JAX = {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "a:1"}

# What a process finds -> rank, world, rank on its node, number of its node, restart; its job.
NOTHING = (None, None, None, None, None)
PLACES = {
    "nothing": ({}, NOTHING, None),
    "torchrun": ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "exp-1"}, (11, 16, 3, 1, 0), "exp-1"),
    "torchrun, unnamed": (TORCHRUN, (11, 16, 3, 1, 0), "launch-42"),
    "torchrun, second try": (
        {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"},
        (11, 16, 3, 1, 1),
        "launch-42",
    ),
    "srun": (SRUN, (5, 8, 1, 1, None), "77.2"),
    "sbatch": ({"SLURM_JOB_ID": "77"}, NOTHING, "77"),
    "srun, requeued once": (
        {**SRUN, "SLURM_RESTART_COUNT": "1"},
        (5, 8, 1, 1, None),
        "77.2-restart1",
    ),
    "srun, never requeued": ({**SRUN, "SLURM_RESTART_COUNT": "0"}, (5, 8, 1, 1, None), "77.2"),
    # srun starts one torchrun per node: Slurm's rank is the node, RANK is the rank.
    "srun torchrun": ({**SRUN, **TORCHRUN}, (11, 16, 3, 1, 0), "77.2"),
    "mpirun": (OPENMPI, (6, 8, 2, None, None), "launch-42"),
    "mpirun with PMIx": (
        {**OPENMPI, "PMIX_RANK": "6", "PMIX_NAMESPACE": "prterun-a-7@1"},
        (6, 8, 2, None, None),
        "prterun-a-7_1",
    ),
    "mpirun in Slurm": ({**SRUN, **OPENMPI}, (6, 8, 2, 1, None), "77.2"),
    "MPICH": (HYDRA, (4, 8, 0, None, None), "launch-42"),
    "MVAPICH": (MVAPICH, (3, 4, 1, None, None), "launch-42"),
    "PALS": (PALS, (9, 12, 1, 2, None), "12.server"),
    "PALS with PMI": (
        {**PALS, "PMI_RANK": "9", "PMI_LOCAL_RANK": "1"},
        (9, 12, 1, 2, None),
        "12.server",
    ),
    "Flux": (FLUX, (8, 16, 0, None, None), "_Abc"),
    "Flux in Slurm": ({**SRUN, **FLUX}, (8, 16, 0, 1, None), "_Abc"),
    "jsrun": (JSRUN, (7, 12, 1, None, None), "5"),
    "Indexed Job": (INDEXED_JOB, (2, None, None, 2, None), "train"),
    "Indexed Job, host named otherwise": (
        {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "node12"},
        (2, None, None, 2, None),
        None,
    ),
    "JobSet, started anew": (
        {**INDEXED_JOB, "JOBSET_NAME": "js", "JOBSET_RESTART_ATTEMPT": "2"},
        (2, None, None, 2, None),
        "js-restart2",
    ),
    "Job, named by the downward API": (
        {**INDEXED_JOB, "K8S_JOB_NAME": "train", "K8S_JOB_UID": "0a1b2c3d-4e5f-4a6b"},
        (2, None, None, 2, None),
        "train-0a1b2c3d",
    ),
    "JobSet with its uid, started anew": (
        {"JOBSET_NAME": "js", "K8S_JOB_UID": "0a1b2c3d-4e5f", "JOBSET_RESTART_ATTEMPT": "1"},
        NOTHING,
        "js-0a1b2c3d-restart1",
    ),
    "the batch script of Slurm": (
        {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"},
        (0, None, None, None, None),
        "77",
    ),
    "torchrun in an Indexed Job": ({**INDEXED_JOB, **TORCHRUN}, (11, 16, 3, 1, 0), "train"),
    "Kubeflow, before torchrun": (TRAINER_POD, (None, None, None, 1, None), None),
    "Kubeflow, with a run id": (
        {**TRAINER_POD, "PET_RDZV_ID": "tj"},
        (None, None, None, 1, None),
        "tj",
    ),
    "Ray Train": (RAY_TRAIN, (3, 4, 1, 1, None), "02000000"),
    "Ray Train in Slurm": ({**SRUN, **RAY_TRAIN}, (3, 4, 1, 1, None), "02000000"),
    "DeepSpeed": (DEEPSPEED, (9, 16, 1, 1, None), "launch-42"),
    "JAX": (JAX, (1, 4, None, None, None), None),
    "an empty rank": (
        {"RANK": "", "OMPI_COMM_WORLD_RANK": "1"},
        (1, None, None, None, None),
        "launch-42",
    ),
    "a negative rank": ({"RANK": "-1"}, NOTHING, "launch-42"),
    "a digit that is none": ({"RANK": "³"}, NOTHING, "launch-42"),
    "a job that is a path": ({"SLURM_JOB_ID": "../../etc"}, NOTHING, "_.._etc"),
}


@pytest.mark.parametrize("name", PLACES)
def test_rank_and_job_are_read_from_the_environment(name: str) -> None:
    environ, place, job = PLACES[name]
    variables = identity.select_launcher_variables(environ)
    names = ("rank", "world_size", "node_local_rank", "node_number", "restart")
    made_up = job is None or job == "launch-42"
    # A pod's host name is no launcher's variable, and not kept.
    by_pod = "HOSTNAME" in environ and not {"JOBSET_NAME", "K8S_JOB_NAME"} & set(environ)
    assert identity.resolve_placement(variables) == {
        **dict(zip(names, place, strict=True)),
        "job": None if made_up or by_pod else job,
    }
    assert identity.find_launcher_job(environ, 42) == job
    assert identity.find_job_name(environ) == (None if made_up else job)
    assert job is None or identity.is_job_name(job) is not made_up
    assert identity.find_global_rank(variables) == place[0]
    assert identity.find_node_local_rank(variables) == place[2]
    assert variables == {k: v for k, v in environ.items() if k != "HOSTNAME"}  # all are kept


@pytest.mark.parametrize(
    ("command", "job"),
    [
        ("torchrun --nnodes 2 --rdzv-id exp-1 train.py", "exp-1"),
        ("/opt/venv/bin/torchrun --rdzv_id=exp/2 train.py", "exp_2"),
        ("python -m torch.distributed.run --rdzv-id=3 train.py", "3"),
        ("accelerate launch --rdzv_id 4 train.py", "4"),
        ("torchrun --rdzv-id none train.py", None),
        ("torchrun --rdzv-id", None),
        ("torchrun --standalone train.py", None),
        ("python train.py --rdzv-id 5", None),
    ],
)
def test_the_run_id_on_a_command_line_names_the_job(command: str, job: str | None) -> None:
    assert identity.find_command_job(command.split()) == job


def test_only_launcher_variables_are_kept_and_shortened() -> None:
    environ = {"RANK": "1" * 1000, "PATH": "/bin", "AWS_SECRET": "x", "SLURM_JOB_ID": "7"}
    assert identity.select_launcher_variables(environ) == {"RANK": "1" * 256, "SLURM_JOB_ID": "7"}


def test_start_time_is_parsed_despite_parentheses_in_the_process_name(tmp_path: Path) -> None:
    folder = tmp_path / "5"
    folder.mkdir()
    fields = " ".join(str(n) for n in range(4, 53))  # field 4 is 4 … field 22 is 22
    (folder / "stat").write_text(f"5 (a) S 1 (b) R {fields}\n")
    assert identity.read_start_ticks(str(tmp_path), 5) == 22
    assert identity.read_start_ticks(str(tmp_path), 6) is None
    (folder / "stat").write_text("5 (cut")
    assert identity.read_start_ticks(str(tmp_path), 5) is None


def test_the_start_time_of_this_process_equals_proc_stat() -> None:
    text = Path("/proc/self/stat").read_text()
    assert identity.read_start_ticks("/proc", os.getpid()) == int(
        text.rpartition(") ")[2].split()[19]
    )


def test_the_node_key_names_host_boot_start_and_recorder(tmp_path: Path) -> None:
    folder = tmp_path / "sys/kernel/random"
    folder.mkdir(parents=True)
    (folder / "boot_id").write_text("471a98e8-78cb-4b83-984a-61997ed367ae\n")
    roots = Roots(proc=tmp_path)
    # 1,700,000,000 s after the epoch: 2023-11-14 22:13:20 UTC, and 7 ms
    key = identity.build_node_key(roots, 1_700_000_000_007_999_999)
    host = identity.get_hostname()
    assert key.startswith(host[:4])
    # Another recorder of this node may start in the same millisecond: it has another pid.
    assert key.endswith(f"-471a98e8-20231114T221320.007-{os.getpid()}")
    assert identity.read_short_boot_id(Roots(proc=tmp_path / "nothing")) == "00000000"


def test_the_display_name_comes_from_the_resource_manager() -> None:
    assert identity.get_display_name({"SLURMD_NODENAME": "gpu-17"}) == "gpu-17"
    assert identity.get_display_name({}) == os.uname().nodename


def test_a_generated_name_is_not_a_job_name() -> None:
    assert not identity.is_job_name(identity.make_job_name())
    assert not identity.is_job_name("4711-5670570812988")  # of earlier versions
    assert not identity.is_job_name("launch-4711")
    assert not identity.is_job_name("")
    assert identity.is_job_name("4711")  # a resource manager's number


SCRIPTS = {
    "python -u train.py --lr 1": "train",
    "torchrun --nproc-per-node 2 src/train_c.py data.py": "train_c",
    "python -m torch.distributed.run --nproc-per-node 2 train.py": "train",
    "python -m mypkg.train --lr 1": "train",
    "bash run.sh": "bash",
    "/opt/app/sleep 3": "sleep",
}


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_run_is_named_after_its_script(command: str) -> None:
    assert identity.find_script_name(command.split()) == SCRIPTS[command]


def test_a_generated_name_has_script_and_time_and_is_unique() -> None:
    before = time.strftime("%Y%m%d-%H%M%S")
    names = [identity.make_job_name("my train") for _ in range(3)]
    after = time.strftime("%Y%m%d-%H%M%S")
    for name in names:
        what, _, when = name.partition("@")
        assert what == "my_train" and before <= when[:15] <= after
        assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", when)
    assert len(set(names)) > 1
