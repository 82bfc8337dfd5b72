"""Stacks for speedscope and flame graph scripts: whole files, and names that could break them."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from clusterprof import __version__
from clusterprof.errors import NoRecording
from clusterprof.output.exporters.base import Output, Run
from clusterprof.output.exporters.stacks import Collapsed, Speedscope
from clusterprof.report.code import CodeProfile, Place, StackTime
from clusterprof.report.model import Report
from tests.support.code_profiles import S, add_code_profile, make_report_with_code
from tests.support.hostile_names import HOSTILE
from tests.support.reports import make_storage_report


def export(exporter: Speedscope | Collapsed, report: Report) -> str:
    stdout = io.BytesIO()
    exporter.export(Run(report, ()), Output(None, stdout))
    return stdout.getvalue().decode("utf-8")


def test_collapsed_stacks_match_the_expected_text() -> None:
    main, loader = "main (train.py:90)", "__next__ (torch/utils/data/loader.py:733)"
    resize = "Images.augment (train.py:42);Image.resize (PIL/Image.py:2450)"
    assert export(Collapsed(), make_report_with_code()) == (
        f"cpu-preprocess;rank 1;{main};{loader};{resize} 2000000000\n"
        f"storage-local;rank 0;{main};{loader};collate (data/utils.py:7) 2000000000\n"
        f"storage-local;rank 1;{main};{loader};{resize} 5000000000\n"
        "unattributed;rank 0;stack not known 1000000000\n"
    )


SPEEDSCOPE = """{"$schema":"https://www.speedscope.app/file-format-schema.json","name":"runs/slow-disk",
"exporter":"clusterprof@VERSION","activeProfileIndex":0,"shared":{"frames":[
{"name":"main","file":"/job/train.py","line":90},
{"name":"__next__","file":"/venv/lib/python3/dist-packages/torch/utils/data/loader.py","line":733},
{"name":"Images.augment","file":"/job/train.py","line":42},
{"name":"Image.resize","file":"/venv/lib/python3/dist-packages/PIL/Image.py","line":2450},
{"name":"collate","file":"/job/data/utils.py","line":7},
{"name":"log","file":"/job/model/utils.py","line":12},
{"name":"raw_decode","file":"/usr/lib/python3.12/json/decoder.py","line":355},
{"name":"stack not known"},{"name":"storage-local"},{"name":"cpu-preprocess"},
{"name":"unattributed"}]},"profiles":[
{"type":"sampled","name":"all ranks","unit":"nanoseconds","startValue":0,"endValue":10000000000,
"samples":[[8,0,1,2,3],[8,0,1,4],[9,0,1,2,3],[10,7]],
"weights":[5000000000,2000000000,2000000000,1000000000]},
{"type":"sampled","name":"rank 0 \\u00b7 node-a","unit":"nanoseconds","startValue":0,
"endValue":3000000000,"samples":[[8,0,1,4],[10,7]],"weights":[2000000000,1000000000]},
{"type":"sampled","name":"rank 1 \\u00b7 node-a","unit":"nanoseconds","startValue":0,
"endValue":7000000000,"samples":[[8,0,1,2,3],[9,0,1,2,3]],"weights":[5000000000,2000000000]}]}"""


def test_the_speedscope_file_matches_the_expected_text() -> None:
    text = SPEEDSCOPE.replace("\n", "").replace("VERSION", __version__)
    assert export(Speedscope(), make_report_with_code()) == text + "\n"


def check_speedscope(document: Any) -> None:
    """What speedscope's schema asks of a file with sampled profiles."""
    assert set(document) >= {"$schema", "shared", "profiles"}
    frames = document["shared"]["frames"]
    for frame in frames:
        assert isinstance(frame["name"], str) and set(frame) <= {"name", "file", "line", "col"}
        assert isinstance(frame.get("line", 1), int) and isinstance(frame.get("file", ""), str)
    for profile in document["profiles"]:
        assert profile["type"] == "sampled" and profile["unit"] == "nanoseconds"
        assert len(profile["samples"]) == len(profile["weights"])
        assert sum(profile["weights"]) == profile["endValue"] - profile["startValue"]
        assert {at for stack in profile["samples"] for at in stack} <= set(range(len(frames)))


def test_a_single_rank_gives_a_profile_without_a_rank_frame() -> None:
    report = make_report_with_code()
    profile = CodeProfile((Place("", 0, "f"),), (False,), (StackTime("a", 0, (0,), S, 1),), 1)
    alone = dataclasses.replace(add_code_profile(report, (), profile), ranks=report.ranks[:1])
    assert export(Collapsed(), alone) == "a;f (unknown file) 1000000000\n"
    document = json.loads(export(Speedscope(), alone))
    check_speedscope(document)
    assert [profile["name"] for profile in document["profiles"]] == ["rank 0 · node-a"]
    assert document["shared"]["frames"][0] == {"name": "f"}


@pytest.mark.parametrize("name", [*HOSTILE, "a;b", "a\nb;c 7"], ids=ascii)
def test_hostile_names_add_no_frames_or_lines(name: str) -> None:
    place = Place(name, 3, name)
    profile = CodeProfile((place,), (False,), (StackTime("a;" + name, 1, (0, 0), 7, 1),), 1)
    report = add_code_profile(make_storage_report(), (), profile)
    text = export(Collapsed(), report)
    (line,) = text.splitlines()
    assert text.endswith(" 7\n") and line.count(";") == 3  # cause, rank, two frames
    assert line.isprintable()
    check_speedscope(json.loads(export(Speedscope(), report)))


@pytest.mark.parametrize("exporter", [Speedscope(), Collapsed()], ids=lambda e: e.name)
def test_without_stacks_the_export_fails_with_a_reason(exporter: Any, tmp_path: Path) -> None:
    profile = CodeProfile(why_missing="--stacks off was given")
    file = tmp_path / "out"
    for report, why in (
        (make_storage_report(), "no Python stacks were recorded"),
        (add_code_profile(make_storage_report(), (), profile), "--stacks off was given"),
    ):
        with pytest.raises(NoRecording, match=why):
            exporter.export(Run(report, ()), Output(file, io.BytesIO()))
    assert not file.exists()


def test_each_stack_exporter_writes_a_single_file_to_a_folder(tmp_path: Path) -> None:
    for exporter in (Speedscope(), Collapsed()):
        exporter.export(Run(make_report_with_code(), ()), Output(tmp_path, io.BytesIO(), True))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "stacks.collapsed.txt",
        "stacks.speedscope.json",
    ]
