"""Records in, chunks out: nothing twice, nothing lost, whatever the order and the damage."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.timeline.load.chunks import NodeLoader
from clusterprof.analysis.timeline.load.ranks import find_ranks
from clusterprof.analysis.timeline.model import Chunk
from clusterprof.analysis.timeline.spans import FetchSpans
from clusterprof.probe.layout import DATA_WAIT, FETCH, STEP, WORKER_START
from clusterprof.trace.schema import SPAN_FIELDS, Clock, Columns, Event, Gap, Record, Rows, Spans
from clusterprof.trace.writer import RecordingWriter
from tests.support.builders import build_chunks, is_whole, make_header, ns

THREAD_NAMES = ("t_ns", "pid", "tid", "state", "on_cpu_ns_total", "run_delay_ns_total", "wchan")


def spans(pid: int, first: int, *rows: tuple[float, float, int], dropped: int = 0) -> Spans:
    table = np.array([[ns(s), ns(e), k, 0, 0, 0, 0] for s, e, k in rows], np.int64).reshape(-1, 7)
    columns = {name: table[:, i].copy() for i, name in enumerate(SPAN_FIELDS)}
    return Spans(pid, 7, first, dropped, {}, columns)


def disk(*readings: tuple[float, int | None]) -> Columns:
    """Bytes read from a disk at some times; None = missing."""
    values = np.array([0 if v is None else v for _, v in readings], np.int64)
    mask = bytes(v is None for _, v in readings)
    t_ns = np.array([ns(t) for t, _ in readings], np.int64)
    return Columns(
        "disk",
        ("disk.read_bytes_total",),
        ("vda",),
        t_ns,
        (values,),
        (mask if any(mask) else None,),
    )


def threads(*rows: tuple[float, int, int], strings: tuple[str, ...] = ("0",)) -> Rows:
    """(second, pid, on_cpu_ns) of main threads in state R."""
    table = [(ns(t), pid, pid, ord("R"), cpu, 0, -1) for t, pid, cpu in rows]
    columns = [np.array(column, np.int64) for column in zip(*table)]
    return Rows("threads", THREAD_NAMES, columns, {"wchan": strings})


def one_second_each(seconds: int) -> list[Record]:
    """A step of a second each, seen at its end, and a counter that rises by one a second."""
    records: list[Record] = [make_header()]
    for i in range(seconds):
        records.append(spans(100, i + 1, (i, i + 1, STEP)))
        records.append(disk((i, i), (i + 0.5, i)))
    return records


def ended_in(chunk: Chunk, pid: int, kind: int) -> list[float]:
    """Ends in seconds of the spans that belong to a chunk."""
    table = chunk.processes[pid].spans[kind]
    own = (table.end_ns >= chunk.start_ns) & ((table.end_ns < chunk.end_ns) | chunk.last)
    return (table.end_ns[own] / 1e9).tolist()


def test_every_span_belongs_to_the_chunk_in_which_it_ended() -> None:
    listed = list(build_chunks(one_second_each(35), ns(10)))
    assert [(c.start_ns / 1e9, c.first, c.last) for c in listed] == [
        (0, True, False),
        (10, False, False),
        (20, False, False),
        (30, False, True),
    ]
    ends = [ended_in(chunk, 100, STEP) for chunk in listed]
    assert [e for part in ends for e in part] == [float(i + 1) for i in range(35)]
    assert ends[1] == [float(i) for i in range(10, 20)]


def test_series_reach_from_the_reading_before_to_the_first_after() -> None:
    listed = list(build_chunks(one_second_each(35), ns(10)))
    middle = listed[1].series["disk.read_bytes_total", "vda"]
    assert middle.is_counter
    assert middle.t_ns[0] == ns(8)  # two seconds before the chunk
    assert middle.t_ns[-1] == ns(20)
    np.testing.assert_array_equal(middle.values[:3], [8, 8, 9])


def test_a_slow_signal_keeps_its_last_reading() -> None:
    records: list[Record] = [make_header(), disk((0, 5))]
    records += [spans(100, i + 1, (i, i + 1, STEP)) for i in range(30)]
    records += [Clock(ns(30), 0, 0), disk((29, 9))]
    late = list(build_chunks(records, ns(10)))[-1].series["disk.read_bytes_total", "vda"]
    assert (late.t_ns / 1e9).tolist() == [0, 29]


def test_out_of_order_frames_and_spans_are_sorted() -> None:
    records: list[Record] = [make_header(), disk((1, 1)), disk((0, 0)), disk((2, 2), (3, None))]
    records += [spans(100, 2, (2, 3, STEP)), spans(100, 1, (0, 2, STEP))]
    (chunk,) = build_chunks(records)
    series = chunk.series["disk.read_bytes_total", "vda"]
    assert (series.t_ns / 1e9).tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(series.values, [0, 1, 2, np.nan])
    table = chunk.processes[100].spans[STEP]
    assert (table.start_ns / 1e9).tolist() == [0, 2]
    assert table.sequence.tolist() == [1, 2]


def test_fetches_and_the_marks_of_an_instant_are_carried_over() -> None:
    records: list[Record] = [make_header(), spans(201, 1, (0, 0, WORKER_START), (1, 2, FETCH))]
    for i in range(25):
        records += [threads((i, 201, i)), spans(100, i + 1, (i, i + 0.5, DATA_WAIT))]
    last = list(build_chunks(records, ns(10)))[-1]
    assert last.start_ns == ns(20)
    worker = last.processes[201]
    assert worker.spans[WORKER_START].start_ns.tolist() == [0]
    assert (worker.spans[FETCH].end_ns / 1e9).tolist() == [2]
    assert worker.started_ticks == 7


def test_a_user_span_named_fetch_is_an_unmeasured_fetch() -> None:
    named = replace(spans(201, 1, (0, 1, 64), (1, 2, 65)), names={64: "fetch", 65: "decode"})
    (chunk,) = build_chunks([make_header(), named, Clock(ns(3), 0, 0)])
    assert sorted(chunk.processes[201].spans) == [FETCH, 65]
    fetched = chunk.processes[201].get_spans(FetchSpans)
    assert [fetched.user_cpu_ns.tolist(), fetched.read_bytes.tolist()] == [[-1], [-1]]


def test_a_long_unmarked_rank_keeps_its_last_step() -> None:
    records = one_second_each(5)
    records += [threads((i, 100, i)) for i in range(5, 35)]
    listed = list(build_chunks(records, ns(10)))
    assert [ended_in(chunk, 100, STEP) for chunk in listed] == [[1, 2, 3, 4, 5], [], [], []]
    assert [len(chunk.processes[100].spans[STEP].start_ns) for chunk in listed] == [5, 1, 1, 1]
    assert [r.marked for chunk in listed for r in find_ranks(chunk)] == [True] * 4


def test_threads_are_split_by_process_and_sorted_by_time() -> None:
    records: list[Record] = [
        make_header(),
        threads((0.0, 201, 5), (0.0, 100, 1), (0.1, 201, 6), (0.1, 100, 2)),
        threads((0.2, 100, 3), strings=("0", "folio_wait_bit_common")),
        Rows("other", ("t_ns",), [np.array([1])]),
    ]
    (chunk,) = build_chunks(records)
    assert sorted(chunk.processes) == [100, 201]
    main = chunk.processes[100].threads[100]
    assert main.on_cpu_ns.tolist() == [1, 2, 3]
    assert main.user_ns.tolist() == [-1, -1, -1]  # not in this recording
    assert chunk.processes[201].threads[201].on_cpu_ns.tolist() == [5, 6]
    assert chunk.wchan_names == ("0", "folio_wait_bit_common")


def test_process_identity_comes_from_registration_and_process_rows() -> None:
    who = ("t_ns", "pid", "parent_pid", "started_ticks", "rss_bytes", "name")
    columns = [np.array([v], np.int64) for v in (ns(1), 201, 100, 7, 4096, 0)]
    registered = {"pid": 100, "started_ticks": 3, "rank": 1}
    records: list[Record] = [
        make_header(),
        Event(0, "process-registered", registered),
        Rows("processes", who, columns, {"name": ("pt_data_worker",)}),
        Event(ns(2), "oom-kill", {"pid": 201}),
    ]
    (chunk,) = build_chunks(records)
    assert chunk.processes[100].registration == registered
    worker = chunk.processes[201]
    assert (worker.parent_pid, worker.name, worker.started_ticks) == (100, "pt_data_worker", 7)
    assert worker.io is not None
    assert worker.io.rss_bytes.tolist() == [4096]
    assert worker.io.read_bytes.tolist() == [-1]
    assert [event.kind for event in chunk.events] == ["process-registered", "oom-kill"]


def test_a_process_that_outlives_its_parent_keeps_it() -> None:
    who = ("t_ns", "pid", "parent_pid", "started_ticks", "name")

    def make_rows(*seen: tuple[int, ...]) -> Rows:
        return Rows("processes", who, [np.array(column, np.int64) for column in zip(*seen)])

    records: list[Record] = [
        make_header(),
        make_rows((ns(0.1), 201, 100, 7, -1), (ns(0.3), 202, 100, 8, -1)),
        make_rows((ns(0.4), 201, 1, 7, -1)),  # process 100 was killed
        make_rows((ns(25.1), 201, 1, 7, -1)),  # in another chunk
        # another process with a used pid
        make_rows((ns(25.2), 202, 300, 9, -1), (ns(25.3), 202, 1, 9, -1)),
    ]
    first, *_, second = build_chunks(records, ns(10))
    assert {pid: process.parent_pid for pid, process in first.processes.items()} == {
        201: 100,
        202: 100,
    }
    assert {pid: process.parent_pid for pid, process in second.processes.items()} == {
        201: 100,
        202: 300,
    }


def test_a_process_that_ended_is_forgotten() -> None:
    records: list[Record] = [make_header(), Event(0, "process-registered", {"pid": 300})]
    records += [Event(ns(5), "process-exited", {"pid": 300})]
    records += [threads((i, 100, i)) for i in range(40)]
    listed = list(build_chunks(records, ns(10)))
    assert [300 in chunk.processes for chunk in listed] == [True, False, False, False]


def test_a_reused_process_id_starts_a_new_process() -> None:
    registered = Event(0, "process-registered", {"pid": 300, "rank": 5})
    records: list[Record] = [make_header(), registered, spans(300, 1, (0, 1, STEP))]
    records += [Event(ns(5), "process-exited", {"pid": 300})]
    records += [threads((i, 100 if i < 25 else 300, i)) for i in range(40)]
    last = list(build_chunks(records, ns(10)))[-1]
    assert last.processes[300].registration == {}
    assert last.processes[300].spans == {}


def test_a_gap_is_carried_over_until_the_next_value() -> None:
    def gap(t: float, signal: str, device: str) -> Gap:
        return Gap(ns(t), "disk", signal, device, "failed", "why", "what to do")

    records: list[Record] = [make_header(), gap(1, "disk.read_bytes_total", "vda"), gap(1, "", "")]
    records += [disk((i, i)) for i in range(12, 25)]
    listed = list(build_chunks(records, ns(10)))
    assert [[g.signal for g in chunk.gaps] for chunk in listed] == [
        ["disk.read_bytes_total", ""],
        ["disk.read_bytes_total", ""],
        [""],
    ]


def test_a_silent_period_makes_a_single_chunk() -> None:
    records: list[Record] = [make_header(), disk((0, 0), (5, 1)), disk((100_000, 2))]
    listed = list(build_chunks(records, ns(10)))
    assert len(listed) == 3
    assert listed[-1].last
    assert listed[0].start_ns == 0
    assert [a.end_ns for a in listed[:-1]] == [b.start_ns for b in listed[1:]]


@pytest.mark.parametrize(
    "records",
    [[], [make_header()], [Clock(5, 5, 5)], [spans(1, 1)], [disk()], [disk((3, 1))]],
    ids=str,
)
def test_nearly_empty_recordings_are_read(records: list[Record]) -> None:
    listed = list(build_chunks(records))
    assert len(listed) <= 1
    assert all(chunk.end_ns > chunk.start_ns and chunk.last for chunk in listed)


def written(folder: Path, batches: list[list[Record]]) -> Path:
    writer = RecordingWriter(folder, make_header(), lambda: Clock(0, 0, 0))
    for batch in batches:
        writer.append(*[_writable(record) for record in batch])
    writer.close()
    return folder


def _writable(record: Record) -> Record:
    """The writer takes arrays of the standard library."""
    if isinstance(record, Columns):
        values = tuple(array("q", column.tolist()) for column in record.values)
        return replace(record, t_ns=array("q", record.t_ns.tolist()), values=values)
    if isinstance(record, Spans):
        columns = {name: array("q", c.tolist()) for name, c in record.columns.items()}
        return replace(record, columns=columns)
    return record


def test_a_recording_on_disk_reads_back_with_its_facts(tmp_path: Path) -> None:
    gap = Gap(0, "gpu_nvidia", "", "", "absent", "no driver", "install one")
    defined = Event(ns(1), "stacks-defined", {})  # many, and of use in their chunk only
    batches: list[list[Record]] = [[gap, Event(ns(1), "oom-kill", {}), defined]]
    batches += [[spans(100, i + 1, (i, i + 1, STEP), dropped=2), disk((i, i))] for i in range(20)]
    load = NodeLoader(written(tmp_path / "node-1", batches), ns(10))
    ends = [end for chunk in load.chunks() for end in ended_in(chunk, 100, STEP)]
    assert ends == [float(i + 1) for i in range(20)]
    facts = load.facts()
    assert facts.header.node["key"] == "node-1"
    assert (facts.first_ns, facts.last_ns) == (0, ns(19))
    assert facts.dropped_spans == 40
    assert facts.gaps == (gap,)
    assert [event.kind for event in facts.events] == ["oom-kill"]
    assert is_whole(facts.damage)


@pytest.mark.parametrize("chunk_s", [3, 10, 100])
def test_short_gaps_are_not_reported(tmp_path: Path, chunk_s: int) -> None:
    """100 s: vda is missing for 2 + 2 s, vdb for 4 + 2 s, vdc from 99 s on, vdd for ever."""

    def gap(t: float, device: str, why: str = "no answer") -> Gap:
        return Gap(ns(t), "disk", "disk.read_bytes_total", device, "failed", why, "")

    times = {
        "vda": [(10, 12), (50, 52)],
        "vdb": [(10, 14), (60, 62)],
        "vdc": [(99, 101)],
        "vdd": [(0, 101)],
    }
    records: list[Record] = []
    for t in range(101):
        for device, missing in times.items():
            if any(start == t for start, _ in missing):
                records.append(gap(t, device))
            if device == "vda" and t in (11, 51):
                records.append(gap(t, device, "another reason in the same gap"))
            if not any(start <= t < end for start, end in missing):
                records.append(replace(disk((t, t)), devices=(device,)))
    load = NodeLoader(written(tmp_path / "node-1", [[record] for record in records]), ns(chunk_s))
    assert list(load.chunks())[-1].last
    assert [item.device for item in load.facts().gaps] == ["vdd", "vdb", "vdc"]


def test_a_gap_of_a_minute_is_always_reported(tmp_path: Path) -> None:
    gap = Gap(ns(100), "disk", "disk.read_bytes_total", "vda", "failed", "no answer", "")
    batches: list[list[Record]] = [[disk((0, 0))], [gap]]
    batches += [[disk((t, t))] for t in range(160, 2000, 20)]
    load = NodeLoader(written(tmp_path / "node-1", batches), ns(1000))
    assert list(load.chunks())[-1].last
    assert load.facts().gaps == (gap,)


def test_damage_is_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    batches: list[list[Record]] = [[disk((i, i))] for i in range(20)]
    folder = written(tmp_path / "node-1", batches)
    (segment,) = folder.glob("*.cpf")
    whole = bytearray(segment.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 4] = b"\xff\x00\xff\x00"
    segment.write_bytes(whole)
    load = NodeLoader(folder)
    (chunk,) = load.chunks()
    lost = 20 - len(chunk.series["disk.read_bytes_total", "vda"].t_ns)
    assert 1 <= lost <= 2
    assert load.facts().damage.damaged_places == 1


def test_a_folder_without_a_header_gives_the_node_name(tmp_path: Path) -> None:
    (tmp_path / "node-9").mkdir()
    load = NodeLoader(tmp_path / "node-9")
    assert list(load.chunks()) == []
    assert load.facts().header.node["key"] == "node-9"
