"""Hostile names in a real recording: hosts, devices, mounts, processes, launcher variables."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.live.job import LiveJob
from clusterprof.analysis.pipeline import analyze
from clusterprof.output.renderers.base import RENDERERS
from clusterprof.output.renderers.top_screen import View, describe_screen, draw_screen
from clusterprof.trace import frame
from clusterprof.trace.decoder import Decoder
from clusterprof.trace.dump import export_records
from clusterprof.trace.encoder import Encoder
from clusterprof.trace.reader import DamageCounter, Scanner
from clusterprof.trace.schema import Event, Header
from tests.scenarios.hostile import checks
from tests.scenarios.hostile.strings import HOSTILE

SOURCE = Path(__file__).parents[2] / "recordings" / "dlrm-8rank"
OURS = {"role", "kind", "key", "started", "boot_id"}  # what our own code compares
RUNS = 3


def poisoned(value: Any, strings: Iterator[str]) -> Any:
    """Every string in the attributes of a record, but for our own words; names of keys stay."""
    if isinstance(value, str):
        return next(strings)
    if isinstance(value, dict):
        return {
            key: item if key in OURS else poisoned(item, strings) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [poisoned(item, strings) for item in value]
    return value


def hostile_header(header: Header, strings: Iterator[str]) -> Header:
    entry = next(strings)
    host = {
        **header.host,
        "mounts": [{"point": next(strings), "source": next(strings), "type": next(strings)}],
        "nics": [{"name": next(strings), "physical": True}],
        "disks": [{"name": next(strings), "size_bytes": 1}],
        "cpus": {"model": next(strings), "count": 4},
    }
    devices = [{"id": next(strings), "name": next(strings), "vendor": next(strings)}]
    launcher = {"job": next(strings), "variables": {"MASTER_ADDR": next(strings), "JOB": entry}}
    return replace(
        header,
        node={**header.node, "hostname": entry, "display": entry},
        host=host,
        devices=devices,
        launcher=launcher,
        versions={"driver": next(strings)},
    )


def write(target: Path, strings: Iterator[str]) -> Path:
    """Copy the recording; only headers and events are written anew."""
    for node in sorted(SOURCE.iterdir()):
        (target / node.name).mkdir(parents=True)
        for segment in sorted(node.glob("*.cpf")):
            decoder, encoder, out = Decoder(), Encoder(), []
            with segment.open("rb") as file:
                for result in Scanner(file, DamageCounter()).frames():
                    if result.kind == frame.KIND_HEADER:
                        (header,) = decoder.records(result)
                        assert isinstance(header, Header)
                        out += encoder.frames([hostile_header(header, strings)])
                    elif result.kind == frame.KIND_EVENT:
                        (event,) = decoder.records(result)
                        assert isinstance(event, Event)
                        attributes = poisoned(event.attributes, strings)
                        out += encoder.frames([replace(event, attributes=attributes)])
                    else:
                        out.append(
                            frame.pack_frame(
                                result.kind, result.header, (result.body,), result.codec
                            )
                        )
            (target / node.name / segment.name).write_bytes(b"".join(out))
    return target


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, strings = tmp_path_factory.mktemp("hostile"), cycle(HOSTILE)
    return [write(folder / f"run{number}", strings) for number in range(RUNS)]


def test_a_recording_of_hostile_names_is_analysed_and_printed(recordings: list[Path]) -> None:
    for recording in recordings:
        report = analyze(recording)
        assert len(report.nodes) == 2 and len(report.ranks) == 8
        for kind in RENDERERS:
            text: Any = kind().render(report)
            if isinstance(text, str):
                checks.nothing_that_controls(text)
                checks.BY_NAME.get(kind.name, str)(text)


def test_the_dump_of_hostile_names_is_printable_json(recordings: list[Path]) -> None:
    for recording in recordings:
        lines = list(export_records(recording))
        assert all(line.isascii() and line.isprintable() for line in lines)
        assert len(lines) > 20
        for line in lines:
            checks.json_(line)


def test_top_shows_a_recording_of_hostile_names(recordings: list[Path]) -> None:
    for recording in recordings:
        live = LiveJob([recording], build_limits({})).update(time.time_ns())
        assert live.trouble == "" and len(live.report.ranks) == 8
        checks.nothing_that_controls("\n".join(draw_screen(live, View(100, 40), False)))
        checks.nothing_that_controls(describe_screen(live))


def test_paths_and_arguments_with_hostile_names_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from clusterprof.cli.app import main

    word = "\x1b[2Ja\n::error::x\udcff[/]\u202ex"
    missing = tmp_path / word
    for arguments in (
        ["analyze", str(missing)],
        ["dump", str(missing)],
        ["top", str(missing), "--once"],
        ["gate", str(missing), "--assert", f"{word} >= 1%"],
        ["analyze", str(missing), "--json"],
        ["explain", word],
        [word],
        ["analyze", str(SOURCE), "-o", f"{missing}/x"],
        ["analyze", "x", "--format", word],
        ["analyze", "x", "--profile", word],
        ["top", "--sort", word, "x"],
    ):
        assert main(arguments) in (2, 5), arguments
        printed = capsys.readouterr()
        checks.nothing_that_controls(printed.err)
        checks.nothing_that_controls(printed.out)
        assert "Traceback" not in printed.err
        if printed.out:
            checks.json_(printed.out)
