"""Nsight Systems databases made by hand; every span and number by hand."""

from __future__ import annotations

import gzip
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterprof.analysis.importers.core.node_tables import compute_group_number
from clusterprof.analysis.importers.nsys.importer import Nsys
from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from tests.support.import_results import (
    decode_operation,
    import_folder,
    list_groups,
    list_ranks,
    list_readings,
    list_spans,
)
from tests.support.nsys_files import (
    ALL_REDUCE,
    CALLS,
    COPIES,
    COPY,
    FILLS,
    GEMM,
    KERNELS,
    LAUNCH,
    MALLOC,
    NAMES,
    NVTX,
    POLL,
    READ,
    SAMPLES,
    STACKS,
    SYNC,
    SYSTEM,
    encode_process_id,
    encode_thread_id,
    write_database,
)

P, T = encode_process_id(11), encode_thread_id(11, 11)
# One step of 1000 us on one device:
#   data wait 0..300, copy to the device 320..340, kernel 350..600; the host waits for it,
#   allocates, launches the next kernel at 690, which runs 700..900; a fill runs until 950.
US, MS = 1_000, 1_000_000
ONE = (
    (KERNELS, [(350, 600, 0, 7, 3, P, GEMM), (700, 900, 0, 7, 5, P, GEMM)]),
    (COPIES, [(320, 340, 0, 7, 2, P, 4096, 1)]),
    (FILLS, [(900, 950, 0, 7, 6, P, 0, 64)]),
    (
        CALLS,
        [
            (305, 330, T, 2, COPY),
            (330, 345, T, 3, LAUNCH),
            (345, 610, T, 4, SYNC),
            (620, 660, T, 9, MALLOC),
            (690, 698, T, 5, LAUNCH),
            (710, 720, T, 6, LAUNCH),
        ],
    ),
    (
        NVTX,
        [
            (0, 1000, 59, T, "ProfilerStep#7", None, 0),
            (0, 300, 59, T, "DataLoader.next", None, 0),
            (615, 680, 59, T, "aten::mm, op_id = 3", None, 0),
            (5, None, 34, T, "mark", None, 0),
            (1000, 1400, 59, T, "ProfilerStep#8", None, 0),
        ],
    ),
    (SYSTEM, [(10, 210, T, READ), (220, 240, T, POLL), (400, 500, T, READ)]),
)


