"""Dumps of the flight recorder: what was found, who was stuck, and what must never be run."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from clusterprof.analysis.importers.nccl.flight_recorder import (
    Dump,
    Entry,
    describe_stuck_ranks,
    find_waiting_ranks,
    parse_dump,
    read_dump,
)
from clusterprof.analysis.importers.nccl.inspector import Operation, parse_operation
from clusterprof.analysis.inputs.profiler_traces import describe_dumps, read_dumps
from clusterprof.errors import Unavailable

SECOND = 1_000_000_000


def entry(number: int, state: str, created_s: int, **more: object) -> dict:
    """One entry with the fields of version 2.10."""
    completed = (created_s + 1) * SECOND if state == "completed" else None
    return {
        "frames": [],
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": created_s * SECOND,
        "time_discovered_started_ns": None if state == "scheduled" else created_s * SECOND + 5,
        "time_discovered_completed_ns": completed,
        "input_sizes": [[10]],
        "state": state,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
        **more,
    }


def content(*entries: dict, ranks: object = "[0, 1, 2]") -> dict:
    """A dump of a job of three ranks."""
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {"0": {"last_enqueued_collective": 8, "last_completed_collective": 7}},
        "entries": list(entries),
    }


WORLD = (0, 1, 2)
DONE = Entry("0", 7, "nccl:all_reduce", False, 3 * SECOND, 3 * SECOND + 5, 4 * SECOND, True)
BEGUN = Entry("0", 8, "nccl:all_reduce", False, 5 * SECOND, 5 * SECOND + 5, None, False)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_dumps_of_every_protocol_are_read(protocol: int) -> None:
    data = pickle.dumps(content(entry(7, "completed", 3), entry(8, "started", 5)), protocol)
    assert parse_dump(data, 1, 9 * SECOND) == Dump(
        1,
        9 * SECOND,
        "2.10",
        {"0": WORLD},
        {"0": 7},
        (DONE, BEGUN),
        descriptions={"0": "default_pg"},
        enqueued={"0": 8},
    )


def test_a_json_dump_gives_the_same_entries() -> None:
    data = json.dumps(content(entry(7, "completed", 3), entry(8, "started", 5))).encode()
    data = data.replace(b"null", b"0")  # as its writer puts times that nobody took
    assert parse_dump(data, 1, 0).entries == (DONE, BEGUN)


class Runs:
    """Writes a file when it is unpickled by an unsafe reader."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


def test_reading_a_pickle_executes_no_code(tmp_path: Path) -> None:
    victim = tmp_path / "made"
    dump = tmp_path / "nccl_trace_rank_0"
    dump.write_bytes(pickle.dumps(content(entry(8, "started", 5, frames=Runs(str(victim))))))
    with pytest.raises(Unavailable, match=r"nccl_trace_rank_0.*posix\.mkdir"):
        read_dump(dump)
    assert not victim.exists()
    pickle.loads(dump.read_bytes())  # noqa: S301 - pickle itself does run what it names
    assert victim.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02",
        b"{",
        b"[]",
        b"\x80\x04]\x94.",
        pickle.dumps({"entries": 3}),
        b"\xff" * 99,
        b"}r\xff\xff\xff\x7f.",
        pickle.dumps({"entries": [5]}),
        pickle.dumps(content(ranks="no list")),
        pickle.dumps(content(entry(7, "completed", 3)))[:-40],
        b"(" * 9,
        b"0.",
        b"\x80\x04h\x05.",
        b"\x8e" + b"\xff" * 7 + b"\x7f" + b".",
    ],
)
def test_an_invalid_dump_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    dump = tmp_path / "trace_0"
    dump.write_bytes(data)
    with pytest.raises(Unavailable, match=r"^trace_0: ") as caught:
        read_dump(dump)
    assert caught.value.kind == "failed"


def test_a_rank_waits_in_its_oldest_unfinished_operation() -> None:
    # Ranks 0 and 1 stand in operation 8, since 4 s; rank 2 has done 7 and never came to 8.
    waiting = content(entry(7, "completed", 3), entry(8, "started", 5), entry(9, "scheduled", 6))
    late = content(entry(7, "completed", 3))
    dumps = [
        parse_dump(pickle.dumps(value), rank, 9 * SECOND)
        for rank, value in enumerate((waiting, waiting, late))
    ]
    assert find_waiting_ranks(dumps) == (0, 1)


def test_point_to_point_messages_are_ignored() -> None:
    send = entry(0, "started", 5, is_p2p=True, profiling_name="nccl:send 0->1")
    assert find_waiting_ranks([parse_dump(pickle.dumps(content(send)), 0, 0)]) == ()
    other = entry(3, "started", 5, process_group=("7", "of unknown members"))
    assert find_waiting_ranks([parse_dump(pickle.dumps(content(send, other)), 0, 0)]) == (0,)


