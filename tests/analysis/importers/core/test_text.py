"""Names of traces by the names of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.text import name_trace


@pytest.mark.parametrize(
    "file, name",
    [
        ("h100_Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", "h100_Qwen_Qwen1.5-0.5B-Chat__1016005"),
        ("node-1.cluster.example.pt.trace.json", "node-1.cluster.example"),
        ("resnet50_num_workers_0.1623143089861.pt.trace.json.gz", "resnet50_num_workers_0"),
        ("result_9.txt.gz", "result_9"),
        ("steps.v2.csv", "steps.v2"),
        (".json", ".json"),
        ("plain", "plain"),
    ],
)
def test_trace_names_lose_format_suffixes_and_timestamps(file: str, name: str) -> None:
    assert name_trace(Path("folder") / file) == name
