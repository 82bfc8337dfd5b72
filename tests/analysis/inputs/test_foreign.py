"""Foreign files on the command line become recordings, and the report says what each gave."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from clusterprof.analysis.inputs.foreign import import_files, import_inputs, select_foreign_files
from clusterprof.analysis.pipeline import analyze
from clusterprof.cli.common import require_complete_report
from clusterprof.errors import NoRecording, PartialRecording, UsageError
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.trace.reader import list_node_folders


def event(name: str, cat: str, ts: float, dur: float, tid: Any = 1, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "pid": 1,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def trace(wait_us: float = 400) -> dict[str, Any]:
    """Two steps of 1 ms: a wait for data, then a kernel for the rest of the step."""
    events = []
    for step in (3, 4):
        at = step * 1000
        events += [
            event(f"ProfilerStep#{step}", "user_annotation", at, 1000),
            event(
                "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
                "user_annotation",
                at,
                wait_us,
            ),
            event("cudaLaunchKernel", "cuda_runtime", at + wait_us - 5, 4, correlation=step),
            event(
                "gemm",
                "kernel",
                at + wait_us,
                1000 - wait_us,
                7,
                correlation=step,
                stream=7,
                device=0,
            ),
        ]
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "H100"}],
        "distributedInfo": {"rank": 0, "world_size": 1},
        "traceEvents": events,
    }


def test_a_trace_is_analysed_like_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "rank0.pt.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace()).encode()))
    report = analyze(path)
    (rank,) = report.ranks
    assert (rank.in_step_ns, rank.lost_ns) == (2_000_000, 800_000)
    buckets = dict(rank.buckets)
    assert sum(buckets.values()) == 800_000 and buckets["input-wait"] >= 780_000
    assert report.title == str(path)
    assert any(note.startswith("rank0.pt.trace.json.gz: PyTorch profiler") for note in report.notes)


def test_traces_in_a_folder_are_found_and_other_files_skipped(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "rank0.json").write_text(json.dumps(trace()))
    (tmp_path / "notes.txt").write_text("nothing of interest\n")
    files, beside = select_foreign_files([tmp_path])
    assert files == [tmp_path / "sub" / "rank0.json"]
    assert beside.notes == ("skipped, not of a known format: notes.txt",)
    with import_inputs([tmp_path]) as brought:
        (folder,) = brought.paths
        assert folder != tmp_path and len(list_node_folders(folder)) == 1
        assert [account.path.name for account in brought.accounts] == ["rank0.json"]
    assert not folder.exists()


def test_an_imported_trace_gives_the_same_ledger_as_direct_analysis(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(trace(250)))
    import_files([path], tmp_path / "run")
    direct, again = analyze(path), analyze(tmp_path / "run")
    assert [rank.buckets for rank in direct.ranks] == [rank.buckets for rank in again.ranks]
    with pytest.raises(UsageError, match="a recording already"):
        select_foreign_files([tmp_path / "run"])


def test_a_file_of_unknown_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"\x00\x01\x02 nothing")
    with pytest.raises(
        NoRecording, match="neither a recording nor a file of a known format"
    ) as refused:
        analyze(path)
    assert refused.value.message.endswith(": it seems to be binary data of another program")
    assert refused.value.remedy == (
        "give a recording or a trace; `clusterprof analyze --help` lists the known formats"
    )


def test_an_unknown_file_beside_traces_is_left_out_and_named(tmp_path: Path) -> None:
    known, other, torn = (tmp_path / name for name in ("rank0.json", "README.md", "torn.json.gz"))
    known.write_text(json.dumps(trace(250)))
    other.write_text("# what these files are")
    torn.write_bytes(b"\x1f\x8b torn at once")
    alone = analyze(known)
    report = analyze([known, other, torn], leave_unknown=True)
    assert [rank.buckets for rank in report.ranks] == [rank.buckets for rank in alone.ranks]
    (printed,) = [note for note in report.notes if "README.md" in note]
    unknown = "neither a recording nor a file of a known format: it seems to be a text for people"
    assert printed == f"README.md: left out: {unknown}"
    assert any(note.startswith("torn.json.gz: left out: ") for note in report.notes)
    lost = {gap.what: gap.message for gap in report.coverage_gaps if gap.kind == "lost"}
    assert lost.keys() == {str(other), str(torn)} and lost[str(other)] == f"left out: {unknown}"
    with pytest.raises(PartialRecording, match="2 things lost"):  # --strict
        require_complete_report(report)
    require_complete_report(alone)
    with pytest.raises(NoRecording, match=f"README.md: {unknown}"):
        analyze([known, other])  # a gate may not pass on a part of what it was given
    with pytest.raises(NoRecording, match=f"README.md: {unknown}"):
        analyze(other, leave_unknown=True)


def test_a_refusal_names_the_file_reason_and_remedy(tmp_path: Path) -> None:
    known, other = tmp_path / "rank0.json", tmp_path / "README.md"
    known.write_text(json.dumps(trace(250)))
    other.write_text("# what these files are")
    with pytest.raises(NoRecording) as refused:
        analyze([known, other])
    assert refused.value.message == (
        f"{other}: neither a recording nor a file of a known format: it seems to be a text for"
        " people"
    )
    assert refused.value.remedy.startswith(
        "nothing was analyzed; leave it out to analyze the other files alone, or repair"
        " it: give a recording or a trace; `clusterprof analyze --help` lists the known formats"
    )


def test_damaged_traces_in_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text(json.dumps(trace(250)))
    (tmp_path / "LICENSE").write_text("as it is\n")
    (tmp_path / "rank1.json.gz").write_bytes(b"\x1f\x8b torn at once")
    (tmp_path / "rank2.json.gz").write_bytes(b"\x1f\x8b torn too")
    damaged = (
        "damaged after 0 bytes (Error -3 while decompressing data: unknown compression method)"
    )
    with pytest.raises(NoRecording) as refused:
        analyze(tmp_path)
    assert refused.value.message == f"{tmp_path}/rank1.json.gz: {damaged} (and 1 more like it)"
    assert refused.value.remedy.endswith("or repair it: copy or export it again")
    notes = analyze(tmp_path, leave_unknown=True).notes
    assert f"rank1.json.gz: left out: {damaged}" in notes
    assert f"rank2.json.gz: left out: {damaged}" in notes
    assert "skipped, not of a known format: LICENSE" in notes


def test_an_empty_trace_beside_others_is_refused(tmp_path: Path) -> None:
    known, nothing, empty = (tmp_path / f"rank{n}.json" for n in range(3))
    known.write_text(json.dumps(trace(250)))
    nothing.write_text('{"schemaVersion": 1, "traceEvents": []}')
    with pytest.raises(
        NoRecording, match=r"rank1\.json: the file has no event of the PyTorch profiler"
    ) as refused:
        analyze([known, nothing])
    assert refused.value.remedy.startswith("nothing was analyzed; leave it out")
    assert len(analyze([known, nothing], leave_unknown=True).ranks) == 1
    empty.write_bytes(b"")
    with pytest.raises(NoRecording, match=r"rank2\.json: the file is empty"):
        analyze([known, empty])


def test_a_file_that_cannot_be_read_is_reported_or_left_out(tmp_path: Path) -> None:
    torn = Path("/proc/self/mem")  # nobody can read its first byte
    with pytest.raises(NoRecording, match="/proc/self/mem: cannot be read: input/output error"):
        analyze(torn)
    known = tmp_path / "rank0.json"
    known.write_text(json.dumps(trace(250)))
    notes = analyze([known, torn], leave_unknown=True).notes
    assert "mem: left out: cannot be read: input/output error" in notes


def test_a_trace_without_events_raises_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_text('{"schemaVersion": 1, "traceEvents": []}')
    with pytest.raises(NoRecording, match=r"rank0\.json: PyTorch profiler"):
        analyze(path)


def test_causes_invisible_in_a_trace_have_no_value(tmp_path: Path) -> None:
    """No disk, no neighbour and no collection can be seen in it: a gate must not pass on 0.0 %."""
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(trace()))
    report = analyze(path)
    known = {metric.name: metric.value for metric in report.metrics}
    why = {metric.name: metric.why_missing for metric in report.metrics}
    assert known["stall.input-wait_ratio"] is not None
    for name in ("storage-contention", "cpu-gc", "cpu-contention", "checkpoint"):
        assert known[f"stall.{name}_ratio"] is None
        assert why[f"stall.{name}_ratio"] == "the recording has no samples or marks for it"
    unseen = [
        blind_spot.what
        for blind_spot in report.coverage_gaps
        if "samples or marks" in blind_spot.message
    ]
    assert "cpu-gc" in unseen and "input-wait" not in unseen


def test_a_trace_without_host_name_is_named_by_its_file(tmp_path: Path) -> None:
    for number in (0, 1):
        reported = {**trace(), "distributedInfo": {"rank": number, "world_size": 2}}
        (tmp_path / f"rank{number}.json").write_text(json.dumps(reported))
    report = analyze(tmp_path)
    assert [(node.name, node.has_host_name) for node in report.nodes] == [
        ("rank0", False),
        ("rank1", False),
    ]
    screen = Terminal(80).render(report)
    assert "unknown-host" not in screen
    assert screen.splitlines()[1].startswith(" 2 traces, ")
    assert " rank[0-1] (hosts unknown); " in screen


def test_a_millisecond_trace_gets_shorter_history_bins(tmp_path: Path) -> None:
    """Two steps of 1 ms: stretches of 100 ms / 256."""
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(trace()))
    history = analyze(path, history=True).history
    assert history is not None and history.bin_ns == 390_625
    assert history.bin_count == 6  # 2 ms are 5.1 of them
    assert sum(sum(rank.in_step_ns) for rank in history.ranks) == 2_000_000
    assert sum(sum(ns) for rank in history.ranks for _, ns in rank.lost) == 800_000


def test_a_useless_log_among_several_files_is_refused(tmp_path: Path) -> None:
    seeds = Path(__file__).parents[1] / "importers" / "seeds" / "mllog"
    good, bad = tmp_path / "result_0.txt", tmp_path / "result_1.txt"
    good.write_bytes((seeds / "short.txt").read_bytes())
    bad.write_text(':::MLLOG {"time_ms": 1700000000000, "key": "init_start"}\n')
    with pytest.raises(
        NoRecording,
        match=r"result_1\.txt: the log has no epoch or block with"
        r" start",
    ):
        analyze([good, bad])
    notes = analyze([good, bad], leave_unknown=True).notes
    assert any("the log has no epoch or block with start" in note for note in notes)


def test_a_copied_trace_is_counted_as_a_single_node(tmp_path: Path) -> None:
    for name, wait_us in (("a.json", 400), ("b.json", 400), ("c.json", 300), ("d.json", 400)):
        (tmp_path / name).write_text(json.dumps(trace(wait_us)))
    with import_inputs([tmp_path]) as imported:
        assert [account.path.name for account in imported.accounts] == ["a.json", "c.json"]
        note = "b.json is a copy of a.json, and 1 more: each is counted once"
        assert note in imported.notes
    assert len(analyze(tmp_path).nodes) == 2


def test_unknown_files_in_a_folder_are_described_by_kind(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"work.{number}.et").write_bytes(b"\x08\x00\x12" * 50)
    with pytest.raises(NoRecording, match=r"its 3 files, such as work\.0\.et, seem to be binary"):
        analyze(tmp_path)
    (tmp_path / "work.0.et").unlink()
    (tmp_path / "work.1.et").unlink()
    with pytest.raises(NoRecording, match=r"work\.2\.et: .* it seems to be binary"):
        analyze(tmp_path)


def test_a_host_only_trace_is_refused_without_device_advice(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "name": "aten::mm", "pid": "CPU functions", "tid": 1, "ts": ts, "dur": 5}
        for ts in range(9)
    ]
    (tmp_path / "trace.json").write_text(json.dumps(events))
    with pytest.raises(NoRecording) as caught:
        analyze(tmp_path / "trace.json")
    assert "all of the host (CPU functions)" in caught.value.message
    assert "ProfilerActivity.CUDA" in caught.value.remedy and "GPU 0" not in caught.value.remedy
