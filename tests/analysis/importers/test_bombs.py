"""Files made to fill a memory, or to be never read to their end: small ones of each sort.

`python -m bench.bombs` measures the large ones.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core import text
from clusterprof.analysis.importers.core.base import Account, CannotImportError
from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.analysis.importers.core.text import read_json_bytes
from clusterprof.analysis.importers.kineto import event_stream
from clusterprof.analysis.importers.metrics import metric_readings
from clusterprof.analysis.importers.metrics.metric_readings import MetricMapping, MetricReadings
from clusterprof.analysis.importers.nsys.database import DamagedError, Database
from clusterprof.analysis.inputs.foreign import import_inputs
from clusterprof.errors import ClusterprofError, UsageError
from tests.scenarios.fuzz.trial import READ, REFUSED, UNKNOWN, Case, importer_named, try_one

EVENT = b'{"ph":"X","cat":"kernel","name":"gemm","pid":0,"tid":7,"ts":1,"dur":5}'


def deflated(piece: bytes, times: int) -> bytes:
    """Deflated bytes of a piece again and again."""
    pack = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    first = pack.compress(b" ") + pack.flush(zlib.Z_FULL_FLUSH)
    return first + (pack.compress(piece) + pack.flush(zlib.Z_FULL_FLUSH)) * times + pack.flush()


def zipped(data: bytes, count: int, name: bytes = b"%d", method: int = 8, flags: int = 0) -> bytes:
    """A zip of which all members are the same bytes."""
    sizes = struct.pack("<III", 0, len(data), 0xFFFFFFF0)
    body = b"PK\x03\x04" + struct.pack("<HHHHH", 20, flags, method, 0, 0) + sizes + b"\1\0\0\0x"
    names = [name % n for n in range(count)]
    listed = b"".join(
        b"PK\x01\x02"
        + struct.pack("<HHHHHH", 20, 20, flags, method, 0, 0)
        + sizes
        + struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, 0, 0)
        + name
        for name in names
    )
    end = struct.pack("<HHHHIIH", 0, 0, count, count, len(listed), len(body + data), 0)
    return body + data + listed + b"PK\x05\x06" + end


def test_a_zip_bomb_member_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "traces.zip"
    path.write_bytes(zipped(deflated(bytes(1 << 20), 500), 1))
    (source,) = open_sources(path)
    out = 0
    with pytest.raises(UsageError, match="unpacks to more than 250 times its size"):
        for block in source.blocks():
            out += len(block)
    assert 63 << 20 < out <= 64 << 20


def test_zip_member_heads_are_limited_to_64_mib(tmp_path: Path) -> None:
    path = tmp_path / "traces.zip"
    path.write_bytes(zipped(deflated(b" " * (1 << 16), 1), 4096))
    heads = [len(source.head) for source in open_sources(path)]
    assert heads == [16 << 10] * 4096  # 64 MiB / 4096
    path.write_bytes(zipped(deflated(b" " * (1 << 16), 1), 100))
    assert {len(source.head) for source in open_sources(path)} == {64 << 10}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (zipped(b"", 4097), "4,097 members exceed 4,096"),
        (zipped(b"", 70, b"%d" + b"x" * 65_000), "its list of members is 4,5"),
        (zipped(b"", 1, method=12), "compression method 12"),  # bzip2: unfolds without a bound
        (zipped(b"", 1, flags=1), "is encrypted"),
    ],
)
def test_unreadable_archives_are_refused_with_a_reason(
    tmp_path: Path, data: bytes, why: str
) -> None:
    path = tmp_path / "traces.zip"
    path.write_bytes(data)
    with pytest.raises(ClusterprofError, match=why), import_inputs([path]):
        pass


def test_a_zip_member_with_a_wrong_checksum_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "traces.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.json", b"[" + EVENT * 9)
    path.write_bytes(path.read_bytes().replace(b"gemm", b"gexx", 1))
    (source,) = open_sources(path)
    assert b"".join(source.blocks()).count(b"gemm") == 8
    assert source.damage.endswith("(its checksum does not match)")


def test_a_zstd_bomb_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    path = tmp_path / "a.zst"  # blocks of four bytes that stand for 128 KiB each
    space = struct.pack("<I", (1 << 17) << 3 | 1 << 1)[:3] + b" "
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00\x38" + space * 10_000)
    (source,) = open_sources(path)
    with pytest.raises(UsageError, match="unpacks to more than 250 times its size"):
        list(source.blocks())


def test_oversized_json_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_DECODED_BYTES", 10_000)
    (source,) = open_sources(Path("a.json"), b"[" + b"[]," * 50 + b"0]")
    assert len(read_json_bytes(source)) == 153  # 2 x 153 + 51 x 80 + 50 x 60 = 7,386
    (source,) = open_sources(Path("a.json"), b"[" + b"[]," * 70 + b"0]")
    with pytest.raises(CannotImportError, match="decoding its JSON would take more than"):
        read_json_bytes(source)  # 2 x 213 + 71 x 80 + 70 x 60 = 10,306


LONG = 400_000
SLOW = [
    ("prometheus", b'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 5\nDCGM_FI_DEV_GPU_UTIL{', b"a", b"} 5", READ),
    ("prometheus", b"", b" ", b"[", UNKNOWN),
    ("nccl-text", b"NCCL INFO Using network Socket\nNCCL INFO ", b"a", b"\n", REFUSED),
    ("nccl-text", b"NCCL INFO Using network Socket\n", b"a NCCL INFO ", b"\n", REFUSED),
    ("nccl-text", b"NCCL INFO a\nNCCL INFO ", b"NCCL_", b"\n", REFUSED),
    ("nccl-text", b"NCCL INFO a\nNCCL INFO ", b"Channel 0 : 0 ", b"\n", REFUSED),
    ("nccl-text", b"NCCL INFO a\nNCCL INFO ", b"Using network a ", b"\n", REFUSED),
    ("nccl-text", b"NCCL INFO a\n# size ", b"1", b"\n", REFUSED),
    ("dynolog", b"", b"time = 2026-03-21T15:22:47Z data = {", b"\n", UNKNOWN),
    ("step_times", b"rank,step,duration," + b"_" * 65_000, b"", b"x_\n0,1,2,3\n", READ),
    ("dftracer", b'{"ph": 1,', b'"args":{', b"\n", UNKNOWN),
    ("kineto", b'{"a":[', b'{"traceEvents":[[],', b"]}", REFUSED),
    (
        "kineto",
        b'{"traceEvents":[' + EVENT + b',{"ph":"X","cat":"kernel","pid":0,"tid":7,"ts":9,'
        b'"dur":5,"name":"ncclA","args":{"Collective name":"allreduce","Process Group Name":"0",'
        b'"Process Group Ranks":"1',
        b" ",
        b'x"}}]}',
        READ,
    ),
    (
        "kineto",
        b'{"traceEvents":[' + EVENT + b',{"ph":"X","cat":"cpu_op","pid":0,"tid":7,"ts":9,'
        b'"dur":5,"name":"',
        b"torch/_dynamo/convert_frame.py",
        b'"}]}',
        READ,
    ),
]


@pytest.mark.parametrize(("name", "head", "part", "tail", "outcome"), SLOW)
def test_backtracking_inputs_are_read_in_linear_time(
    name: str, head: bytes, part: bytes, tail: bytes, outcome: str
) -> None:
    # Where a search looks back this takes minutes.
    data = head + part * (LONG // max(len(part), 1)) + tail
    assert try_one(importer_named(name), Case("slow", (("rank0.json", data),))) == outcome


def test_repeated_event_list_openings_are_tried_only_64_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []
    parse = staticmethod(lambda text: tried.append(len(text)))
    monkeypatch.setattr(event_stream.EventStream, "parse_document", parse)
    (source,) = open_sources(Path("a.json"), b'{"a":"' + b'"traceEvents":[' * 10_000)
    with pytest.raises(CannotImportError):
        list(importer_named("kineto").nodes([source], [Account(source.path)]))
    assert len(tried) == 64 + 1  # and once for what follows the first of them


def test_excess_series_are_left_out_and_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_readings, "MAX_COLUMNS_PER_HOST", 2)
    monkeypatch.setattr(metric_readings, "MAX_HOSTS", 2)
    monkeypatch.setattr(metric_readings, "MAX_REFUSED_COLUMNS", 2)
    batch, busy = MetricReadings(), MetricMapping("gpu.busy_ratio")
    values = [batch.column(host, busy, gpu) for host in "abc" for gpu in "01"]
    assert [column is not None for column in values] == [True] * 4 + [False] * 2
    assert batch.column("a", busy, "1") is values[1]
    with pytest.raises(CannotImportError, match="2 of one host or 2 hosts"):
        batch.column("a", busy, "2")


def test_a_table_of_too_many_jobs_or_ranks_is_refused() -> None:
    many = b"job,rank,step,duration_s\n" + b"".join(b"%d,0,1,1\n" % n for n in range(1025))
    assert try_one(importer_named("step_times"), Case("jobs", (("a.csv", many),))) == REFUSED
    many = b"rank,step,duration_s\n" + b"".join(b"%d,1,1\n" % n for n in range((1 << 14) + 1))
    assert try_one(importer_named("step_times"), Case("ranks", (("a.csv", many),))) == REFUSED


def test_a_million_identical_steps_are_reduced() -> None:
    row = {"metrics": {"step_time_ms": 5, "input_wait_ms": 1}}
    rows = {str(n): {**row, "identity": {"global_rank": n}} for n in range(1024)}
    section = {"groups": {"rows": rows}, "global": {"window": {"steps_analyzed": 10**6}}}
    data = json.dumps({"schema_version": "1.3", "step_time": section}).encode()
    (source,) = open_sources(Path("final_summary.json"), data)
    account = Account(source.path)
    (node,) = importer_named("traceml").nodes([source], [account])
    assert node._spans[1].rows == 2 * 17  # 2**14 / 1024, and one
    assert "17 of 1,000,000 steps are shown: all have the same times" in account.notes


def test_impossible_rank_numbers_are_ignored() -> None:
    for rank, world, known in (
        (0, 10**18, (0, None)),
        (1 << 17, 1 << 20, (None, None)),
        (3, 8, (3, 8)),
        (0, 0, (0, None)),
    ):
        printed = b'{"distributedInfo":{"rank":%d,"world_size":%d},' % (rank, world)
        (source,) = open_sources(Path("a.json"), printed + b'"traceEvents":[' + EVENT + b"]}")
        (node,) = importer_named("kineto").nodes([source], [Account(source.path)])
        ((_, stated),) = node._ranks.items()
        assert (stated["rank"], stated["world_size"]) == known


def profile(path: Path, rows: int) -> None:
    """A profile with kernels."""
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA page_size = 512")
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER)")
        batch = ((n, n + 1) for n in range(rows))
        db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?)", batch)
    db.close()


def test_cyclic_database_pages_are_reported_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "profile.sqlite"
    profile(path, 100_000)
    data = bytearray(path.read_bytes())
    inner = [page for page in range(1, len(data) // 512) if data[page * 512] == 5]
    leaf = next(page for page in range(2, len(data) // 512) if data[page * 512] == 13)
    for page, below in pairwise([1, *[page for page in inner if page != 1][:14], leaf]):
        at, number = page * 512, struct.pack(">I", below + 1)
        (count,) = struct.unpack_from(">H", data, at + 3)
        for n in range(count):
            (cell,) = struct.unpack_from(">H", data, at + 12 + 2 * n)
            data[at + cell : at + cell + 4] = number
        data[at + 8 : at + 12] = number
    path.write_bytes(data)
    (source,) = open_sources(path)
    with Database(source) as db:
        most = len(data) // 6 + 1  # six bytes a row; a plain count would never end
        assert db.count("CUPTI_ACTIVITY_KIND_KERNEL") == most
        with pytest.raises(DamagedError, match="its pages form a circle"):
            for _ in db.integers("CUPTI_ACTIVITY_KIND_KERNEL", ("start", "end")):
                pass


def test_xml_tags_above_the_length_limit_are_refused() -> None:
    for long, outcome in ((b"A" * 128, READ), (b"A" * 129, REFUSED)):
        data = b"<nvidia_smi_log><gpu><temperature><gpu_temp>5 C</gpu_temp></temperature><" + long
        data += b"><b>1</b></" + long + b"></gpu></nvidia_smi_log>"
        assert try_one(importer_named("nvidia_smi"), Case("tags", (("a.xml", data),))) == outcome
