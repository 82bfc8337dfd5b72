"""`doctor --job`: what a job finds on a fixture node, against what its README says is there.

CLUSTERPROF_ACCEPT_GOLDEN=1 writes tests/hosts/slurm-job/doctor-job.txt anew.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.doctor.affinity import find_affinity_changes, format_cpus, parse_cpus
from clusterprof.agent.doctor.devices import list_visible_devices
from clusterprof.agent.doctor.environment import find_job_context
from clusterprof.agent.doctor.job import JobEnvironment, check_job_environment
from clusterprof.agent.doctor.network import is_chosen, run_with_timeout
from clusterprof.agent.launch import identity
from clusterprof.agent.linux.files import Roots
from clusterprof.cli.doctor import format_job
from clusterprof.signals import BY_NAME

HOSTS = Path(__file__).parents[2] / "hosts"

DOCTOR, SLURMSTEPD = 4790, 4650


class TwoGpus:
    """Two GPUs as NVML describes them, at the places that the fixture's processes have."""

    name: ClassVar[str] = "gpu_nvidia"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000
    numa: ClassVar[tuple[int, int]] = (0, 1)

    def __init__(self, context: Context) -> None:
        self.pids = context.job_pids()

    def open(self) -> Any:
        return [(BY_NAME["gpu.power_watts"], id_) for id_ in ("GPU-aa00", "GPU-bb11")]

    def sample(self) -> Any:
        return [311.0, 97.5]

    def inventory(self) -> list[dict[str, Any]]:
        name = "NVIDIA H100 80GB HBM3"
        return [
            {"id": "GPU-aa00", "name": name, "index": 0, "numa_node": self.numa[0]},
            {"id": "GPU-bb11", "name": name, "index": 1, "numa_node": self.numa[1]},
        ]

    def close(self) -> None:
        pass


class Crossed(TwoGpus):
    """The same, with the second GPU at the node of the first."""

    numa = (0, 0)


class SeenCrosswise(TwoGpus):
    """The worker of rank 0 (4720) was seen on the second GPU."""

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        return [("device-used", {"pid": 4720, "device": "GPU-bb11"})]


def environment(roots: Roots, pid: int) -> dict[str, str]:
    words = (roots.proc / f"{pid}/environ").read_text().split("\0")
    return dict(word.split("=", 1) for word in words if word) | {"XDG_RUNTIME_DIR": "/nowhere"}


def around(roots: Roots, kind: type = TwoGpus, **more: str) -> JobEnvironment:
    environ = {**environment(roots, DOCTOR), "TMPDIR": "/tmp", **more}
    data = ["/data/imagenet"]
    return check_job_environment(
        [kind], environ, "/scratch/ada/run", data, (DOCTOR, SLURMSTEPD), roots
    )