def in_us(table: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """The same rows with start and end in us."""
    return [(a * US, None if b is None else b * US, *rest) for a, b, *rest in table]


def test_a_whole_process_is_imported(tmp_path: Path) -> None:
    tables = [(table, in_us(rows)) for table, rows in ONE]
    nodes, (account,), why = import_folder(Nsys(), write_database(tmp_path / "a.sqlite", *tables))
    assert why == ""
    (node,) = nodes
    assert list_ranks(node) == {11: (None, None, "gpu0")}
    assert list_spans(node) == {
        "11 step": in_us([(0, 1000, 7, 2, -1, -1), (1000, 1400, 8, 2, -1, -1)]),
        "11 data_wait": in_us([(0, 300, -1, -1, -1, -1)]),
        # 300 us of wait: 200 in reads, 20 in poll, 80 in no call
        "11 loading": in_us([(0, 300, 200 * US, 80 * US, -1, 0)]),
        "11 h2d": in_us([(305, 330, 4096, -1, 0, 0)]),
        "11 sync": in_us([(345, 610, layout.WHOLE_NS, 1, 0, 0)]),
        "11 starved": in_us(
            [
                # 0..320 without the data wait: the copy's call began at 305
                (300, 320, 0, 0, 0, 15 * US),
                # 340..350: the launch returned at 345; the rest of the gap is the device's start
                (340, 345, 5 * US, 0, 0, 0),
                # 600..700, to the start of the kernel, because the host waited when it began: sync
                # until 610, malloc 620..660, the rest between two launches that are 345 apart
                (600, 700, (10 + 30 + 10) * US, 10 * US, 40 * US, 0),
            ]
        ),
        "11 host_work": in_us([(620, 660, layout.ALLOCATING_MEMORY, -1, 0, 0)]),
        # No kernel runs beside the copy.
        "11 exposed_copy": in_us([(320, 340, 4096, 20 * US, 0, 0)]),
        "11 stack_sample": in_us([(150, 150, 1, 300 * US, 0, 0)]),  # in the wait for data
    }
    # Copies and fills are work: 20, 270, 470, 520
    assert list_readings(node) == {
        "gpu.busy_ns_total gpu0": [
            (t * US, busy * US)
            for t, busy in (
                (0, 0),
                (320, 0),
                (340, 20),
                (350, 20),
                (600, 270),
                (700, 270),
                (950, 520),
                (1400, 520),
            )
        ]
    }
    assert dict(account.read) == {
        "CUDA calls": 6,
        "kernels": 2,
        "copies": 1,
        "fills": 1,
        "NVTX ranges": 4,
        "samples of stacks": 1,
        "system calls": 3,
    }
    assert account.notes == ["process 11 on device 0: 2 steps, from numbered step ranges"]
    assert account.cut == ""


def test_a_blocking_device_copy_counts_as_a_wait(tmp_path: Path) -> None:
    # The host reads a result: the call returns 5 us after the copy, and the next launch 20 us
    # later; its kernel begins 3 us after that. The second copy is asynchronous: no wait.
    tables = [
        (KERNELS, [(0, 100, 0, 7, 1, P, GEMM), (150, 200, 0, 7, 3, P, GEMM)]),
        (COPIES, [(110, 120, 0, 7, 2, P, 8, 2), (200, 210, 0, 7, 4, P, 8, 2)]),
        (
            CALLS,
            [
                (-9, -4, T, 1, LAUNCH),
                (5, 125, T, 2, COPY),
                (140, 147, T, 3, LAUNCH),
                (148, 152, T, 4, COPY),
            ],
        ),
    ]
    tables = [(table, [(a + 10, b + 10, *rest) for a, b, *rest in rows]) for table, rows in tables]
    (node,), _, _ = import_folder(
        Nsys(), write_database(tmp_path / "a.sqlite", *((t, in_us(rows)) for t, rows in tables))
    )
    kinds = list_spans(node)
    assert kinds["11 sync"] == in_us([(15, 135, layout.WHOLE_NS, 1, 0, 0)])
    # 130..160: the wait until 135, then between launches and until the kernel began
    assert kinds["11 starved"] == in_us([(130, 160, 25 * US, 5 * US, 0, 0)])


MAIN, PROGRESS, WAIT, ADDRESS, LIBRARY, PROGRAM = range(20, 26)
FUNCTIONS = [
    (MAIN, "main"),
    (PROGRESS, "ofi_cq_read"),
    (WAIT, "MPI_Wait"),
    (ADDRESS, "0x7fd99b3515d4"),
    (LIBRARY, "/usr/lib64/libcuda.so.525"),
    (PROGRAM, "/srv/saxpy"),
]


def test_cpu_samples_name_host_code_in_gaps(tmp_path: Path) -> None:
    """Kernels at 0..1 and 101..102 ms; the thread is sampled each ms: main 60, MPI 30, a library 8.

    At 99 and 100 ms it sleeps. Another thread, which launches nothing, does not count.
    """
    samples, stacks = [], []
    for number in range(2, 100):  # ids count from 1, times from 2 ms
        samples.append((number - 1, number * MS, 3, 1, T, 1))
        samples.append((1_000 + number, number * MS, 4, 1, encode_thread_id(11, 12), 1))
        stacks.append((1_000 + number, WAIT, LIBRARY, None, 0))
        if number < 62:
            stacks.append((number - 1, MAIN, PROGRAM, None, 0))
        elif number < 92:
            frames = [(PROGRESS, LIBRARY), (WAIT, LIBRARY), (MAIN, PROGRAM)]
            stacks += [(number - 1, *frame, None, depth) for depth, frame in enumerate(frames)]
        else:
            stacks.append((number - 1, ADDRESS, LIBRARY, 1, 0))
    tables = [
        (KERNELS, [(0, MS, 0, 7, 1, P, GEMM), (101 * MS, 102 * MS, 0, 7, 2, P, GEMM)]),
        (CALLS, [(0, 1_000, T, 1, LAUNCH), (101 * MS - 2_000, 101 * MS - 1_000, T, 2, LAUNCH)]),
        (SAMPLES, samples),
        (STACKS, stacks),
    ]
    file = write_database(tmp_path / "a.sqlite", *tables, names=[*NAMES, *FUNCTIONS])
    (node,), (account,), _ = import_folder(Nsys(), file)
    on_host = layout.COMPUTING_ON_HOST
    assert list_spans(node)["11 host_work"] == [
        (1 * MS, 61 * MS, on_host, 0, 0, 0),
        (61 * MS, 91 * MS, on_host, 1, 0, 0),
        (91 * MS, 99 * MS, on_host, 2, 0, 0),
    ]
    assert account.read["CPU samples"] == 98
    report = analyze(file)
    reasons = {name: round(ns / MS) for name, ns in report.unattributed_reasons}
    assert reasons == {
        "on-host:main": 60,
        "on-host:MPI_Wait": 30,
        "on-host:libcuda.so.525": 8,
        "no-signal": 2,
    }


@pytest.mark.parametrize("missing", ["SAMPLING_CALLCHAINS", "StringIds rows", "unresolved"])
def test_samples_without_stacks_count_as_host_computing(tmp_path: Path, missing: str) -> None:
    stacks = ("SAMPLING_CALLCHAINS", "id symbol module stackDepth")
    rows = [(number, MAIN, PROGRAM, 0) for number in range(9)]
    tables = [
        (KERNELS, [(0, MS, 0, 7, 1, P, GEMM), (9 * MS, 10 * MS, 0, 7, 2, P, GEMM)]),
        (CALLS, [(0, 10, T, 1, LAUNCH), (9 * MS - 20, 9 * MS - 10, T, 2, LAUNCH)]),
        (SAMPLES, [(number, number * MS, 0, 1, T, 1) for number in range(9)]),
    ]
    if missing == "unresolved":
        tables.append((stacks, rows))
    elif missing == "StringIds rows":
        tables.append((STACKS, [(*row[:3], None, row[3]) for row in rows]))
    (node,), (account,), _ = import_folder(Nsys(), write_database(tmp_path / "a.sqlite", *tables))
    assert account.cut == ""
    assert list_spans(node)["11 host_work"] == [(MS, 8 * MS, layout.COMPUTING_ON_HOST, -1, 0, 0)]


@pytest.mark.parametrize("framework", [False, True])
def test_advice_without_a_framework_names_no_framework(framework: bool, tmp_path: Path) -> None:
    kernels, calls, at = [], [], 10
    for n in range(1, 301):  # 5 ms of work, a wait until 1 ms after it, 1 ms to launch
        kernels.append((at, at + 5_000, 0, 7, n, P, GEMM))
        calls += [(at - 1_000, at - 1, T, n, LAUNCH), (at, at + 6_000, T, 1_000 + n, SYNC)]
        at += 7_000
    ranges = [(0, 5, 59, T, "aten::mm, op_id = 3", None, 0)] if framework else []
    calls = [(a + 1_000, b + 1_000, *rest) for a, b, *rest in calls]
    kernels = [(a + 1_000, b + 1_000, *rest) for a, b, *rest in kernels]
    file = write_database(
        tmp_path / "a.sqlite",
        (KERNELS, in_us(kernels)),
        (CALLS, in_us(calls)),
        (NVTX, in_us(ranges)),
    )
    report = analyze(file)
    finding = next(item for item in report.findings if item.cause.id == "h2d-sync")
    advised = {advice.id for advice in finding.advice}
    wanted = {"fetch-metrics-rarely", "look-a-step-later"} if framework else {"wait-once"}
    assert advised == wanted


def rank_rows(pid: int, device: int, *kernels: tuple[int, int, int]) -> list[tuple]:
    return [
        (a, b, device, 7, n, encode_process_id(pid), what)
        for n, (a, b, what) in enumerate(kernels, 1)
    ]


def two_ranks(path: Path) -> Path:
    # Rank 0 comes to each all_reduce at once and waits; rank 1 brings 100 ns more of work.
    first = rank_rows(
        21, 0, (0, 50, GEMM), (50, 170, ALL_REDUCE), (170, 220, GEMM), (220, 340, ALL_REDUCE)
    )
    second = rank_rows(
        22, 1, (0, 150, GEMM), (150, 170, ALL_REDUCE), (170, 320, GEMM), (320, 340, ALL_REDUCE)
    )
    return write_database(path, (KERNELS, first + second))


def test_operations_of_two_ranks_in_a_file_are_matched(tmp_path: Path) -> None:
    (node,), (account,), _ = import_folder(Nsys(), two_ranks(tmp_path / "a.sqlite"))
    group = compute_group_number([0, 1])
    assert list_ranks(node) == {21: (0, None, "gpu0"), 22: (1, None, "gpu1")}
    assert list_groups(node) == {group: [0, 1]}
    recorded_spans = list_spans(node)
    rows = [row[:5] for row in recorded_spans["21 collective"]]
    assert rows == [(50, 170, group, 0, -1), (220, 340, group, 1, -1)]
    assert {decode_operation(row[5]) for row in recorded_spans["22 collective"]} == {
        (layout.ALL_REDUCE, -1)
    }
    assert [row[:5] for row in recorded_spans["22 collective"]] == [
        (150, 170, group, 0, -1),
        (320, 340, group, 1, -1),
    ]
    assert [row[3] for row in recorded_spans["21 exposed_collective"]] == [120, 120]
    assert [row[3] for row in recorded_spans["22 exposed_collective"]] == [20, 20]
    assert "numbered in the order of files and devices" in account.notes[-1]
    assert recorded_spans["21 step"] == [(0, 340, 1, 2, -1, -1)]  # nothing says when a step was


def test_idle_time_is_measured_in_the_window_of_each_process(tmp_path: Path) -> None:
    """A helper fills memory for 1 of 1000 ns, on the device that another process trains on."""
    work = rank_rows(21, 0, (0, 400, GEMM), (500, 1000, GEMM))
    helper = (FILLS, [(600, 601, 0, 7, 9, encode_process_id(99), 0, 64)])
    nodes, (account,), _ = import_folder(
        Nsys(), write_database(tmp_path / "a.sqlite", (KERNELS, work), helper)
    )
    assert [list(list_ranks(node)) for node in nodes] == [[21]]
    assert account.notes[0].endswith("(10.0% of it idle: no kernel, copy, fill or graph)")
    # a second process that does train: 100 ns, of which the device worked for 60 and 40 are idle
    both = [*work[:1], *rank_rows(22, 0, (600, 630, GEMM), (670, 700, GEMM))]
    _, (account,), _ = import_folder(Nsys(), write_database(tmp_path / "b.sqlite", (KERNELS, both)))
    assert [note.partition("(")[2][:5] for note in account.notes[:2]] == ["0.0% ", "40.0%"]


def test_ranks_of_several_files_come_from_launcher_variables(tmp_path: Path) -> None:
    paths = []
    for rank, work in ((1, 150), (0, 50)):
        variables = [
            ("PROCESS_0:ENVIRONMENT_VARIABLE", f'RANK="{rank}"'),
            ("PROCESS_0:ENVIRONMENT_VARIABLE", 'WORLD_SIZE="2"'),
        ]
        rows = rank_rows(30, 0, (0, work, GEMM), (work, 170, ALL_REDUCE))
        start = [(1_700_000_000_000_000_000, "host")]
        paths.append(
            write_database(
                tmp_path / f"of{rank}.sqlite",
                (KERNELS, rows),
                (("META_DATA_CAPTURE", "name value"), variables),
                (("TARGET_INFO_SESSION_START_TIME", "utcEpochNs utcTime"), start),
                (("TARGET_INFO_SYSTEM_ENV", "name value"), [("Hostname", f"node{rank}")]),
            )
        )
    nodes, _, _ = import_folder(Nsys(), *paths)
    assert [(node.name, node.wall_minus_own_ns) for node in nodes] == [
        ("node1", 1_700_000_000_000_000_000),
        ("node0", 1_700_000_000_000_000_000),
    ]
    assert [list_ranks(node)[30][:2] for node in nodes] == [(1, 2), (0, 2)]
    assert [list_groups(node) for node in nodes] == [{compute_group_number([0, 1]): [0, 1]}] * 2


def test_steps_are_inferred_from_optimizer_or_repeated_ranges(tmp_path: Path) -> None:
    kernels = (KERNELS, rank_rows(11, 0, (0, 900, GEMM)))
    calls = (CALLS, [(0, 5, T, 1, LAUNCH)])
    optimizer = [
        (n * 100 + 90, n * 100 + 100, 59, T, "Optimizer.step#SGD.step", None, 0) for n in range(4)
    ]
    repeated = [(n * 100, n * 100 + 80, 59, T, f"epoch 0 chunk {n}", None, 0) for n in range(5)]
    expected = {
        "optimizer": [(100, 200, 1, 2, -1, -1), (200, 300, 2, 2, -1, -1), (300, 400, 3, 2, -1, -1)],
        "repeated": [(n * 100, n * 100 + 80, n + 1, 2, -1, -1) for n in range(5)],
    }
    for name, ranges in (("optimizer", optimizer), ("repeated", repeated)):
        path = write_database(tmp_path / f"{name}.sqlite", kernels, calls, (NVTX, ranges))
        (node,), _, _ = import_folder(Nsys(), path)
        assert list_spans(node)["11 step"] == expected[name]


def test_an_old_file_without_some_tables_is_read(tmp_path: Path) -> None:
    kernels = ("CUPTI_ACTIVITY_KIND_KERNEL", "start end deviceId streamId correlationId shortName")
    path = write_database(
        tmp_path / "old.sqlite",
        (kernels, in_us([(100, 200, 0, 7, 3, GEMM), (260, 300, 0, 7, 4, GEMM)])),
        (CALLS, in_us([(50, 60, T, 3, LAUNCH), (240, 250, T, 4, LAUNCH)])),
    )
    (node,), (account,), _ = import_folder(Nsys(), path)
    assert list_spans(node) == {
        "11 step": in_us([(100, 300, 1, 2, -1, -1)]),
        "11 starved": in_us([(200, 250, 50 * US, 0, 0, 0)]),  # launches 180 apart
    }
    assert "37.5%" not in account.notes[0]
    assert "(30.0% of it idle: no kernel, copy, fill or graph)" in account.notes[0]


def test_impossible_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        (100, 200, 0, 7, 1, P, GEMM),
        (-5, 10, 0, 7, 2, P, GEMM),
        (300, 250, 0, 7, 3, P, GEMM),
        ("x", 10, 0, 7, 4, P, GEMM),
        (None, 10, 0, 7, 5, P, GEMM),
        (1.5, 10, 0, 7, 6, P, GEMM),
        (400, 2**63 - 1, 0, 7, 7, P, GEMM),
        (400, 500, 0, None, "y", P, b"\xff"),
    ]
    ranges = [
        (0, 9, 59, T, "bad \udcff".encode("utf-8", "surrogateescape"), None, 0),
        ("a", 3, 59, T, "step 1", None, 0),
        (9, 3, 59, T, "step 2", None, 0),
    ]
    (node,), (account,), _ = import_folder(
        Nsys(), write_database(tmp_path / "a", (KERNELS, rows), (NVTX, ranges))
    )
    assert list_spans(node) == {"11 step": [(100, 500, 1, 2, -1, -1)]}
    assert dict(account.skipped) == {
        "activities that end before they begin": 1,
        "kernels without start and end": 5,
        "NVTX ranges without start and end": 2,
    }
    assert account.read["kernels"] == 2


