"""The live screen, whole, from reports made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterprof.output.renderers.text.safety import count_columns
from clusterprof.output.renderers.top_screen import (
    View,
    build_rows,
    describe_live_verdict,
    describe_screen,
    draw_screen,
    format_duration,
)
from clusterprof.report.live import LiveView, NodeStatus, RankStatus
from tests.support.cluster_report import make_cluster_report
from tests.support.reports import ALL, S

MS = S // 1000


def live_of(name: str, **changes: object) -> LiveView:
    """The report as a window, every recorder well, every device busy for four fifths of it."""
    report = make_cluster_report(16, 8) if name == "cluster" else ALL[name]()
    nodes = tuple(
        NodeStatus(node.name, node.key, "recording", 400 * MS, "", 0) for node in report.nodes
    )
    keys = {node.name: node.key for node in report.nodes}
    ranks = {
        (rank.node, rank.pid): RankStatus(keys[rank.node], 0.8, 0.41, 740 * MS, 300 * MS)
        for rank in report.ranks
    }
    live = LiveView(report.title, 60 * S, 400 * MS, nodes, report, ranks)
    return replace(live, **changes)  # type: ignore[arg-type]


def sick(live: LiveView, *states: tuple[str, int, str]) -> LiveView:
    """The same with the first recorders in these states."""
    values = [
        replace(node, state=state, age_ns=age * S, why=why)  # type: ignore[arg-type]
        for node, (state, age, why) in zip(live.nodes, states)
    ]
    return replace(live, nodes=(*values, *live.nodes[len(values) :]))


def test_the_live_screen_matches_the_expected_lines() -> None:
    assert draw_screen(live_of("two-nodes"), View(80, 14), False, "q quit") == [
        " clusterprof top  runs/cluster                 2 nodes, 4 of 6 ranks, last 60 s",
        " The data path waits for a network file system (storage-remote). This cost the",
        " most: 2.02 of 20.0 GPU-minutes (10.1 %), caused by gpu-a1 rank 0 (/data), for",
        " which 3 other ranks waited.",
        " Busy 80.0 % (least 80.0 %), SM activity 41.0 %, step 740.0 ms, lost 17.1 %.",
        " Lost to: storage-remote 10.1 %, net-transfer 4.0 %, 3 more",
        "",
        " RANK NODE     BUSY     SM   STEP   LOST LOST TO                CAUSED RECORDER",
        "*   0 gpu-a1 80.0 % 41.0 % 740 ms 17.0 % storage-remote 10.3 % 2.1 min 0.4 s",
        "    3 gpu-a2 80.0 % 41.0 % 740 ms 17.3 % storage-remote 10.0 % 13.00 s 0.4 s",
        "    2 gpu-a2 80.0 % 41.0 % 740 ms 17.3 % storage-remote 10.0 % 13.00 s 0.4 s",
        "    1 gpu-a1 80.0 % 41.0 % 740 ms 16.7 % storage-remote 10.0 %  5.00 s 0.4 s",
        "",
        " q quit",
    ]


def test_culprits_are_listed_first_and_other_orders_work() -> None:
    live = live_of("cluster")
    assert [row.ranks for row in build_rows(live, False, "lost")[:3]] == ["27", "127", "126"]
    assert [row.is_late for row in build_rows(live, False, "lost")[:2]] == [True, False]
    assert build_rows(live, False, "caused")[0].ranks == "27"
    assert [row.ranks for row in build_rows(live, False, "name")[:3]] == ["0", "1", "2"]
    assert [row.node for row in build_rows(live, True, "lost")[:2]] == ["gpu-a04", "gpu-a16"]


def test_ranks_are_grouped_by_node_when_lines_are_too_few() -> None:
    live = live_of("cluster")
    by_node = draw_screen(live, View(100, 30), False)
    assert len(by_node) <= 30 and by_node[7].startswith("*gpu-a04     8 ")
    small = draw_screen(live, View(100, 15), False, "foot")
    assert (len(small), small[-1]) == (15, " foot")
    assert " 1-6 of 16 nodes" in small
    further = draw_screen(live, View(100, 15, first=99), False, "foot")
    assert " 10-15 of 16 nodes" in further or " 11-16 of 16 nodes" in further
    by_rank = draw_screen(live, View(100, 200), False)
    assert by_rank[-2:] == ["", " * others waited for this rank most, because of the main cause"]
    assert sum(line[1:].split()[1].startswith("gpu-a") for line in by_rank[7:-2]) == 128
    full = draw_screen(live, View(100, len(by_rank) - 1), False)
    assert full == by_rank[:-2]  # where there is no room for it, the ranks have it


@pytest.mark.parametrize("width", [40, 60, 80, 132, 200])
@pytest.mark.parametrize("name", [*ALL])
def test_every_screen_fits_the_terminal_size(name: str, width: int) -> None:
    live = sick(live_of(name), ("silent", 12, "no space left on device"))
    for by in ("rank", "node", "auto"):
        lines = draw_screen(live, View(width, 24, "lost", by), False, "keys " * 30)
        assert max(map(count_columns, lines)) <= width
        assert len(lines) <= 24


def test_silent_and_ended_recorders_are_reported() -> None:
    live = sick(live_of("cluster"), ("silent", 12, ""), ("ended", 200, "told to"), ("gone", 0, "x"))
    assert " ! Recorders: gpu-a01 silent for 12 s, gpu-a02 ended (told to), gpu-a03 gone (x)" in (
        draw_screen(live, View(100, 30), False)
    )
    whole = [("silent", 3 * 86400, "")] * 16
    assert " ! All recorders are silent; the newest: silent for 3 days" in (
        draw_screen(sick(live_of("cluster"), *whole), View(100, 30), False)
    )
    ended = sick(live_of("two-nodes", age_ns=130 * S), *[("ended", 130, "no process is left")] * 2)
    assert (
        " ! This recording has ended 2 min ago (no process is left): its last 60 s"
        in draw_screen(ended, View(100, 30), False)
    )


def test_unknown_values_are_shown_as_a_dash() -> None:
    live = live_of("nothing")
    assert describe_live_verdict(live) == "No training process was seen in this time."
    (row,) = build_rows(live, False, "lost")
    assert (row.busy_ratio, row.lost_ratio, row.lost_to) == (None, None, "no training process")
    assert draw_screen(live, View(80, 24), False)[-1].split()[:4] == ["-", "node-a", "-", "-"]
    stuck = live_of("clean")
    report = stuck.report
    ranks = tuple(replace(rank, in_step_ns=0, lost_ns=0, buckets=()) for rank in report.ranks)
    stuck = replace(
        stuck,
        report=replace(report, ranks=ranks, in_step_ns=0, lost_ns=0),
        ranks={
            who: RankStatus(rank.node_key, 1.0, None, None, 26 * S)
            for who, rank in stuck.ranks.items()
        },
    )
    assert build_rows(stuck, False, "lost")[0].lost_to == "no step for 26 s"
    assert describe_live_verdict(stuck) == "No step ended in this time."


def test_emulated_devices_are_reported() -> None:
    for text in (
        "\n".join(draw_screen(live_of("damaged-emulated"), View(), False)),
        describe_screen(live_of("damaged-emulated")),
    ):
        assert "EMULATED accelerators" in text


def test_directly_read_nodes_are_reported() -> None:
    reading = "1 of 16 nodes are read directly: 1 damaged"
    live = live_of("cluster", reading=reading)
    assert f" ! {reading}" in draw_screen(live, View(80, 24), False)
    assert reading in describe_screen(live, "lost", "auto")


def test_plain_output_describes_the_screen_in_sentences() -> None:
    text = describe_screen(live_of("two-nodes"))
    assert text.splitlines()[:2] == [
        "Recording: runs/cluster",
        "Recorded: 2 nodes, 4 of 6 ranks; the last 60 s of it is shown",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.84, "0.8 s"),
        (9.96, "10 s"),
        (119.4, "119 s"),
        (150, "2 min"),
        (7_300, "2 h"),
        (172_800, "2 days"),
        (28_000_000, "324 days"),
    ],
)
def test_durations_are_formatted_in_readable_units(seconds: float, text: str) -> None:
    assert format_duration(round(seconds * 1e9)) == text
