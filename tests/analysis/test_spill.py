"""Where operations of ranks are kept: in memory, in a file without a name, or nowhere and said."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterprof.analysis import spill
from clusterprof.analysis.cross_rank.pipeline import analyze_across_ranks
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.findings.report import build_report
from clusterprof.analysis.node.analyze import analyze_node
from clusterprof.analysis.pipeline import analyze
from clusterprof.analysis.spill import (
    IN_MEMORY,
    SpillLocation,
    SpillReader,
    SpillWriter,
    open_spill,
)
from clusterprof.report.model import Report
from tests.support.recordings import write
from tests.support.waiting_jobs import job, seconds_of

ANALYSE = """
import resource
import sys
from pathlib import Path
from clusterprof.analysis import spill
spill.SMALL_BYTES = 0
spill.MAX_IN_MEMORY_BYTES = int(sys.argv[3])
from clusterprof.analysis.pipeline import analyze
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
    report = analyze(Path(sys.argv[1]))
    print([(one.what, one.kind, one.message) for one in report.blinds if "ranks" in one.what])
    print(dict(report.unattributed_reasons))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, script in enumerate(job((0.0, 0.3), (0.2, 0.3))):
        write(script, tmp_path / "run" / f"node-{number}")
    return tmp_path / "run"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, which must be empty in the end."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield path
    assert list(path.iterdir()) == []


def sums(report: Report) -> list[dict[str, float]]:
    return [seconds_of(report, rank) for rank in range(len(report.ranks))]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_file_gives_the_report_that_memory_gives(
    folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    expected = analyze(folder)
    monkeypatch.setattr(spill, "SMALL_BYTES", 0)
    places = []
    between = spill._create_file
    monkeypatch.setattr(
        spill, "_create_file", lambda stack: places.append(between(stack)) or places[0]
    )
    assert analyze(folder, jobs=jobs) == expected
    assert places[0].address
    assert sums(expected)[0]["storage-local"] == 6.0  # see test_waits.py
    assert not os.path.exists(places[0].address)


def test_small_recordings_touch_no_disk(folder: Path) -> None:
    with open_spill([folder / "node-0", folder / "node-1"]) as place:
        assert place == IN_MEMORY


def test_nothing_is_left_behind_by_a_process_that_is_killed(temporary: Path) -> None:
    script = (
        "import time\nfrom clusterprof.analysis import spill\n"
        "spill.SMALL_BYTES = -1\n"
        "with spill.open_spill([]) as place, spill.SpillWriter(place) as shelf:\n"
        "    assert shelf.put(b'x' * 100_000) == 0\n"
        "    print(place.address, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        address = running.stdout.readline().strip()
        assert os.stat(address).st_size == 100_000
        running.kill()


def test_nor_by_an_analysis_that_fails(
    folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "SMALL_BYTES", 0)
    monkeypatch.setattr("clusterprof.analysis.pipeline.analyze_across_ranks", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        analyze(folder)


def test_shelves_of_several_processes_share_a_file(temporary: Path) -> None:
    with tempfile.TemporaryFile() as file:
        place = SpillLocation(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        with (
            SpillWriter(place) as spill_writer,
            SpillWriter(place) as other,
            SpillReader(place) as reader,
        ):
            put = [
                (shelf.put(data), data)
                for data in (b"a" * 9, b"bb")
                for shelf in (spill_writer, other)
            ]
            assert [at for at, _ in put] == [0, 9, 18, 20]
            for at, data in put:
                assert at is not None
                assert reader.get(at, len(data)) == data
            with pytest.raises(OSError, match="3 of 5 bytes"):
                reader.get(19, 5)


def test_without_a_folder_for_temporary_files_some_is_kept_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(**_: object) -> object:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    expected = analyze(folder)
    monkeypatch.setattr(spill, "SMALL_BYTES", 0)
    monkeypatch.setattr(tempfile, "TemporaryFile", none)
    assert analyze(folder) == expected


@pytest.mark.parametrize("in_memory_bytes", [1 << 20, 100])
def test_a_full_disk_is_reported(folder: Path, temporary: Path, in_memory_bytes: int) -> None:
    # A limit on the size of files stands for a disk that takes no more.
    done = subprocess.run(
        [sys.executable, "-c", ANALYSE, str(folder), "10", str(in_memory_bytes)],
        capture_output=True,
        text=True,
        check=True,
    )
    blinds, reasons = done.stdout.splitlines()
    if in_memory_bytes > 100:
        assert blinds == "[]"
        assert "'peers':" not in reasons
        return
    assert blinds == str(
        [
            (
                "waits between ranks",
                "failed",
                "operations of different ranks could not be matched:"
                f" {temporary}: the disk is full",
            )
        ]
    )
    assert "'peers': 24000000000" in reasons  # all 18 s of rank 0, 6 s of rank 1


def test_what_cannot_be_read_back_stays_between_ranks(folder: Path, temporary: Path) -> None:
    with tempfile.TemporaryFile() as file:
        place = SpillLocation(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        nodes = [
            analyze_node(folder / f"node-{number}", build_limits({}), place=place)
            for number in (0, 1)
        ]
        file.truncate(100)
        report = build_report("run", analyze_across_ranks(nodes, place))
    assert dict(report.unattributed_reasons) == {"peers": 24_000_000_000}
    [blind] = [
        blind_spot for blind_spot in report.blinds if blind_spot.what == "waits between ranks"
    ]
    assert "bytes could be read back" in blind.message
    assert "TMPDIR" in blind.remedy
