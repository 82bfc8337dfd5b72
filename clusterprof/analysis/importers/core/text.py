"""Text files of lines or of one JSON value, read in blocks; broken parts are left out.

    for line in read_lines(source, account): ...
    value = parse_json(line)

Malformed content raises nothing here, except that a whole file which is not JSON raises
CannotImportError.

glibc heap settings that return freed memory of long tables to the kernel at once.

By default glibc retains blocks of up to 32 MiB, and small allocations settle between them: the
process stays as large as its peak. With another C library nothing is
changed.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.probe import layout

MAX_LINE_BYTES = 1 << 20
MAX_JSON_BYTES = 64 << 20
"""Largest file that holds one JSON value, in bytes. It is kept in memory; files of the supported
formats are much smaller.
"""
MAX_DECODED_BYTES = 192 << 20
"""Largest estimated memory of the decoded values of one file, in bytes."""
_BYTES_PER_SIGN = ((b"{", 150), (b"[", 80), (b",", 60), (b":", 100))
"""Memory in bytes that decoded values take, by the sign they are written with: `[[],[],[]]` takes
thirty times its size.
"""
MAX_TIME_NS = 1 << 62
_SEPARATOR = re.compile(r"[\s,]*")


_ENDING = re.compile(
    r"\.(?:gz|bz2|xz|zst|zip|tar|jsonl?|trace|pt|txt|log|csv|tsv|parquet|pfw|sqlite|db|xml|prom"
    r"|pickle|pkl|html|\d{10,})$",
    re.IGNORECASE,
)
"""Ending of a file of some format, or a timestamp before it."""


_NETWORK_PATH = re.compile(
    r"lustre|gpfs|(^|[/_-])nfs|beegfs|ceph|weka|panfs|daos|juicefs|glusterfs|/afs/", re.IGNORECASE
)
_LOCAL_PATH = re.compile(
    r"^/(tmp|dev/shm|local|raid|l/ssd|mnt/(nvme|ssd)|nvme|scratch/local)\d*(/|$)"
)


def guess_file_system(path: str) -> int:
    """Guess the file system from a path: `layout.STORAGE_LOCAL` and so on, 0 = unknown."""
    if re.match(r"(s3|gs|az|abfss?|hf)://", path):
        return layout.STORAGE_OBJECT
    if _NETWORK_PATH.search(path):
        return layout.STORAGE_NETWORK
    return layout.STORAGE_LOCAL if _LOCAL_PATH.match(path) else 0


def name_trace(path: Path) -> str:
    """Return the name of a file without the endings of its formats; dots within it are kept."""
    name = path.name
    while (shorter := _ENDING.sub("", name)) not in (name, ""):
        name = shorter
    return name


def read_lines(source: Source, account: Account) -> Iterator[bytes]:
    """Yield the lines of a file without line ends; lines over 1 MiB are counted and left out."""
    partial, skipping = b"", False
    for block in source.blocks(1 << 20):
        *lines, last = (partial + block).split(b"\n")
        if lines and skipping:
            lines, skipping = lines[1:], False
        for line in lines:
            if len(line) > MAX_LINE_BYTES:
                account.skipped["lines of more than 1 MiB"] += 1
            else:
                yield line
        partial = b"" if skipping else last
        if len(partial) > MAX_LINE_BYTES:
            account.skipped["lines of more than 1 MiB"] += 1
            partial, skipping = b"", True
    if partial:
        yield partial


def parse_json(data: bytes | bytearray) -> Any:
    """Parse JSON leniently: NaN and bad UTF-8 are accepted; returns None if it is not JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def read_json_bytes(source: Source, max_bytes: int = MAX_JSON_BYTES) -> bytearray:
    """Read a file that is one JSON value.

    Raises: CannotImportError when it is too long or its decoded values would fill the memory.
    """
    data = bytearray()
    for block in source.blocks(1 << 20):
        data += block
        if len(data) > max_bytes:
            raise CannotImportError(
                f"{source.path.name}: more than {max_bytes >> 20} MiB in one JSON value",
                "leave it out",
            )
    if estimate_decoded_bytes(data) > MAX_DECODED_BYTES:
        raise CannotImportError(
            f"{source.path.name}: decoding its JSON would take more than"
            f" {MAX_DECODED_BYTES >> 20} MiB of memory",
            "leave it out",
        )
    return data


def estimate_decoded_bytes(data: bytes | bytearray) -> int:
    """Estimate an upper bound of the memory that decoded JSON takes, in bytes."""
    return 2 * len(data) + sum(
        value_bytes * data.count(sign) for sign, value_bytes in _BYTES_PER_SIGN
    )


def read_json(source: Source) -> Any:
    """Read and parse a file that is one JSON value.

    Raises: CannotImportError when it is too large or not valid JSON.
    """
    value = parse_json(read_json_bytes(source))
    if value is None:
        why = source.damage or "broken, or cut off"
        raise CannotImportError(f"{source.path.name}: not valid JSON ({why})", "copy it again")
    return value


def convert_number(value: Any) -> float | None:
    """Convert a decoded value to a finite float; None for anything else, also booleans."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def parse_number(text: str) -> float | None:
    """Parse text as a finite number; None if it is not one."""
    try:
        return convert_number(float(text))
    except ValueError:
        return None


def convert_to_ns(value: Any, unit_ns: int) -> int | None:
    """Convert a time to integer ns, exactly if it was an integer; None if it is not a time."""
    converted = convert_number(value)
    if converted is None or abs(converted) > MAX_TIME_NS / unit_ns:
        return None
    return int(value) * unit_ns if isinstance(value, int) else round(value * unit_ns)


def read_json_objects(source: Source, account: Account) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that is one JSON list, each as soon as it is complete."""
    decoder = json.JSONDecoder()
    buffer, offset, started = "", 0, False
    for block in source.blocks(1 << 20):
        buffer, offset = buffer[offset:] + block.decode("utf-8", "replace"), 0
        while True:
            separator = _SEPARATOR.match(buffer, offset)  # also matches the empty string
            offset = separator.end() if separator else offset
            if not started:
                offset, started = offset + buffer.startswith("[", offset), True
                continue
            if offset >= len(buffer) or buffer[offset] == "]":
                break
            try:
                value, offset = decoder.raw_decode(buffer, offset)
            except (ValueError, RecursionError):
                break
            if isinstance(value, dict):
                yield value
            else:
                account.skipped["entries that are not JSON objects"] += 1
        if len(buffer) - offset > 8 * MAX_LINE_BYTES:
            break
    if buffer[offset:].strip(" \t\r\n,]"):
        account.cut = account.cut or "broken, or cut off; what came before was read"


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_RETAINED_BYTES = 32 << 20  # the largest threshold that glibc chooses by itself
_EAGER_BYTES = 128 << 10


def set_eager_release() -> None:
    """Release all free heap memory, and from now on each freed table at once.

    Costs a page fault for every page of every table: worthwhile where tables are long and few.
    """
    _set_thresholds(_EAGER_BYTES)


def trim_heap() -> None:
    """Release all free heap memory to the kernel."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def restore_default_retention() -> None:
    """Release all free heap memory and let glibc retain freed blocks again, as by default."""
    _set_thresholds(_RETAINED_BYTES)


def _set_thresholds(mmap_threshold_bytes: int) -> None:
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, mmap_threshold_bytes)
        library.mallopt(_TRIM_THRESHOLD, 2 * mmap_threshold_bytes)
    trim_heap()
