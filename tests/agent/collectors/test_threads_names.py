"""Names of threads beside the main one: from the kernel's line, through a recording, to a table."""

from __future__ import annotations

from array import array
from pathlib import Path

from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.threads import COLUMNS
from clusterprof.analysis.timeline.load.processes import ProcessBuffer
from clusterprof.trace.schema import Rows
from tests.support.fake_threads import FakeThread, ThreadRig


def named(thread: FakeThread, name: str) -> None:
    path = thread.folder / "stat"
    path.write_text(path.read_text().replace("(w)", f"({name})"))


def test_a_renamed_thread_has_the_new_name_in_later_rows(tmp_path: Path) -> None:
    FakeThread(tmp_path, 10, 10).set_state("S", "1 0 1")
    other = FakeThread(tmp_path, 10, 11)
    other.set_state("R", "5 0 1")
    rig = ThreadRig(Roots(tmp_path), [10])
    assert [(row.tid, row.name) for row in rig.tick()] == [(10, -1), (11, 0)]
    other.set_state("R", "9 0 1")
    named(other, "a) b (c")  # a name may hold what ends it
    assert [(row.tid, row.name) for row in rig.tick()] == [(10, -1), (11, 1)]
    assert rig.collector.strings()["name"] == ["w", "a) b (c"]


def test_a_recording_without_thread_names_is_readable() -> None:
    def tables(*, names: bool) -> dict[int, str]:
        columns = COLUMNS if names else COLUMNS[:-1]
        values = {"t_ns": (5, 5), "pid": (10, 10), "tid": (10, 11), "name": (-1, 0)}
        buffer = ProcessBuffer()
        rows = [array("q", values.get(name, (0, 0))) for name in columns]
        buffer.add_rows(Rows("threads", columns, rows, {"wchan": [], "name": ["hog"]}))
        taken, _ = buffer.take(0, 10, last=True)
        return {tid: table.name for tid, table in taken[10].threads.items()}

    assert tables(names=True) == {10: "", 11: "hog"}
    assert tables(names=False) == {10: "", 11: ""}
