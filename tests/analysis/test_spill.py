"""Where operations of ranks are kept: in memory, in a folder of files, or nowhere and said."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
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
    split_location,
)
from clusterprof.report.model import Report
from tests.support.recordings import write_recording
from tests.support.waiting_jobs import make_scripts, sum_rank_seconds

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
    gaps = [(gap.what, gap.kind, gap.message) for gap in report.coverage_gaps]
    print([gap for gap in gaps if "ranks" in gap[0]])
    print(dict(report.unattributed_reasons))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, script in enumerate(make_scripts((0.0, 0.3), (0.2, 0.3))):
        write_recording(script, tmp_path / "run" / f"node-{number}")
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
    return [sum_rank_seconds(report, rank) for rank in range(len(report.ranks))]


@pytest.mark.parametrize("jobs", [1, 2])
def test_spilling_to_a_file_gives_the_same_report_as_memory(
    folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    expected = analyze(folder)
    monkeypatch.setattr(spill, "SMALL_BYTES", 0)
    places = []
    between = spill._create_folder
    monkeypatch.setattr(
        spill, "_create_folder", lambda stack: places.append(between(stack)) or places[0]
    )
    assert analyze(folder, jobs=jobs) == expected
    assert places[0].address
    assert sums(expected)[0]["storage-local"] == 6.0  # see test_waits.py
    assert not os.path.exists(places[0].address)


def test_small_recordings_are_kept_in_memory(folder: Path) -> None:
    with open_spill([folder / "node-0", folder / "node-1"]) as place:
        assert place == IN_MEMORY


def test_the_next_process_removes_the_folder_of_a_killed_process(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import time\nfrom clusterprof.analysis import spill\n"
        "spill.SMALL_BYTES = -1\n"
        "with spill.open_spill([]) as place, spill.SpillWriter(place) as shelf:\n"
        "    assert shelf.put(b'x' * 100_000) == 0\n"
        "    print(place.address, flush=True)\n"
        "    time.sleep(60)\n"
    )
    monkeypatch.setattr(spill, "SMALL_BYTES", -1)
    monkeypatch.setattr(spill, "_SETTLED_S", 0.0)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        address = Path(running.stdout.readline().strip())
        with open_spill([]):  # while its owner lives, the folder stays
            assert (address / "000000.blocks").stat().st_size == 100_000
        running.kill()
    assert address.exists()
    with open_spill([]) as place:
        assert not address.exists() and Path(place.address).exists()


def test_a_newly_made_folder_is_not_removed_as_stale(temporary: Path) -> None:
    new = temporary / f"{spill.PREFIX}new"
    new.mkdir()
    spill.remove_stale_folders(temporary)
    assert new.exists()
    new.rmdir()


def test_writing_stops_at_the_size_limit_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "_CHECK_BYTES", 30)
    place = SpillLocation(str(tmp_path), in_memory_bytes=50, max_bytes=250)
    with SpillWriter(place) as first, SpillWriter(place.with_number(1)) as second:
        assert [shelf.put(b"x" * 100) for shelf in (first, second, first)] == [0, 1 << 40, 100]
        # 300 bytes are there: this writer notices, keeps 40 in memory, and then no more
        assert second.put(b"y" * 40) == b"y" * 40
        assert second.put(b"y" * 40) is None
        assert "the limit of 250 bytes is reached" in second.why_full


def test_blocks_in_an_array_are_found_by_their_locations() -> None:
    sink = bytearray()
    place = SpillLocation(in_memory_bytes=10, number=3, sink=sink)
    with SpillWriter(place) as shelf:
        first, second = shelf.put(b"abcd"), shelf.put(b"efghi")
        assert isinstance(first, int) and isinstance(second, int)
        assert shelf.put(b"jk") is None and "10 bytes" in shelf.why_full
    stored = np.frombuffer(sink, np.uint8)
    assert [split_location(place) for place in (first, second)] == [(3, 0), (3, 4)]
    blocks = {first: stored[0:4], second: stored[4:9]}
    with SpillReader(SpillLocation(blocks=blocks)) as reader:
        assert (reader.get(first, 4), reader.get(second, 5)) == (b"abcd", b"efghi")
        with pytest.raises(OSError, match="5 of 6 bytes"):
            reader.get(second, 6)
        with pytest.raises(OSError, match="not brought here"):
            reader.get(4 << 40, 1)


def test_a_failed_analysis_leaves_no_spill_folder(
    folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "SMALL_BYTES", 0)
    monkeypatch.setattr(
        "clusterprof.analysis.tasks.local_engine.analyze_across_ranks", lambda *_: 1 // 0
    )
    with pytest.raises(ZeroDivisionError):
        analyze(folder)


def test_several_writers_append_to_the_same_file(tmp_path: Path) -> None:
    place = SpillLocation(str(tmp_path))
    with (
        SpillWriter(place) as spill_writer,
        SpillWriter(place) as other,
        SpillReader(place) as reader,
    ):
        put = [
            (shelf.put(data), data) for data in (b"a" * 9, b"bb") for shelf in (spill_writer, other)
        ]
        assert [at for at, _ in put] == [0, 9, 18, 20]
        for at, data in put:
            assert at is not None
            assert reader.get(at, len(data)) == data
        with pytest.raises(OSError, match="3 of 5 bytes"):
            reader.get(19, 5)


def test_the_reader_keeps_the_number_of_open_files_bounded(tmp_path: Path) -> None:
    place = SpillLocation(str(tmp_path))
    locations = []
    for number in range(2 * spill._MAX_OPEN_FILES):
        with SpillWriter(place.with_number(number)) as shelf:
            locations.append(shelf.put(number.to_bytes(2, "big")))
    before = len(os.listdir("/proc/self/fd"))
    with SpillReader(place) as reader:
        for number, location in enumerate(locations):
            assert location is not None
            assert reader.get(location, 2) == number.to_bytes(2, "big")
        assert len(os.listdir("/proc/self/fd")) - before == spill._MAX_OPEN_FILES


def test_a_missing_temporary_folder_keeps_operations_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> object:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    expected = analyze(folder)
    monkeypatch.setattr(spill, "SMALL_BYTES", 0)
    monkeypatch.setattr(tempfile, "mkdtemp", none)
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
    coverage_gaps, reasons = done.stdout.splitlines()
    if in_memory_bytes > 100:
        assert coverage_gaps == "[]"
        assert "'peers':" not in reasons
        return
    assert coverage_gaps == str(
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


def test_unreadable_spilled_operations_leave_waits_between_ranks_unattributed(
    folder: Path, temporary: Path
) -> None:
    stored = temporary / "stored"
    stored.mkdir()
    place = SpillLocation(str(stored))
    nodes = [
        analyze_node(
            folder / f"node-{number}", build_limits({}), spill=place.with_number(number + 1)
        )
        for number in (0, 1)
    ]
    os.truncate(stored / "000002.blocks", 100)
    report = build_report("run", analyze_across_ranks(nodes, place))
    shutil.rmtree(stored)
    assert dict(report.unattributed_reasons) == {"peers": 24_000_000_000}
    [blind] = [
        blind_spot
        for blind_spot in report.coverage_gaps
        if blind_spot.what == "waits between ranks"
    ]
    assert "bytes could be read back" in blind.message
    assert "TMPDIR" in blind.remedy
