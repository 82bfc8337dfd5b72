"""DFTracer: steps, waits and what stood behind them, from samples written by hand."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.importers.core.text import guess_file_system
from clusterprof.analysis.importers.workloads.dftracer import find_steps, parse_rank
from clusterprof.analysis.timeline.intervals import Intervals
from tests.support.stacks import list_samples
from tests.support.trace_imports import (
    MS,
    SEEDS,
    import_files,
    list_ranks,
    list_readings,
    list_spans,
)

TRACE = SEEDS / "dftracer" / "trace-0-of-2.pfw"
ORIGIN = 1_700_000_000_000 * MS


def test_a_rank_loading_in_its_main_process_is_imported() -> None:
    (node,), (account,) = import_files([TRACE])
    assert (node.name, node.wall_minus_own_ns) == ("node-a", 0)
    assert list_ranks(node) == [(70, 0, 2, "emulated-0")]
    assert list_spans(node, 70, ORIGIN) == {
        # The epoch began at 80; the second step ends with the second computing.
        "step": [(80, 410, 1, 2, -1, -1), (410, 670, 2, 2, -1, -1)],
        "data_wait": [(90, 200, -1, 0, 0, -1), (420, 470, -1, 0, 0, -1)],
        # 75 of 100 ms in open and pread, 30 of 50 in pread; Lustre is a network file system.
        "loading": [(100, 200, 75 * MS, 25 * MS, 4096, 2), (420, 470, 30 * MS, 20 * MS, 1000, 2)],
    }
    assert list_readings(node, "gpu.busy_ns_total", "emulated-0", ORIGIN) == {
        80: 0,
        210: 0,
        410: 200 * MS,
        470: 200 * MS,
        670: 400 * MS,
    }
    assert account.format_line() == (
        "trace-0-of-2.pfw: DFTracer trace: 3 reads, opens and status calls, 2 items loaded,"
        " 1 waits for a batch, 2 computations, 1 epochs, 2 steps; left out: 1 writes and other"
        " system calls"
    )
    assert account.notes == [
        "DLIO sleeps instead of computing: its emulated accelerators count as busy then"
    ]


def test_functions_become_stacks_of_the_main_thread() -> None:
    (node,), _ = import_files([TRACE])
    samples = list_samples(node, 70)[0]
    train, read = "<dftracer>:0 DLIOBenchmark._train", "<dftracer>:0 loop.iter"
    item, compute = "<dftracer>:0 TorchDataset.__getitem__", "<dftracer>:0 TorchFramework.compute"
    length = Counter[tuple[str, ...]]()
    for _, interval, stack in samples:
        length[tuple(stack)] += round(interval)
    assert length == {
        # The steps last from 80 to 670 ms; reads of files are no functions.
        (train,): 10 + 10 + 10,  # 80..90, 200..210, 410..420
        (train, read): 10,  # 90..100
        (train, read, item): 100,
        (train, item): 50,
        (train, compute): 400,
    }
    assert samples[0] == (1_700_000_000_085.0, 10.0, [train])


def test_worker_loading_is_assigned_to_the_parent_process() -> None:
    (node,), _ = import_files(sorted((SEEDS / "dftracer" / "workers").iterdir()))
    assert (node.name, node.wall_minus_own_ns) == ("node-b", None)
    assert list_ranks(node) == [(90, None, None, "")]
    assert list_spans(node, 90) == {
        "step": [(1000, 1700, 1, 2, -1, -1), (1700, 1900, 2, 2, -1, -1)],
        "data_wait": [(1000, 1400, -1, -1, -1, -1), (1700, 1800, -1, -1, -1, -1)],
        "forward": [(1400, 1500, 0, 0, 0, 0), (1800, 1900, 0, 0, 0, 0)],
        "backward": [(1500, 1650, 0, 0, 0, 0)],
        "optimizer": [(1650, 1700, 0, 0, 0, 0)],
        # The worker worked on an item for all of the first wait, 100 ms of it in fread.
        "loading": [(1000, 1400, 100 * MS, 300 * MS, 5120, 0)],
    }


def test_a_truncated_file_is_read_and_invalid_lines_are_counted(tmp_path: Path) -> None:
    lines = TRACE.read_bytes().splitlines()
    bad = [
        b'{"name":"pread","cat":"POSIX","pid":70,"ts":1e300,"dur":1,"ph":"X","args":{"hhash":7}}',
        b'{"name":"pread","cat":"POSIX","pid":70,"ts":-5,"dur":1,"ph":"X","args":{"hhash":7}}',
        b'{"name":"pread","cat":"POSIX","pid":70,"ts":5,"dur":"x","ph":"X","args":{"hhash":7}}',
        b'{"name":"x","ts":NaN}',
        b"\xff\xfe\x00",
        b'{"name":["x"],"ph":1}',
        b'{"name":"C","cat":"x","pid":70,"ts":1,"ph":"C"}',
    ]
    path = tmp_path / "trace-0-of-2.pfw.gz"
    path.write_bytes(gzip.compress(b"\n".join([*lines[:-3], *bad, lines[-3][:60]])))
    (node,), (account,) = import_files([path])
    assert list_spans(node, 70, ORIGIN)["step"] == [(90, 410, 1, 2, -1, -1)]
    assert account.skipped == {
        "writes and other system calls": 1,
        "events without a time, a duration or a process": 2,
        "events with a negative time or an invalid process": 1,
        "lines that are not events": 4,
        "events of other kinds": 1,
    }


def test_a_trace_of_reads_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "io.pfw"
    path.write_bytes(b"\n".join(TRACE.read_bytes().splitlines()[:6]))
    with pytest.raises(CannotImportError, match="the traces hold only reads"):
        import_files([path])


def test_steps_end_with_the_last_computing_before_the_next_wait() -> None:
    def at(*pairs: tuple[int, int]) -> Intervals:
        table = np.array(pairs, np.int64).reshape(-1, 2)
        return Intervals(table[:, 0], table[:, 1])

    def steps(epochs: Intervals, waiting: Intervals, computing: Intervals) -> list[list[int]]:
        return np.transpose(find_steps(epochs, waiting, computing)).tolist()

    waits, work = at((10, 20), (50, 60), (90, 99)), at((20, 30), (35, 45), (60, 85))
    assert steps(at(), waits, work) == [[10, 45], [45, 85]]
    assert steps(at((0, 45), (48, 100)), waits, work) == [[0, 45], [48, 85]]
    assert steps(at(), waits, at()) == [[10, 50], [50, 90]]
    assert steps(at(), at(), work) == [[20, 30], [35, 45], [60, 85]]
    assert steps(at((0, 9)), waits, at((1, 2))) == [[10, 50], [50, 90]]


def test_file_systems_and_ranks_are_read_from_paths() -> None:
    paths = (
        "/p/lustre1/x",
        "/gpfs/x",
        "/data/nfs-home/x",
        "s3://b/x",
        "/tmp/x",
        "/mnt/nvme0/x",
        "/data/x",
    )
    assert [guess_file_system(path) for path in paths] == [2, 2, 2, 3, 1, 1, 0]
    assert parse_rank("trace-12-of-64.pfw.gz") == (12, 64)
    assert parse_rank("job-abc-4711-app.pfw") == (None, None)


OLD_EVENTS = (
    ("_train", "dlio_benchmark", 1000, 700, ""),
    ("read", "POSIX", 1010, 80, '"ret":"4096","fname":"/lustre/a.npz",'),
    ("<module>.__getitem__", "data_loader", 1000, 100, ""),
    ("TFFramework.compute", "ai_framework", 1100, 50, ""),
    ("<module>.__getitem__", "data_loader", 1150, 100, ""),
    ("TFFramework.compute", "ai_framework", 1250, 50, ""),
)
"""Two steps of the first version: names in each event instead of hashes."""


def write_old(as_text: bool, separator: str, opening: str, closing: str) -> bytes:
    quote = '"' if as_text else ""
    lines = [
        f'{{"id":{quote}{i}{quote},"name":"{name}","cat":"{cat}","pid":{quote}70{quote},'
        f'"tid":{quote}71{quote},"ts":{quote}{1_700_000_000_000_000 + ts * 1000}{quote},'
        f'"dur":{quote}{dur * 1000}{quote},"ph":"X","args":{{{args}"hostname":"node-a"}}}}'
        for i, (name, cat, ts, dur, args) in enumerate(OLD_EVENTS)
    ]
    return f"{opening}{separator.join(lines)}{closing}".encode()


@pytest.mark.parametrize(
    "content",
    [
        write_old(True, "\n", "[\n ", "\n"),  # the first version
        write_old(False, ",\n", "[\n", ",\n]\n"),  # with commas
        write_old(False, ",", "[", "]"),  # a list on one line
    ],
)
def test_old_file_versions_are_read(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.pfw"
    path.write_bytes(content)
    (node,), (account,) = import_files([path])
    assert node.name == "node-a"
    assert list_spans(node, 70, ORIGIN) == {
        "step": [(1000, 1150, 1, 2, -1, -1), (1150, 1300, 2, 2, -1, -1)],
        "data_wait": [(1000, 1100, -1, 0, 0, -1), (1150, 1250, -1, 0, 0, -1)],
        "loading": [(1000, 1100, 80 * MS, 20 * MS, 4096, 2), (1150, 1250, 0, 100 * MS, 0, 0)],
    }
    assert not account.skipped


def test_numeric_and_text_hashes_are_equal(tmp_path: Path) -> None:
    path = tmp_path / "trace.pfw"
    text = write_old(False, "\n", "[\n", "\n").decode().replace('"hostname":"node-a"', '"hhash":7')
    text = text.replace('"fname":"/lustre/a.npz"', '"fhash":"12"')
    names = (
        '[\n{"name":"HH","cat":"dftracer","ph":"M","pid":70,"args":{"name":"node-a","value":"7"}}\n'
        '{"name":"FH","cat":"dftracer","ph":"M","pid":70,"args":{"name":"/lustre/a","value":12}}\n'
    )
    path.write_text(names + text.removeprefix("[\n"))
    (node,), _ = import_files([path])
    assert node.name == "node-a"
    assert list_spans(node, 70, ORIGIN)["loading"][0] == (1000, 1100, 80 * MS, 20 * MS, 4096, 2)


def test_aggregated_events_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.pfw"
    path.write_text(
        '[\n{"name":"read","cat":"POSIX","pid":7,"tid":3,"ts":1500,"dur":0,"ph":"C",'
        '"args":{"hhash":"a","count":4,"dur_sum":80}}\n'
    )
    with pytest.raises(CannotImportError) as caught:
        import_files([path])
    assert caught.value.message == (
        "the traces hold aggregated events, which have no start and no end: trace again without"
        " aggregation (DFTRACER_ENABLE_AGGREGATION=0)"
    )


def profiled(name: str, category: str, at_ms: int, length_ms: int) -> str:
    times = f'"ts":{at_ms * 1000},"dur":{length_ms * 1000}'
    return (
        f'{{"name":"{name}","cat":"{category}","pid":1,"tid":9,{times},"ph":"X",'
        '"args":{"hostname":"n1","core_affinity": [1],"step":1}}'
    )


def test_custom_loop_and_compute_names_are_recognized(tmp_path: Path) -> None:
    """Each step waits 80 ms, copies 2 and computes 5 + 10; the body of the loop is 20 ms."""
    lines = ["["]
    for at in (1000, 1100):
        lines += [
            profiled("my_loop.iter", "input-of-mine", at, 80),
            profiled("cpu-gpu-transfer", "communication-except-io", at + 80, 2),
            profiled("model-compute-forward-prop", "compute", at + 82, 5),
            profiled("model-compute-backward-prop", "compute", at + 87, 10),
            profiled("my_loop.yield", "input-of-mine", at + 80, 20),
        ]
    path = tmp_path / "dlp_logs-1.pfw"
    path.write_text("\n".join(lines))
    (node,), (account,) = import_files([path])
    spans = list_spans(node, 1)
    assert [span[:2] for span in spans["data_wait"]] == [(1000, 1080), (1100, 1180)]
    assert [span[:2] for span in spans["step"]] == [(1000, 1097), (1097, 1197)]
    assert [span[:2] for span in spans["h2d"]] == [(1080, 1082), (1180, 1182)]
    assert account.read["forward passes"] == account.read["backward passes"] == 2


def test_unknown_event_names_are_listed_in_the_refusal(tmp_path: Path) -> None:
    path = tmp_path / "trace-0-of-2.pfw"
    event = '{"name":"tick","cat":"mine","pid":1,"tid":9,"ts":1000,"dur":10,"ph":"X"}'
    path.write_text(f"[\n{event}\n")
    with pytest.raises(CannotImportError, match=r"computation: the events are tick \(mine\)$"):
        import_files([path])