def test_reading_a_database_executes_no_sql_from_the_file(tmp_path: Path) -> None:
    path = two_ranks(tmp_path / "a.sqlite")
    db = sqlite3.connect(path)
    # A view and a virtual table under known names, a generated column, a trigger.
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
    db.execute(f"CREATE VIEW NVTX_EVENTS AS {endless} i AS start, i AS [end] FROM n")
    db.execute("CREATE VIRTUAL TABLE CUPTI_ACTIVITY_KIND_MEMCPY USING fts4(start, end)")
    db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (1, 2)")
    heavy = "hex(zeroblob(400000000 + start))"
    db.execute(f"ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN bytes AS (length({heavy}))")
    db.execute("CREATE TRIGGER t AFTER INSERT ON StringIds BEGIN DELETE FROM StringIds; END")
    db.commit()
    db.close()
    before = path.read_bytes()
    (node,), (account,), _ = import_folder(Nsys(), path)
    assert list_ranks(node) == {21: (0, None, "gpu0"), 22: (1, None, "gpu1")}
    assert (dict(account.read), dict(account.skipped)) == ({"kernels": 8}, {})
    assert path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.sqlite"]  # no journal beside it


@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.9])
def test_a_truncated_database_is_read_partly_or_refused(tmp_path: Path, part: float) -> None:
    many = [(n * 10, n * 10 + 5, 0, 7, n + 1, P, GEMM) for n in range(20_000)]
    whole = write_database(tmp_path / "a.sqlite", (KERNELS, many)).read_bytes()
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(whole[: int(part * len(whole))])
    nodes, (account,), why = import_folder(Nsys(), cut)
    assert account.cut or why
    assert (why == "") == bool(nodes)
    assert account.read["kernels"] < 20_000