def test_the_report_describes_readable_and_unreadable_dumps(tmp_path: Path) -> None:
    folder = tmp_path / "node-0/nccl"
    folder.mkdir(parents=True)
    for rank, state in enumerate(("started", "started", "completed")):
        (folder / f"trace_{rank}").write_bytes(pickle.dumps(content(entry(8, state, 5))))
    (folder / "trace_5").write_bytes(b"nothing")
    dumps, unread = read_dumps([tmp_path / "node-0", tmp_path / "node-1"])
    first, stuck, second = describe_dumps(dumps, unread)
    assert stuck.startswith("flight recorder: ranks 0, 1 waited in ")
    assert first == (
        "flight recorder of ranks 0-2: ranks 0-1 waited in an operation when it was written"
    )
    assert second.startswith("a flight recorder dump could not be read: trace_5: ")
    assert describe_dumps(dumps[2:], []) == (
        "flight recorder of rank 2: none was stuck when it was written",
    )
    assert describe_dumps([], []) == ()


REAL = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
dist.all_reduce(torch.ones(10)); dist.barrier()
from torch._C import _distributed_c10d as c10d
import json, time
def is_over():  # another thread says so, of each operation and of the group
    state = json.loads(c10d._dump_fr_trace_json())
    completed = [int(group["last_completed_collective"]) for group in state["pg_status"].values()]
    return all(entry["retired"] for entry in state["entries"]) and completed == [2]
while not is_over():
    time.sleep(0.01)
open(sys.argv[2], "wb").write(c10d._dump_fr_trace())
open(sys.argv[3], "wb").write(c10d._dump_fr_trace_json())
"""


@pytest.mark.torch
def test_dumps_of_the_real_recorder_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this PyTorch has no flight recorder without NCCL")
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "GLOO_SOCKET_IFNAME": "lo"}
    paths = [str(tmp_path / name) for name in ("store", "dump_0", "dump_0.json")]
    subprocess.run([sys.executable, "-c", REAL, *paths], env=environ, check=True, timeout=120)
    for path in paths[1:]:
        dump = read_dump(Path(path))
        assert dump.rank == 0
        rows = [(e.number, e.name, e.message, e.done) for e in dump.entries]
        assert rows == [(1, "gloo:all_reduce", False, True), (2, "gloo:barrier", False, True)]
        assert dump.completed == {"0": 2}
        assert find_waiting_ranks([dump]) == ()


def test_inspector_log_lines_give_operation_durations() -> None:
    line = {
        "header": {"id": "0xe6", "rank": 4, "n_ranks": 8, "nnodes": 1},
        "metadata": {"inspector_output_format_version": "v4.0", "pid": 438776},
        "coll_perf": {
            "coll": "ReduceScatter",
            "coll_sn": 1231,
            "coll_msg_size_bytes": 2147483648,
            "coll_exec_time_us": 41057,
            "coll_timing_source": "collective_cpu",
        },
    }
    whole = json.dumps(line).encode()
    assert parse_operation(json.loads(whole)) == Operation(
        "0xe6", 4, 8, 438776, 1231, "ReduceScatter", 2147483648, 41_057_000, False
    )
    for other in ({}, {**line, "coll_perf": {}}):
        with pytest.raises(KeyError):
            parse_operation(other)


def gloo_dump(state: str, *numbers: int) -> bytes:
    """A dump of gloo in PyTorch 2.13: its only group has a name in the operations alone."""
    entries = [
        {
            "collective_seq_id": number,
            "is_p2p": False,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "profiling_name": "gloo:all_reduce",
            "retired": number != numbers[-1] or state == "done",
            "state": "scheduled",
            "time_created_ns": 1795831589660236733,
            "time_discovered_completed_ns": 0,
            "time_discovered_started_ns": 0,
        }
        for number in numbers
    ]
    groups = {"": {"desc": "", "name": "", "ranks": "[0, 1, 2]"}}
    return json.dumps({"entries": entries, "pg_config": groups, "version": "2.10"}).encode()


def test_late_gloo_ranks_and_missing_dumps_are_named() -> None:
    dumps = [
        parse_dump(gloo_dump("waits", 20, 21), 0, 0),
        parse_dump(gloo_dump("done", 19, 20), 1, 0),
    ]
    assert [dump.members for dump in dumps] == 2 * [{"0": (0, 1, 2)}]
    assert find_waiting_ranks(dumps) == (0,)
    assert describe_stuck_ranks(dumps) == [
        "rank 0 waited in gloo:all_reduce 21 of group 0; rank 1 had not reached it (rank 1 had"
        " reached 20): look there first; no dump of rank 2"
    ]
