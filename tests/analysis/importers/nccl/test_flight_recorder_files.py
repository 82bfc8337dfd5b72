"""Flight recorder dumps given as files: JSON is read, a pickle is refused; every span by hand."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.node_tables import compute_group_number
from clusterprof.analysis.importers.nccl.flight_recorder import FlightRecorder, find_operation
from clusterprof.analysis.pipeline import analyze
from clusterprof.errors import NoRecording
from clusterprof.probe import layout
from tests.support.import_results import (
    decode_operation,
    import_folder,
    list_groups,
    list_ranks,
    list_spans,
)


def entry(number: int, start: int | None, end: int | None, **more: object) -> dict:
    return {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 50,
        "time_discovered_started_ns": start,
        "time_discovered_completed_ns": end,
        "state": "completed" if end else "started",
        **more,
    }


def dump(folder: Path, rank: int, *entries: dict) -> Path:
    path = folder / f"nccl_trace_rank_{rank}.json"
    reported = {
        "pg_config": {"0": {"name": "0", "ranks": "[0, 1]"}},
        "pg_status": {},
        "version": "2.10",
        "entries": list(entries),
    }
    path.write_text(json.dumps(reported))
    return path


def test_the_rank_missing_from_an_operation_is_named(tmp_path: Path) -> None:
    paths = [
        dump(tmp_path, 0, entry(1, 100, 300), entry(2, 400, 500), entry(3, 600, None)),
        dump(
            tmp_path,
            1,
            entry(1, 250, 300),
            entry(2, 410, 500),
            entry(9, 420, 430, is_p2p=True),
            entry(4, 700, 650),
        ),
    ]
    paths[1].write_text(
        paths[1].read_text().replace('"collective_seq_id": 4', '"collective_seq_id": 2')
    )
    nodes, accounts, why = import_folder(FlightRecorder(), *paths)
    assert why == ""
    group = compute_group_number([0, 1])
    assert [list_ranks(node) for node in nodes] == [{1: (0, 2, "")}, {2: (1, 2, "")}]
    assert [list_groups(node) for node in nodes] == [{group: [0, 1]}] * 2
    recorded_spans = list_spans(nodes[0])
    assert [row[:5] for row in recorded_spans["1 collective"]] == [
        (100, 300, group, 0, -1),
        (400, 500, group, 1, -1),
    ]
    assert decode_operation(recorded_spans["1 collective"][0][5]) == (layout.ALL_REDUCE, -1)
    assert recorded_spans["1 step"] == [(100, 500, 1, 2, -1, -1)]
    assert list_spans(nodes[1])["2 step"] == [(250, 500, 1, 2, -1, -1)]
    assert dict(accounts[0].skipped) == {"operations without start and end times": 1}
    assert dict(accounts[1].skipped) == {
        "sends and receives": 1,
        "operations that end before they start": 1,
    }
    assert accounts[0].notes == [
        "rank 0 waited in nccl:all_reduce 3 of group 0; rank 1 had not reached it (rank 1 had"
        " reached 2): look there first"
    ]


def test_a_pickle_is_refused_and_the_others_are_read(tmp_path: Path) -> None:
    made = tmp_path / "made"

    class Runs:
        def __reduce__(self) -> tuple:
            return Path.mkdir, (made,)

    bad = tmp_path / "nccl_trace_rank_1"
    bad.write_bytes(pickle.dumps({"pg_config": {}, "entries": [Runs()]}))
    nodes, accounts, why = import_folder(FlightRecorder(), dump(tmp_path, 0, entry(1, 1, 2)), bad)
    assert len(nodes) == 1
    assert why == ""
    assert "a pickle" in accounts[1].cut
    assert "JSON" in accounts[1].cut
    assert import_folder(FlightRecorder(), bad)[2].startswith(
        "a pickle: loading one may run arbitrary code"
    )
    assert not made.exists()


@pytest.mark.parametrize(
    "text",
    [
        '{"pg_config": 3, "entries": []}',
        '{"entries": [1], "pg_config": {}}',
        '{"entries": [{"collective_seq_id": "x"}], "pg_config": {}}',
        '{"pg_config": {}, "entries": [' + "[" * 5000,
        '{"pg_config": {"0": {"ranks": "no"}}, "entries": []}',
        '{"pg_config": {}, "entries": [{"time_created_ns": 1e400}]}',
    ],
)
def test_an_invalid_dump_file_is_reported(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace_3.json"
    path.write_text(text)
    nodes, (account,), why = import_folder(FlightRecorder(), path)
    assert nodes == []
    assert why == account.cut or account.notes
    assert "Traceback" not in why


def test_numbers_beyond_64_bits_are_left_out(tmp_path: Path) -> None:
    path = dump(tmp_path, 0, entry(1, 1, 2), entry(1 << 70, 3, 4), entry(2, 5, 1 << 70))
    (node,), (account,), _ = import_folder(FlightRecorder(), path)
    assert len(list_spans(node)["1 collective"]) == 1
    assert dict(account.skipped) == {
        "operations with impossible numbers": 1,
        "operations that end before they start": 1,
    }
    path.write_text(path.read_text().replace("[0, 1]", "[0, 99999999999999999999]"))
    assert "impossible ranks" in import_folder(FlightRecorder(), path)[2]


def test_a_file_name_without_a_rank_is_reported(tmp_path: Path) -> None:
    path = dump(tmp_path, 0, entry(1, 1, 2)).rename(tmp_path / "trace.json")
    assert import_folder(FlightRecorder(), path)[2] == "its name does not end with a rank"


def test_backend_operation_names_are_recognized() -> None:
    assert [
        find_operation(name)
        for name in (
            "nccl:all_reduce",
            "nccl:_all_gather_base",
            "nccl:_reduce_scatter_base",
            "nccl:all_to_all",
            "nccl:all_gather_into_tensor_coalesced",
            "gloo:barrier",
            "",
        )
    ] == [
        layout.ALL_REDUCE,
        layout.ALL_GATHER,
        layout.REDUCE_SCATTER,
        layout.ALL_TO_ALL,
        layout.OTHER_OPERATION,
        layout.BARRIER,
        layout.OTHER_OPERATION,
    ]


_CONFIG = {
    "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
    "40": {"name": "40", "desc": "PIPELINE", "ranks": "[0, 2]"},
    "72": {"name": "72", "desc": "EXPERTS", "ranks": "[0, 1, 2, 3]"},
}


def group_dump(folder: Path, rank: int, enqueued: dict[str, int], *entries: dict) -> Path:
    """A dump of a rank in the groups 0, 40 and 72, whose local ids are 0, 3 and 9."""
    status = {id_: {"last_enqueued_collective": enqueued.get(id_, -1)} for id_ in ("0", "3", "9")}
    path = folder / f"nccl_trace_rank_{rank}.json"
    content = {"pg_config": _CONFIG, "pg_status": status, "version": "2.10"}
    path.write_text(json.dumps({**content, "entries": list(entries)}))
    return path


def test_the_missing_rank_is_named_first_across_groups(tmp_path: Path) -> None:
    """Rank 3 never issued 800 of EXPERTS: 1 and 2 wait for it, 0 waits for 2 in PIPELINE 7."""

    def open_entry(group: str, id_: int, number: int) -> dict:
        where = {"process_group": [group, _CONFIG[group]["desc"]], "pg_id": id_}
        return entry(number, 100, None, **where)

    paths = [
        group_dump(tmp_path, 0, {"3": 7, "9": 799}, open_entry("40", 3, 7)),
        group_dump(tmp_path, 1, {"9": 800}, open_entry("72", 9, 800)),
        group_dump(tmp_path, 2, {"3": 6, "9": 800}, open_entry("72", 9, 800)),
        group_dump(tmp_path, 3, {"9": 799}),
    ]
    _, (account, *_), _ = import_folder(FlightRecorder(), *paths)
    assert account.answers == [
        "missing: rank 3; others waited for operations that they had not reached in EXPERTS"
        " (group 72): look there first",
        "ranks 1, 2 waited in nccl:all_reduce 800 of EXPERTS (group 72); ranks 0, 3 had not"
        " reached it (rank 0 had reached 799; rank 3 had reached 799)",
        "rank 0 waited in nccl:all_reduce 7 of PIPELINE (group 40); rank 2 had not reached it"
        " (rank 2 had reached 6)",
    ]


def test_operations_issued_by_status_do_not_count_as_missing(tmp_path: Path) -> None:
    """The dump of rank 1 has no entries left, but its status says that it issued operation 8."""
    where = {"process_group": ["72", "EXPERTS"], "pg_id": 9}
    paths = [
        group_dump(tmp_path, 0, {"9": 8}, entry(8, 100, None, **where)),
        group_dump(tmp_path, 1, {"9": 8}),
        group_dump(tmp_path, 2, {"9": 8}),
        group_dump(tmp_path, 3, {}),
    ]
    _, (account, *_), _ = import_folder(FlightRecorder(), *paths)
    assert account.answers == [
        "rank 0 waited in nccl:all_reduce 8 of EXPERTS (group 72); rank 3 had not reached it"
        " (rank 3 shows none): look there first"
    ]


def test_equal_refusals_of_several_files_are_merged(tmp_path: Path) -> None:
    for rank in range(5):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps({"pg_config": [rank]}))
    with pytest.raises(NoRecording) as caught:
        analyze(tmp_path)
    assert caught.value.message.count("a pickle") == 1
    assert caught.value.message.startswith("nccl_trace_rank_0 and 4 more: ")
