"""Segments begin with a header, turn over by size and time, stay under the cap, and are ours."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from clusterprof.errors import CannotStart, NoRecording
from clusterprof.trace.reader import Damage, NodeReader, list_node_folders
from clusterprof.trace.schema import Columns, Event
from clusterprof.trace.segments import read_digests
from clusterprof.trace.writer import RecordingWriter
from tests.support.trace_samples import (
    HEADER,
    SECOND_NS,
    ManualClock,
    find_frame_boundaries,
    make_canonical,
    make_second,
    read_frames,
    write_recording,
)


def seconds_in(path: Path) -> list[int]:
    """Return of which seconds a node or segment holds the disk collector's sample."""
    return [
        int(record.t_ns[0]) // SECOND_NS - 10
        for record in NodeReader(path)
        if isinstance(record, Columns) and record.collector == "disk"
    ]


def read_damage(path: Path) -> Damage:
    """Return what a reader of a whole node or segment misses."""
    reader = NodeReader(path)
    assert list(reader)
    return reader.damage


def test_every_segment_is_readable_alone_with_header_and_clock(tmp_path: Path) -> None:
    node = tmp_path / "node"
    write_recording(node, [make_second(n) for n in range(40)], segment_bytes=3_000)
    segments = sorted(node.glob("*.cpf"))
    assert [path.name for path in segments] == [f"{n:06d}.cpf" for n in range(1, len(segments) + 1)]
    assert len(segments) > 4
    alone = []
    for segment in segments:
        # A segment turns over at the first call after it is full: 3 frames of under 1,100 bytes.
        assert segment.stat().st_size < 3_000 + 3_300
        first, then, *_ = NodeReader(segment)
        assert make_canonical(first) == make_canonical(HEADER)
        assert type(then).__name__ == "Clock"
        alone += seconds_in(segment)
    assert alone == list(range(40))


def test_segments_rotate_by_time(tmp_path: Path) -> None:
    # One call a second from second 6 on; the first segment is opened at 5: 6-14, 15-24, 25-34, …
    write_recording(
        tmp_path / "node", [make_second(n) for n in range(30)], segment_ns=10 * SECOND_NS
    )
    assert [seconds_in(path) for path in sorted((tmp_path / "node").glob("*.cpf"))] == [
        list(range(0, 9)),
        list(range(9, 19)),
        list(range(19, 29)),
        [29],
    ]


def test_the_size_limit_drops_and_reports_the_oldest_segments(tmp_path: Path) -> None:
    node = tmp_path / "node"
    write_recording(
        node, [make_second(n) for n in range(120)], segment_bytes=5_000, max_bytes=40_000
    )
    total = sum(path.stat().st_size for path in node.glob("*.cpf"))
    assert 20_000 < total <= 40_000
    names = sorted(path.name for path in node.glob("*.cpf"))
    lost = int(names[0].removesuffix(".cpf")) - 1
    assert lost > 3
    kept = seconds_in(node)
    assert kept == list(range(kept[0], 120))
    attributes = [r.attributes for r in NodeReader(node) if isinstance(r, Event)]
    assert attributes[-1]["total"] == lost
    assert attributes[-1]["segment"] == f"{lost:06d}.cpf"


def test_a_restarted_recorder_continues_with_the_next_segment(tmp_path: Path) -> None:
    write_recording(tmp_path / "node", [make_second(0)])
    write_recording(tmp_path / "node", [make_second(1)])
    assert seconds_in(tmp_path / "node") == [0, 1]
    assert sorted(os.listdir(tmp_path / "node")) == ["000001.cpf", "000002.cpf", "SHA256SUMS"]


def test_sha256sum_accepts_what_the_recorder_lists(tmp_path: Path) -> None:
    node = tmp_path / "node"
    write_recording(node, [make_second(n) for n in range(40)], segment_bytes=3_000)
    write_recording(node, [make_second(40)])
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(check, cwd=node, capture_output=True, text=True, check=True)
    names = sorted(path.name for path in node.glob("*.cpf"))
    assert done.stdout.splitlines() == [f"{name}: OK" for name in names] and len(names) > 4
    assert read_damage(node) == Damage(frames_read=read_damage(node).frames_read)


def test_changed_and_removed_segments_are_named(tmp_path: Path) -> None:
    node = tmp_path / "node"
    write_recording(node, [make_second(n) for n in range(40)], segment_bytes=3_000)
    write_recording(tmp_path / "other", [make_second(7)])
    names = sorted(path.name for path in node.glob("*.cpf"))
    assert len(names) > 5
    (node / names[0]).unlink()  # as the size limit does
    assert read_damage(node).altered_segments == 0
    shutil.copy(tmp_path / "other/000001.cpf", node / names[3])  # each frame of it is valid
    (node / names[4]).unlink()
    damage = read_damage(node)
    assert (damage.altered_segments, damage.altered_example) == (2, names[3])
    assert (damage.damaged_bytes, damage.unknown_frames) == (0, 0)
    assert read_damage(node / names[3]).altered_segments == 1  # alone, too
    assert read_damage(node / names[2]).altered_segments == 0
    (node / names[-1]).unlink()
    assert read_damage(node).altered_segments == 3
    (node / "SHA256SUMS").unlink()  # as in recordings of older versions
    assert read_damage(node).altered_segments == 0


def test_a_segment_of_a_killed_writer_is_not_listed(tmp_path: Path) -> None:
    node, clock = tmp_path / "node", ManualClock()
    killed = RecordingWriter(node, HEADER, clock, keep_free_bytes=0)
    killed.append(*make_second(0))
    write_recording(node, [make_second(1)])
    assert set(read_digests(node)) == {"000002.cpf"}
    segment = node / "000001.cpf"
    segment.write_bytes(segment.read_bytes()[:-1])
    assert read_damage(node).altered_segments == 0
    killed.close()


