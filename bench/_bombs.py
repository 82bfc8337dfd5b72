"""Files made to exhaust memory, or to be read without end: one function each."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

from bench._bomb_words import DEEP_IN, EVENT, EVENTS, LINES, NAMES_OF, PUMPED, VALUES

DEEP = 6_000_000
NAMES = 10_000_000
UNFOLDED = 10 << 30
LINE = 2 << 30
_PIECE = 16 << 20


def deflate_repeated(head: bytes, piece: bytes, times: int) -> bytes:
    """Return deflated bytes of a piece again and again, made as fast as one of it."""
    pack = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    first = pack.compress(head) + pack.flush(zlib.Z_FULL_FLUSH)
    again = pack.compress(piece) + pack.flush(zlib.Z_FULL_FLUSH)
    return first + again * times + pack.flush()


def make_zip(data: bytes, names: list[str]) -> bytes:
    """Return a zip whose members all share the same deflated bytes, stored once."""
    sizes = struct.pack("<III", 0, len(data), 0xFFFFFFF0)
    local = b"PK\x03\x04" + struct.pack("<HHHHH", 20, 0, 8, 0, 0) + sizes
    body = local + struct.pack("<HH", 1, 0) + b"x" + data
    listed = b"".join(
        b"PK\x01\x02"
        + struct.pack("<HHHHHH", 20, 20, 0, 8, 0, 0)
        + sizes
        + struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, 0, 0)
        + name.encode()
        for name in names
    )
    count = min(len(names), 0xFFFF)
    end = struct.pack("<HHHHIIH", 0, 0, count, count, len(listed), len(body), 0)
    return body + listed + b"PK\x05\x06" + end


def make_gzip_bomb(folder: Path, head: bytes, piece: bytes) -> Path:
    """10 GB in a gzip."""
    path = folder / "rank0.pt.trace.json.gz"
    data = deflate_repeated(head, piece, UNFOLDED // len(piece))
    path.write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + data + b"\0" * 8)
    return path


def make_zip_bomb(folder: Path, members: int) -> Path:
    """10 GB of white space in a trace, as one member, or as many that overlap."""
    path = folder / "traces.zip"
    data = deflate_repeated(EVENTS, b" " * _PIECE, UNFOLDED // _PIECE)
    path.write_bytes(make_zip(data, [f"rank{n}.json" for n in range(members)]))
    return path


def make_many_members(folder: Path) -> Path:
    """10,000 small members."""
    path = folder / "traces.zip"
    path.write_bytes(
        make_zip(deflate_repeated(EVENTS, b"", 1), [f"rank{n}.json" for n in range(10_000)])
    )
    return path


def make_nested_zip(folder: Path) -> Path:
    """A zip in a zip."""
    inner, path = folder / "inner.zip", folder / "outer.zip"
    inner.write_bytes(make_zip(deflate_repeated(EVENTS, b" " * _PIECE, 640), ["rank0.json"]))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(inner, "inner.zip")
    return path


def make_zstd_bomb(folder: Path) -> Path:
    """10 GB of white space: blocks that each repeat one byte 128 Ki times."""
    path = folder / "rank0.json.zst"
    head = struct.pack("<I", len(EVENTS) << 3)[:3] + EVENTS
    space = struct.pack("<I", (1 << 17) << 3 | 1 << 1)[:3] + b" "
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00\x38" + head + space * (UNFOLDED >> 17))
    return path


def make_deep_nesting(folder: Path, name: str, head: bytes, opening: bytes = b"[") -> Path:
    """A document with brackets that open and never close."""
    path = folder / name
    path.write_bytes(head + opening * (DEEP // len(opening)))
    return path


def make_long_line(folder: Path, name: str, head: bytes) -> Path:
    """A good beginning, a line of 2 GB, and a good line."""
    path = folder / name
    with open(path, "wb") as file:
        file.write(head)
        file.seek(LINE, 1)
        file.write(b"\n" + head.splitlines()[-1] + b"\n")
    return path


def make_many_names(folder: Path, name: str, head: bytes, line: bytes, tail: bytes = b"") -> Path:
    """Ten million lines, each with a name of its own."""
    path = folder / name
    parts = line.count(b"%d")
    with open(path, "wb") as file:
        file.write(head)
        for low in range(0, NAMES, 100_000):
            file.write(b"".join(line % ((n,) * parts) for n in range(low, low + 100_000)))
        file.write(tail)
    return path


def make_regex_bomb(folder: Path, name: str, head: bytes, part: bytes, tail: bytes = b"\n") -> Path:
    """Lines just short of a MiB that repeat one part: slow for a regular expression that
    backtracks."""
    path = folder / name
    path.write_bytes((head + part * ((1_000_000 - len(head)) // len(part)) + tail) * 4)
    return path


def make_many_values(folder: Path, name: str, head: bytes, part: bytes) -> Path:
    """60 MB of JSON that are twenty times as much in memory."""
    path = folder / name
    path.write_bytes(head + part * (60_000_000 // len(part)) + b"0]}")
    return path


def make_sparse_series(folder: Path, count: int) -> Path:
    """Many series, each with one reading at an instant of its own."""
    path = folder / "far.prom"
    with open(path, "wb") as file:
        for n in range(count):
            file.write(b'DCGM_FI_DEV_GPU_UTIL{gpu="%d",Hostname="a"} 50 %d\n' % (n, 1700000000 + n))
    return path


def make_many_ranks(folder: Path) -> Path:
    """A table of step times of a million ranks."""
    path = folder / "steps.csv"
    path.write_bytes(b"rank,step,duration_s\n" + b"".join(b"%d,1,1.5\n" % n for n in range(10**6)))
    return path


def make_many_steps(folder: Path) -> Path:
    """A thousand ranks of which each has had a million steps, in few bytes."""
    row = {"metrics": {"step_time_ms": 5, "input_wait_ms": 1, "forward_ms": 1}}
    rows = {str(n): {**row, "identity": {"global_rank": n}} for n in range(1000)}
    section = {"groups": {"rows": rows}, "global": {"window": {"steps_analyzed": 10**6}}}
    path = folder / "final_summary.json"
    path.write_text(json.dumps({"schema_version": "1.3", "step_time": section}))
    return path


def make_large_world(folder: Path) -> Path:
    """A rank of a job of 10^18, and operations with all of them."""
    comm = (
        b'{"ph":"X","cat":"kernel","name":"ncclDevKernel_AllReduce","pid":0,"tid":7,"ts":1,"dur":5}'
    )
    path = folder / "rank0.json"
    head = b'{"distributedInfo":{"rank":0,"world_size":1000000000000000000},"traceEvents":['
    path.write_bytes(head + EVENT % 1 + comm + b"]}")
    return path


def _make_profile(path: Path, pages: int = 512) -> sqlite3.Connection:
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA page_size = {pages}")
    db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    kernels = "start INTEGER, end INTEGER, deviceId INTEGER, globalPid INTEGER, shortName INTEGER"
    db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({kernels})")
    db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 9, 0, 1, 1)")
    return db


def make_endless_view(folder: Path) -> Path:
    """A profile whose strings are a view that never ends."""
    path = folder / "profile.sqlite"
    with _make_profile(path) as db:
        db.execute("DROP TABLE StringIds")
        db.execute(
            "CREATE VIEW StringIds AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1"
            " FROM n) SELECT id, 'x' AS value FROM n"
        )
    db.close()
    return path


def make_huge_blob(folder: Path) -> Path:
    """A profile with a string of 900 MB."""
    path = folder / "profile.sqlite"
    with _make_profile(path, 4096) as db:
        db.execute("INSERT INTO StringIds VALUES (1, zeroblob(900000000))")
    db.close()
    return path


def make_many_tables(folder: Path) -> Path:
    """A profile of a million tables."""
    path = folder / "profile.sqlite"
    with _make_profile(path) as db:
        db.execute("PRAGMA writable_schema = ON")
        rows = ((f"t{n}", f"t{n}", f"CREATE TABLE t{n} (a)") for n in range(1_000_000))
        db.executemany("INSERT INTO sqlite_master VALUES ('table', ?, ?, 2, ?)", rows)
    db.close()
    return path


def make_cyclic_pages(folder: Path) -> Path:
    """A profile whose table has a tree of 15 levels, each the same page 40 times and more."""
    path = folder / "profile.sqlite"
    with _make_profile(path) as db:
        rows = [(n, n + 1, 0, 1, 1) for n in range(200_000)]
        db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?)", rows)
    db.close()
    data = bytearray(path.read_bytes())
    inner = [page for page in range(1, len(data) // 512) if data[page * 512] == 5]
    leaf = next(page for page in range(3, len(data) // 512) if data[page * 512] == 13)
    chain = [2, *[page for page in inner if page != 2][:14], leaf]  # the third page is the root
    for page, below in pairwise(chain):
        at, number = page * 512, struct.pack(">I", below + 1)
        for (cell,) in struct.iter_unpack(">H", _write_pointers(data, at)):
            data[at + cell : at + cell + 4] = number
        data[at + 8 : at + 12] = number
    path.write_bytes(data)
    return path


def _write_pointers(data: bytearray, at: int) -> bytes:
    (count,) = struct.unpack_from(">H", data, at + 3)
    return bytes(data[at + 12 : at + 12 + 2 * count])


def make_long_tags(folder: Path) -> Path:
    """Names of fields that are paths of long tags, each of them kept."""
    tags = [bytes([65 + n]) * 100_000 for n in range(26)]
    fields = b"".join(b"<f%d>1</f%d>" % (n, n) for n in range(8000))
    path = folder / "smi.xml"
    opened = b"".join(b"<" + tag + b">" for tag in tags)
    path.write_bytes(b"<nvidia_smi_log><gpu>" + opened + fields + b"</gpu></nvidia_smi_log>")
    return path


def _list_bombs() -> Iterator[tuple[str, Callable[[Path], Path]]]:
    for what, head, piece in (
        ("zeros", b"", bytes(_PIECE)),
        ("spaces", b"", b" " * _PIECE),
        ("spaces in a trace", EVENTS, b" " * _PIECE),
        ("events", b'{"traceEvents":[', EVENT % 1 * (_PIECE // 72)),
    ):
        yield f"gzip of 10 GB of {what}", partial(make_gzip_bomb, head=head, piece=piece)
    yield "zip of 10 GB", partial(make_zip_bomb, members=1)
    yield "zip, 4,000 members of 10 GB upon each other", partial(make_zip_bomb, members=4000)
    yield "zip, 10,000 members", make_many_members
    yield "zip in a zip", make_nested_zip
    yield "zstd of 10 GB", make_zstd_bomb
    for name, file, head in DEEP_IN:
        yield f"nest: {name}", partial(make_deep_nesting, name=file, head=head)
    yield (
        "nest: Kineto, objects",
        partial(make_deep_nesting, name="rank0.json", head=EVENTS, opening=b'{"a":'),
    )
    for name, file, head, line, tail in NAMES_OF:
        yield f"names: {name}", partial(make_many_names, name=file, head=head, line=line, tail=tail)
    for name, file, head in LINES:
        yield f"line of 2 GB: {name}", partial(make_long_line, name=file, head=head)
    for name, file, head, part in PUMPED:
        yield f"pump: {name}", partial(make_regex_bomb, name=file, head=head, part=part)
    for name, file, head, part in VALUES:
        yield f"values: {name}", partial(make_many_values, name=file, head=head, part=part)
    yield "nsys: a view without end", make_endless_view
    yield "nsys: a string of 900 MB", make_huge_blob
    yield "nsys: 1,000,000 tables", make_many_tables
    yield "nsys: pages in circles", make_cyclic_pages
    yield "Prometheus: 100,000 series far apart", partial(make_sparse_series, count=100_000)
    yield "Prometheus: 8,000 series far apart", partial(make_sparse_series, count=8_000)
    yield "step times of 1,000,000 ranks", make_many_ranks
    yield "TraceML: 1,000 ranks of 1,000,000 steps", make_many_steps
    yield "Kineto: a world of 10^18 ranks", make_large_world
    yield "nvidia-smi: long tags", make_long_tags


BOMBS: dict[str, Callable[[Path], Path]] = dict(_list_bombs())

if __name__ == "__main__":  # in a process of its own: what it takes is not the analysis's
    print(BOMBS[sys.argv[1]](Path(sys.argv[2])))