def test_damaged_pages_never_crash_the_import(tmp_path: Path) -> None:
    whole = two_ranks(tmp_path / "a.sqlite").read_bytes()
    for at in range(100, len(whole), 997):
        broken = tmp_path / "broken.sqlite"
        broken.write_bytes(whole[:at] + b"\xff\x00\xff" * 30 + whole[at + 90 :])
        nodes, accounts, why = import_folder(Nsys(), broken)
        assert nodes or why
        for node in nodes:
            assert len(list_ranks(node)) <= 2
        assert len(accounts) == 1


def test_undecodable_schema_names_are_reported(tmp_path: Path) -> None:
    whole = two_ranks(tmp_path / "a.sqlite").read_bytes()
    broken = tmp_path / "broken.sqlite"
    # The first statement of the schema is none any more: SQLite's message repeats its bytes.
    named = whole.replace(b"StringIds", b"Str\xffngIds")
    broken.write_bytes(named.replace(b"ngIds ([id]", b"ngIds (([id"))
    nodes, _, why = import_folder(Nsys(), broken)
    assert nodes == []
    assert "broken.sqlite: not a readable SQLite file" in why


@pytest.mark.skipif(sys.version_info < (3, 11), reason="SQLite in memory needs Python 3.11")
def test_a_gzipped_database_is_read_in_memory(tmp_path: Path) -> None:
    plain = two_ranks(tmp_path / "a.sqlite")
    packed = tmp_path / "a.sqlite.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    (readings,), _, _ = import_folder(Nsys(), plain)
    (other,), _, _ = import_folder(Nsys(), packed)
    assert list_spans(readings) == list_spans(other)


