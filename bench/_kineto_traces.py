"""Make a large trace from a small one: its events many times, each time later and renumbered.

python bench/_kineto_traces.py trace.json.gz big.json --megabytes 500
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
from pathlib import Path

_NUMBERS = re.compile(
    rb'(?P<key>"(?:ts|correlation|id|External id|external id|Ev Idx)"\s*:\s*|ProfilerStep#)'
    rb"(?P<whole>\d+)(?P<rest>(?:\.\d+)?)"
)
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_ROOM_US = 1000


def write_repeated(source: Path, target: Path, size_bytes: int) -> int:
    """Write a trace of at least this size; return how many bytes it has."""
    data = gzip.decompress(source.read_bytes()) if source.suffix == ".gz" else source.read_bytes()
    match = _EVENTS.search(data)
    start = match.end() if match else data.index(b"[") + 1
    end = data.rindex(b"]")
    head, body, tail = data[:start], data[start:end].strip(b" \r\n\t,"), data[end:]
    pieces, numbers, sorts = _split_numbers(body)
    times = [n for n, sort in zip(numbers, sorts) if sort == 0 and n > 0]
    period_us = max(times) - min(times) + _ROOM_US if times else _ROOM_US
    highest = max((n for n, sort in zip(numbers, sorts) if sort == 1), default=0) + 1
    steps = len({n for n, sort in zip(numbers, sorts) if sort == 2})
    by = (period_us, highest, steps)
    written = 0
    with open(target, "wb") as out:
        written += out.write(head)
        turn = 0
        while written < size_bytes:
            if turn:
                written += out.write(b",\n")
            parts = [b""] * (2 * len(numbers) + 1)
            parts[0::2] = pieces
            parts[1::2] = [b"%d" % (n + turn * by[sort]) for n, sort in zip(numbers, sorts)]
            written += out.write(b"".join(parts))
            turn += 1
        written += out.write(tail)
    return written


def _split_numbers(body: bytes) -> tuple[list[bytes], list[int], list[int]]:
    """Pieces between numbers, the numbers, and what each is: time, id, or number of a step."""
    pieces: list[bytes] = []
    numbers: list[int] = []
    sorts: list[int] = []
    at = 0
    for match in _NUMBERS.finditer(body):
        pieces.append(body[at : match.end("key")])
        numbers.append(int(match["whole"]))
        key = match["key"]
        sorts.append(0 if key.startswith(b'"ts"') else 2 if key.startswith(b"Prof") else 1)
        at = match.end("whole")
    pieces.append(body[at:])
    return pieces, numbers, sorts


def main() -> int:
    """Make one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--megabytes", type=int, default=500)
    args = parser.parse_args()
    print(
        write_repeated(args.source, args.target, args.megabytes * 1_000_000),
        "bytes",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