def test_invalid_lists_of_digests_list_nothing(tmp_path: Path) -> None:
    node = tmp_path / "node"
    write_recording(node, [make_second(0)])
    file = node / "SHA256SUMS"
    whole = file.read_bytes()
    for content in (
        whole[:-4],
        b"0" * 64,
        b"\xff" * 9000,
        whole.upper(),
        b"0" * 64 + b"  ../x.cpf",
    ):
        file.write_bytes(content)
        assert read_digests(node) == {}, content
    file.write_bytes(whole[:30] + b"\n" + whole)
    assert set(read_digests(node)) == {"000001.cpf"}
    file.unlink()
    os.mkfifo(file)  # would block
    assert read_digests(node) == {}
    write_recording(node, [make_second(1)])
    assert seconds_in(node) == [0, 1]


def test_the_first_frames_are_on_disk_before_anything_is_appended(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "node", lambda: HEADER, ManualClock(), keep_free_bytes=0)
    assert [type(record).__name__ for record in NodeReader(tmp_path / "node")] == [
        "Header",
        "Clock",
    ]
    assert writer.bytes_written == (tmp_path / "node" / "000001.cpf").stat().st_size
    writer.close()


def test_segments_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        write_recording(tmp_path / "node", [make_second(0)])
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "node").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "node" / "000001.cpf").stat().st_mode) == 0o600


def refused(path: Path) -> str:
    with pytest.raises(CannotStart) as caught:
        RecordingWriter(path, HEADER, ManualClock())
    assert caught.value.remedy
    return caught.value.message


def test_links_and_folders_writable_by_other_users_are_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(elsewhere)
    assert refused(tmp_path / "link") == f"{tmp_path}/link: is a symbolic link or a file"
    (tmp_path / "file").write_text("")
    assert refused(tmp_path / "file") == f"{tmp_path}/file: is a symbolic link or a file"
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o750)
    assert refused(tmp_path / "open") == f"{tmp_path}/open: exists, and is open to other users"
    (tmp_path / "everybody").mkdir()
    os.chmod(tmp_path / "everybody", 0o777)
    assert "every user may replace" in refused(tmp_path / "everybody" / "node")
    assert list(elsewhere.iterdir()) == []


def test_a_symbolic_link_at_a_segment_path_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    node = tmp_path / "node"
    clock = ManualClock()
    writer = RecordingWriter(node, HEADER, clock, keep_free_bytes=0, segment_ns=SECOND_NS)
    (node / "000002.cpf").symlink_to(victim)
    for number in range(4):
        clock.now_ns += 2 * SECOND_NS
        writer.append(*make_second(number))
    writer.close()
    assert victim.read_text() == "precious"
    (node / "000002.cpf").unlink()
    assert seconds_in(node) == [0, 1, 2, 3]


def test_a_missing_recording_error_describes_the_given_path(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path, message in (
        (tmp_path, f"{tmp_path}: no recording in this folder (no .cpf files)"),
        (tmp_path / "notes.txt", f"{tmp_path}/notes.txt: not a recording (no .cpf file)"),
        (tmp_path / "gone", f"{tmp_path}/gone: no such file or directory"),
    ):
        with pytest.raises(NoRecording) as caught:
            list_node_folders(path)
        assert caught.value.message == message
        assert caught.value.exit_code == 5


def test_node_folders_of_a_recording_are_listed(tmp_path: Path) -> None:
    for node in ("b", "a"):
        write_recording(tmp_path / node, [make_second(0)])
    (tmp_path / "report.html").write_text("")
    (tmp_path / "empty").mkdir()
    assert list_node_folders(tmp_path) == (tmp_path / "a", tmp_path / "b")
    assert list_node_folders(tmp_path / "a") == (tmp_path / "a",)
    assert list_node_folders(tmp_path / "a" / "000001.cpf") == (tmp_path / "a" / "000001.cpf",)


ROOT = Path(__file__).resolve().parents[2]
CHILD = """
    import sys
    sys.path.insert(0, {root!r})
    from pathlib import Path
    from tests.support.trace_samples import HEADER, SECOND_NS, ManualClock, make_second
    from clusterprof.trace.writer import RecordingWriter

    clock = ManualClock()
    writer = RecordingWriter(Path(sys.argv[1]), HEADER, clock, keep_free_bytes=0)
    number = 0
    while True:
        clock.now_ns += SECOND_NS
        writer.append(*make_second(number))
        print(number, flush=True)
        number += 1
"""


def test_a_killed_writer_keeps_every_acknowledged_record(tmp_path: Path) -> None:
    code = textwrap.dedent(CHILD.format(root=str(ROOT)))
    for round_number in range(10):
        node = tmp_path / str(round_number) / "node"
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(node)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(1 + 7 * round_number):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        acknowledged = [int(line) for line in child.stdout]
        child.wait()
        last = acknowledged[-1] if acknowledged else 7 * round_number
        frames, reader = read_frames(node)
        assert seconds_in(node)[: last + 1] == list(range(last + 1))
        assert reader.damage.damaged_places == 0
        assert len(frames) >= 2 + 3 * (last + 1)


def test_frame_boundaries_match_the_reader(tmp_path: Path) -> None:
    write_recording(tmp_path / "node", [make_second(0)])
    data = (tmp_path / "node" / "000001.cpf").read_bytes()
    frames, _ = read_frames(tmp_path / "node")
    assert len(find_frame_boundaries(data)) - 1 == len(frames) == 5
