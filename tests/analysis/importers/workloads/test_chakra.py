"""Execution traces and Chakra graphs: read if they have times, else refused with what adds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.probe import layout
from tests.support.kineto_traces import list_busy_ns, list_spans
from tests.support.trace_imports import import_files, list_ranks
from tests.support.vendor_traces import encode_chakra_node, encode_message, encode_varint

US = 1_000
METADATA = encode_message((1, "0.0.4"), (2, encode_message((1, "schema"), (29, "1.1"))))
LINK = (
    "analyze the profiler trace of the same run, or add its times: chakra_trace_link"
    " --chakra-host-trace ET --chakra-device-trace KINETO --output-file LINKED"
)


def write_graph(folder: Path, nodes: bytes) -> Path:
    path = folder / "chakra.0.et"
    path.write_bytes(encode_varint(len(METADATA)) + METADATA + nodes)
    return path


def test_a_graph_with_start_times_becomes_a_timeline(tmp_path: Path) -> None:
    nodes = [
        encode_chakra_node("aten::mm", 1000, 30, True, 1),
        encode_chakra_node("gemm", 1010, 40, False, 7),
        encode_chakra_node("ncclDevKernel_AllReduce_Sum_f32", 1040, 30, False, 9),
        encode_chakra_node("orphan", 0, 5, False, 7),
    ]
    (node,), (account,) = import_files([write_graph(tmp_path, b"".join(nodes))])
    assert list_ranks(node) == [(1, None, None, "gpu0")]
    assert list_busy_ns(node)[-1] == (70 * US, 60 * US)  # from 1000: 10 to 70
    assert [span[3] for span in list_spans(node, layout.EXPOSED_COLLECTIVE, 1)] == [20 * US]
    assert account.skipped == {"nodes without a time": 1}


def test_a_linked_trace_becomes_a_timeline(tmp_path: Path) -> None:
    nodes = [
        {"id": 2, "name": "aten::mm", "ctrl_deps": 1, "ts": 100, "inclusive_dur": 30},
        {
            "id": 3,
            "name": "gemm",
            "ctrl_deps": 2,
            "cat": "kernel",
            "ts": 110.5,
            "inclusive_dur": 40,
            "stream": 7,
        },
        {"id": 4, "name": "no time", "ctrl_deps": 1},
    ]
    path = tmp_path / "linked_rank3.json"
    path.write_text(json.dumps({"schema": "1.1.0-chakra.0.0.4", "pid": 9, "nodes": nodes}))
    (node,), (account,) = import_files([path])
    assert list_ranks(node) == [(1, 3, None, "gpu0")]
    assert list_busy_ns(node)[-1] == (50_500, 40_000)
    assert account.skipped == {"nodes without a time": 1}


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        (
            "et.json",
            {"schema": "1.0.2", "nodes": [{"id": 2, "name": "aten::mm", "ctrl_deps": 1}]},
            "et.json: of 1 nodes none is work of a device with a start and a duration; ",
        ),
        (
            "feed.json",
            {"workload_graph": [{"Id": 216, "Name": "aten::mm", "runtime": 318}]},
            "feed.json: the JSON of Chakra's feeder has durations but no times; ",
        ),
    ],
)
def test_graphs_without_times_are_refused_with_a_hint(
    tmp_path: Path, name: str, content: object, why: str
) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    with pytest.raises(CannotImportError) as caught:
        import_files([path])
    assert caught.value.message == why + LINK


def test_durations_without_starts_and_damage_are_refused(tmp_path: Path) -> None:
    whole = encode_chakra_node("gemm", 0, 40, False, 7)
    with pytest.raises(CannotImportError) as caught:
        import_files([write_graph(tmp_path, whole + whole[:-3])])
    assert caught.value.message == (
        "chakra.0.et: of 1 nodes none is work of a device with a start and a duration (damaged: a"
        f" node is cut off; everything before was read); {LINK}"
    )