def test_the_job_report_matches_the_golden_file(host: Callable[[str], Roots]) -> None:
    text = format_job(around(host("slurm-job"), NCCL_IB_HCA="mlx5_1"))
    assert max(map(len, text.splitlines())) <= 80
    path = HOSTS / "slurm-job/doctor-job.txt"
    if os.environ.get("CLUSTERPROF_ACCEPT_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_each_rank_of_the_job_is_listed_once_with_devices(host: Callable[[str], Roots]) -> None:
    result = around(host("slurm-job"))
    document = result.document()
    assert document["job"] == {
        "launchers": ["Slurm"],
        "name": "812.1",
        "rank": None,
        "world_size": None,
        "node_local_rank": None,
        "node_number": None,
        "node": "gpu017",
        "allocation_only": False,
    }
    # 4710 is the shell of 4711 and the parent of its worker; 4700 the batch script; 4800 another's
    assert [
        (process["pid"], process["rank"], process["here"]) for process in document["processes"]
    ] == [(4710, 0, False), (4712, 1, False)]
    assert [
        (device["id"], device["visible"], device["users"]) for device in document["devices"]
    ] == [
        ("GPU-aa00", True, [{"pid": 4710, "rank": 0, "how": "by its local rank", "here": False}]),
        ("GPU-bb11", True, [{"pid": 4712, "rank": 1, "how": "by its local rank", "here": False}]),
    ]


def test_observed_device_use_overrides_the_local_rank(host: Callable[[str], Roots]) -> None:
    result = around(host("slurm-job"), SeenCrosswise)
    users = {
        device["id"]: [(u["rank"], u["how"]) for u in device["users"]] for device in result.devices
    }
    assert users == {"GPU-aa00": [], "GPU-bb11": [(0, "seen using it"), (1, "by its local rank")]}
    (shared,) = [change for change in result.changes if "share" in change.message]
    assert shared.message == "ranks 0, 1 share GPU-bb11: they wait for each other's kernels"


def test_cores_and_quota_are_divided_among_ranks(host: Callable[[str], Roots]) -> None:
    affinity = around(host("slurm-job")).affinity
    # CPUs 0, 8 and 1, 9 are threads of two cores; 3 CPUs of quota are 1.5 for each of two ranks,
    # and its main thread needs one.
    assert affinity == {
        "cpus_online": "0-15",
        "cpus_online_count": 16,
        "cpus_allowed": "0-1,8-9",
        "cpus_allowed_count": 4,
        "cores_count": 2,
        "numa_nodes": [0],
        "numa_nodes_online": [0, 1],
        "quota_cpus": 3.0,
        "ranks_sharing": 1,
        "ranks_count": 2,
        "workers_count": 0,
        "worker_threads_count": 0,
        "bound": True,
        "ranks": [
            {"pid": 4710, "rank": 0, "cpus_allowed": "0-1,8-9", "numa_nodes": [0]},
            {"pid": 4712, "rank": 1, "cpus_allowed": "4-5,12-13", "numa_nodes": [1]},
        ],
    }


def test_a_device_at_another_numa_node_than_its_rank_is_reported(
    host: Callable[[str], Roots],
) -> None:
    selected = [
        change for change in around(host("slurm-job"), Crossed).changes if "NUMA" in change.message
    ]
    assert [(change.message, change.owner) for change in selected] == [
        ("GPU-bb11 of rank 1: the device is at another NUMA node than the rank's CPUs", "job")
    ]
    assert not [o for o in around(host("slurm-job")).changes if "NUMA" in o.message]


def test_files_list_type_server_and_options_without_client_addresses(
    host: Callable[[str], Roots],
) -> None:
    files = {file["what"]: file for file in around(host("slurm-job")).files}
    home = environment(host("slurm-job"), DOCTOR)["HOME"]
    assert files["HOME"] == {
        "what": "HOME",
        "path": home,
        "point": home,
        "type": "nfs4",
        "server": "nas1",
        "source": f"nas1:{home}",
        "options": ["vers=4.2", "rsize=1048576", "wsize=1048576", "hard", "proto=tcp"],
    }
    assert files["shared memory"]["size_bytes"] == 64 << 20
    assert files["working folder"]["server"] == "10.1.0.5@o2ib:10.1.0.6@o2ib"
    assert files["data"]["options"][-1] == "proto=rdma"
    assert "clientaddr" not in str(files) and "addr=" not in str(files)


def test_each_finding_names_an_owner_and_a_remedy(host: Callable[[str], Roots]) -> None:
    changes = around(host("slurm-job"), NCCL_SOCKET_IFNAME="=eth7", NCCL_IB_DISABLE="1").changes
    owners = [change.owner for change in changes]
    assert owners == sorted(owners, key=["you", "job", "cluster admin"].index)
    assert all(change.message and change.remedy for change in changes)
    by_key = {change.message.split(" ")[0]: change.owner for change in changes}
    assert by_key["NCCL_SOCKET_IFNAME==eth7"] == by_key["NCCL_IB_DISABLE=1"] == "you"
    assert by_key["kernel.dmesg_restrict"] == by_key["RmProfilingAdminOnly"] == "cluster admin"
    assert by_key["hidepid"] == "cluster admin"


def test_the_batch_script_has_an_allocation_but_no_rank(host: Callable[[str], Roots]) -> None:
    roots = host("slurm-job")
    place = find_job_context(roots, environment(roots, 4700), 4700, 1)
    assert place.allocation_only and place.facts["rank"] is None
    assert [process.pid for process in place.processes] == [4710, 4712]
    rank = find_job_context(roots, environment(roots, 4712), 4712, SLURMSTEPD)
    assert (rank.facts["rank"], rank.allocation_only) == (1, False)
    assert [(process.pid, process.here) for process in rank.processes] == [
        (4710, False),
        (4712, True),
    ]


def test_registered_processes_belong_to_the_job(
    host: Callable[[str], Roots], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = host("slurm-job")
    monkeypatch.setattr("clusterprof.agent.doctor.environment.choose_base", lambda e: tmp_path)
    run_dir = tmp_path / f"clusterprof-{os.geteuid()}-{identity.read_short_boot_id(roots)}-812.0"
    (run_dir / "register").mkdir(parents=True)
    for pid, ticks, device in ((4711, 47110, "GPU-bb11"), (4712, 1, "GPU-aa00")):
        (run_dir / f"register/{pid}.json").write_text(
            f'{{"pid": {pid}, "started_ticks": {ticks}, "device": "{device}", "variables": {{}}}}'
        )
    result = around(roots)
    assert result.place.from_recorder and result.place.run_dir == run_dir
    assert result.place.facts["rank"] is None  # doctor's step has one, and it is none of the job's
    assert [process.pid for process in result.place.processes] == [
        4711
    ]  # 4712 is not that process any more
    assert [device["users"] for device in result.devices] == [
        [],
        [{"pid": 4711, "rank": 0, "how": "said so", "here": False}],
    ]


def test_a_node_without_a_job_reports_no_job(host: Callable[[str], Roots]) -> None:
    result = check_job_environment([], {}, "/", [], (1, 0), host("vm-two-cores"))
    assert (result.place.launchers, result.place.job, result.place.processes) == ((), "", ())
    assert "cpus_allowed_count" not in result.affinity  # the fixture has no status of a process
    unknown = {setting["name"] for setting in result.settings if setting["enough"] is None}
    assert {"kernel.dmesg_restrict", "kernel.task_delayacct"} <= unknown
    assert not [
        change for change in result.changes if change.about in ("kernel", "affinity", "devices")
    ]
    assert "outside a job" in format_job(result)


IDS = ["GPU-8932f937-d72c", "GPU-8932ffff-0000", "GPU-11111111-2222"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, IDS),
        ("2,0", [IDS[2], IDS[0]]),
        ("GPU-1111", [IDS[2]]),
        ("GPU-8932f9,1", IDS[:2]),
        ("GPU-8932,0", []),  # two begin so: it is none, and ends the list
        ("1,-1,0", [IDS[1]]),
        ("0,3,1", [IDS[0]]),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_selects_and_orders_gpus(
    words: str | None, expected: list[str]
) -> None:
    chosen = {} if words is None else {"CUDA_VISIBLE_DEVICES": words}
    assert list_visible_devices("gpu_nvidia", [{"id": id_} for id_ in IDS], chosen) == expected


def test_visibility_variables_of_other_vendors_are_parsed() -> None:
    four = [{"id": f"d{index}"} for index in range(4)]
    of_rocr = {"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}
    assert list_visible_devices("gpu_amd", four, of_rocr) == ["d1"]
    assert list_visible_devices("gpu_intel", four, {"ZE_AFFINITY_MASK": "2.0,2.1,0"}) == [
        "d2",
        "d0",
    ]
    assert list_visible_devices("gpu_neuron", four, {"NEURON_RT_VISIBLE_CORES": "0-1,3"}) == [
        "d0",
        "d1",
        "d3",
    ]
    assert list_visible_devices("gpu_gaudi", four, {"CUDA_VISIBLE_DEVICES": "0"}) == [
        "d0",
        "d1",
        "d2",
        "d3",
    ]


@pytest.mark.parametrize(
    ("name", "words", "chosen"),
    [
        ("mlx5_1:1", None, None),
        ("mlx5_1:1", "mlx5", True),
        ("mlx5_10:1", "mlx5_1", True),  # a beginning of a name
        ("mlx5_10:1", "=mlx5_1", False),
        ("mlx5_1:2", "=mlx5_1:1", False),
        ("eth0", "^docker,eth", False),
        ("ib0", "^docker,eth", True),
    ],
)
def test_nccl_interface_lists_are_parsed_as_nccl_does(
    name: str, words: str | None, chosen: bool | None
) -> None:
    assert is_chosen(name, words) is chosen


def test_cpu_lists_are_parsed_and_formatted() -> None:
    assert parse_cpus("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert format_cpus({0, 1, 2, 8, 10, 11}) == "0-2,8,10-11"
    for wrong in ("", "a-b", "3-", "0-99999999"):
        assert parse_cpus(wrong) == set()


@pytest.mark.parametrize(
    ("launcher", "word"), [("Slurm", "--cpus-per-task"), ("Open MPI", "--bind-to none")]
)
def test_the_remedy_for_a_single_core_names_the_launcher(launcher: str, word: str) -> None:
    pinned = {
        "cpus_allowed": "5",
        "cpus_allowed_count": 1,
        "cpus_online_count": 64,
        "cores_count": 1,
        "ranks_sharing": 1,
        "ranks_count": 1,
        "workers_count": 0,
        "ranks": [],
        "omp_num_threads": 4,
    }
    few, turns = find_affinity_changes(pinned, [], [launcher])
    assert few.message == "a rank has 1 CPU of the node's 64: no core for dataloader workers"
    assert word in few.remedy and few.owner == "job"
    assert turns.remedy == "set OMP_NUM_THREADS=1 or less" and turns.owner == "you"
    assert asdict(few)["about"] == "affinity"


def test_doctor_does_not_wait_for_a_dead_file_server() -> None:
    never = threading.Event()
    assert run_with_timeout(0.05, never.wait) is None
    never.set()
    assert run_with_timeout(5.0, lambda: 7) == 7
