"""Logs of the NCCL Inspector: who waited, and how long the data took; numbers by hand."""

from __future__ import annotations

from pathlib import Path

from clusterprof.analysis.importers.core.node_tables import compute_group_number
from clusterprof.analysis.importers.nccl.inspector import NcclInspector
from clusterprof.probe import layout
from tests.support.import_results import (
    decode_operation,
    import_folder,
    list_groups,
    list_ranks,
    list_spans,
)
from tests.support.nccl_logs import make_line, write_log

US = 1000


def test_arrival_times_are_derived_from_durations(tmp_path: Path) -> None:
    # Written at 10 ms and at 11 ms. Operation 1: rank 0 for 300 us, rank 1 for 100: rank 0 waited
    # 200. Then one of 100 us, which lies in the 1,000 us up to the second writing.
    paths = [
        write_log(tmp_path / "a.jsonl", make_line(0, 1, 300), make_line(0, 2, 100, 11_000)),
        write_log(tmp_path / "b.jsonl", make_line(1, 1, 100), make_line(1, 2, 50, 11_000)),
    ]
    nodes, accounts, why = import_folder(NcclInspector(), *paths)
    assert why == ""
    group = compute_group_number([0, 1])
    assert [node.name for node in nodes] == ["node0", "node1"]
    assert [list_ranks(node) for node in nodes] == [{40: (0, 2, "")}, {41: (1, 2, "")}]
    assert list_groups(nodes[0]) == {group: [0, 1]}
    first, other = (list_spans(node)[f"{pid} collective"] for node, pid in zip(nodes, (40, 41)))
    assert [row[:5] for row in first] == [
        (9_700 * US, 10_000 * US, group, 1, 4096),
        (10_900 * US, 11_000 * US, group, 2, 4096),
    ]
    assert [row[:2] for row in other] == [(9_900 * US, 10_000 * US), (10_950 * US, 11_000 * US)]
    assert decode_operation(first[0][5]) == (layout.ALL_REDUCE, -1)
    assert list_spans(nodes[0])["40 step"] == [(9_700 * US, 11_000 * US, 1, 2, -1, -1)]
    assert accounts[0].read["operations"] == 2
    assert accounts[0].notes[0].startswith("ranks are those of communicator 0xabc, of 2 ranks")


def test_two_communicators_of_the_same_ranks_are_two_groups(tmp_path: Path) -> None:
    second = {"id": "0xdef", "n_ranks": 2, "nnodes": 2}
    paths = [
        write_log(
            tmp_path / f"{rank}.jsonl",
            make_line(rank, 1, 300),
            make_line(rank, 1, 100, 11_000, header={**second, "rank": rank}),
        )
        for rank in range(2)
    ]
    nodes, _, _ = import_folder(NcclInspector(), *paths)
    first, other = compute_group_number([0, 1]), compute_group_number("0,1:0xdef")
    assert [list_groups(node) for node in nodes] == [{first: [0, 1], other: [0, 1]}] * 2
    assert [row[2] for row in list_spans(nodes[0])["40 collective"]] == [first, other]


def test_a_header_line_applies_to_later_lines(tmp_path: Path) -> None:
    path = write_log(
        tmp_path / "a.jsonl",
        make_line(0, 1, 300, coll_perf=None, dump_stats={"records": 2}),
        make_line(0, 1, 300, header=None, metadata=None),
        make_line(0, 2, 200, header=None, metadata=None),
    )
    (node,), (account,), _ = import_folder(NcclInspector(), path)
    assert len(list_spans(node)["40 collective"]) == 2
    assert dict(account.skipped) == {"lines of another kind": 1}


def test_bad_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write_log(
        tmp_path / "a.jsonl",
        make_line(0, 1, 300),
        "{cut",
        "\n[1]\n",
        "\x00\n",
        make_line(0, 2, float("nan")),
        make_line(0, 3, -5),
        make_line(0, 1 << 80, 5),
        make_line(7, 4, 5),
        make_line(0, 5, 5, metadata={"pid": "x"}),
        make_line(0, 6, 1e300),
        "[" * 4000 + "\n",
    )
    (node,), (account,), _ = import_folder(NcclInspector(), path)
    assert len(list_spans(node)["40 collective"]) == 1
    assert sum(account.skipped.values()) == 10
    empty = write_log(tmp_path / "b.jsonl", make_line(0, 1, -1))
    assert import_folder(NcclInspector(), empty)[2] == "no collective operation in it"