def test_a_profile_without_device_activity_is_refused(tmp_path: Path) -> None:
    nodes, _, why = import_folder(Nsys(), write_database(tmp_path / "a.sqlite", (NVTX, [])))
    assert (nodes, why) == ([], "the profile has no device activity")
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE runs (id)")
    other.commit()
    other.close()
    head = (tmp_path / "other.db").read_bytes()
    assert not Nsys().recognizes(head, tmp_path / "other.db")


def test_network_adapter_bytes_are_read_in_their_unit(tmp_path: Path) -> None:
    metric = ("NET_NIC_METRIC", "start end globalId metricsListId metricsIdx value")
    rows = [
        (0, 1_000_000, 5, 0, 1, 100.0),
        (1_000_000, 3_000_000, 5, 0, 1, 50.0),
        (0, 1_000_000, 5, 0, 2, 7.0),
    ]
    names = ("TARGET_INFO_NETWORK_METRICS", "metricsListId metricsIdx name unit")
    path = write_database(
        tmp_path / "a.sqlite",
        (KERNELS, rank_rows(11, 0, (0, 9, GEMM))),
        (metric, rows),
        (names, [(0, 1, "IB: Bytes sent", "bytes/ms"), (0, 2, "IB: Bytes received", "furlongs")]),
        (("TARGET_INFO_NIC_INFO", "nicId name"), [(1, "mlx5_0")]),
        (("NIC_ID_MAP", "nicId globalId"), [(1, 5)]),
    )
    (node,), (account,), _ = import_folder(Nsys(), path)
    assert list_readings(node)["rdma.transmit_bytes_total mlx5_0"] == [
        (0, 0),
        (1_000_000, 100),
        (3_000_000, 200),
    ]
    assert dict(account.skipped) == {'network metrics in the unit "furlongs"': 1}


def test_repeated_ranges_with_few_launches_do_not_become_steps(tmp_path: Path) -> None:
    """The first of three moves to the device creates the context; ten kernels follow."""
    moves = [(0, 900, 59, T, "cuda", None, 0), (900, 905, 59, T, "cuda", None, 0)]
    moves.append((905, 910, 59, T, "cuda", None, 0))
    model = [
        (920 + 8 * n, 925 + 8 * n, 59, T, f"layer {'abcdefghij'[n]}", None, 0) for n in range(10)
    ]
    kernels = [(922 + 8 * n, 926 + 8 * n, 0, 7, 10 + n, P, GEMM) for n in range(10)]
    calls = [
        (1, 890, T, 1, MALLOC),
        *((921 + 8 * n, 922 + 8 * n, T, 10 + n, LAUNCH) for n in range(10)),
    ]
    path = write_database(
        tmp_path / "a.sqlite",
        (KERNELS, in_us(kernels)),
        (CALLS, in_us(calls)),
        (NVTX, in_us([*moves, *model])),
    )
    (node,), (account,), _ = import_folder(Nsys(), path)
    assert list_spans(node)["11 step"] == in_us([(922, 998, 1, 2, -1, -1)])
    assert any("no range marks a step" in note for note in account.notes)


def test_host_work_before_the_first_kernel_is_recorded(tmp_path: Path) -> None:
    """The first step begins with a call of 880 ms that creates the context: cudaMalloc."""
    kernels = [(910 * US, 960 * US, 0, 7, 2, P, GEMM), (1010 * US, 1060 * US, 0, 7, 3, P, GEMM)]
    calls = [(10 * US, 890 * US, T, 1, MALLOC)]
    calls += [(900 * US, 905 * US, T, 2, LAUNCH), (1000 * US, 1005 * US, T, 3, LAUNCH)]
    steps = [(n * 1000 * US, (n + 1) * 1000 * US, 59, T, f"step {n}", None, 0) for n in range(2)]
    path = write_database(
        tmp_path / "a.sqlite",
        (KERNELS, in_us(kernels)),
        (CALLS, in_us(calls)),
        (NVTX, in_us(steps)),
    )
    (node,), _, _ = import_folder(Nsys(), path)
    # Idle from 0 to 910 ms: the kernel started 5 ms after its launch had returned.
    assert list_spans(node)["11 starved"][0][:2] == (0, 905 * MS)
    assert (10 * MS, 890 * MS, layout.WARMING_UP) in [
        row[:3] for row in list_spans(node)["11 host_work"]
    ]
