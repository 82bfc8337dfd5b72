"""Mutations of a file: what a fuzzer does to a good one. The same number gives the same bytes."""

from __future__ import annotations

import gzip
import io
import random
import re
import zipfile
from collections.abc import Callable, Sequence

BYTES_AT_MOST = 1 << 18
NUMBERS = (
    b"0",
    b"-1",
    b"1e999",
    b"-1e308",
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"null",
    b"true",
    b'""',
    b"[]",
    b"{}",
    b"2147483648",
    b"4294967296",
    b"9223372036854775807",
    b"-9223372036854775808",
    b"18446744073709551616",
    b"1" + b"0" * 400,
    b"0.1e-400",
    b"1e18",
    b"1e15",
    b"-0",
    b'"1"',
    b"9" * 5000,
    b"65536",
    b"1000000",
)
RUBBISH = (
    b"\x00",
    b"\xff\xfe",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\x1b[2J",
    b"\r",
    b"\x7f",
    b"\\ud800",
    b"\xef\xbb\xbf",
    b"}",
    b"{",
    b"[",
    b"]",
    b'"',
    b",",
    b"\n",
    b"\t",
    b"\\",
)
_TOKEN = re.compile(
    rb'"(?:[^"\\\n]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|[\w.]+|\s+|.', re.DOTALL
)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WINDOW = 2048
"""Tokens are looked for in so much of a file: a long one costs no more than a short one."""


def mutated(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Return a file with one to six things wrong with it."""
    choices = BYTEWISE if b"\0" in data[:64] else MUTATIONS
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        data = rng.choice(choices)(data, others, rng)[:BYTES_AT_MOST]
    chance = rng.random()
    if chance < 0.03:
        packed = gzip.compress(data, 1, mtime=0)
        data = packed[: rng.randrange(len(packed))] if rng.random() < 0.5 else packed
    elif chance < 0.04:
        data = rng.choice(BYTEWISE)(_zipped(data, rng), others, rng)
    return data


def _zipped(data: bytes, rng: random.Random) -> bytes:
    """A zip of one or two members, as they are or deflated."""
    file = io.BytesIO()
    way = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(rng.choice((1, 1, 2))):
            archive.writestr(zipfile.ZipInfo(f"rank{number}.json"), data, way)
    return file.getvalue()


def _at(data: bytes, rng: random.Random) -> int:
    return rng.randrange(len(data) + 1)


def _around(data: bytes, rng: random.Random) -> tuple[int, int]:
    """Where a stretch of a file begins and ends."""
    start = rng.randrange(max(len(data) - _WINDOW, 0) + 1)
    return start, start + _WINDOW


def _flip(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    out = bytearray(data)
    for _n in range(rng.choice((1, 1, 4, 32)) if out else 0):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _set(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    out = bytearray(data)
    if out:
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def _cut(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    return data[: _at(data, rng)]


def _remove(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    a = _at(data, rng)
    return data[:a] + data[a + rng.choice((1, 8, 64, 1024)) :]


def _repeat(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    a = _at(data, rng)
    part = data[a : a + rng.choice((8, 64, 512))]
    return data[:a] + part * rng.choice((2, 2, 2, 10, 10, 100)) + data[a:]


def _pump(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    """One to three characters, very often: what makes a search slow that looks back."""
    a = _at(data, rng)
    part = rng.choice((data[a : a + rng.choice((1, 1, 2, 3))], b" ", b"_", b"1", b"a", b'"', b"a "))
    return data[:a] + part * rng.choice((20, 300, 300, 1000, 1000, 60_000)) + data[a:]


def _splice(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    other = rng.choice(others)
    return data[: _at(data, rng)] + other[_at(other, rng) :]


def _rubbish(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    a = _at(data, rng)
    return data[:a] + rng.choice(RUBBISH) + data[a:]


def _numbers(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    listed = list(_NUMBER.finditer(data, *_around(data, rng)))
    for match in sorted(rng.sample(listed, min(len(listed), rng.choice((1, 1, 5)))), key=_back):
        data = data[: match.start()] + rng.choice(NUMBERS) + data[match.end() :]
    return data


def _back(match: re.Match[bytes]) -> int:
    return -match.start()


def _swap(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    start, end = _around(data, rng)
    tokens = _TOKEN.findall(data[start:end])
    if len(tokens) > 1:
        a, b = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        tokens[a], tokens[b] = tokens[b], tokens[a]
    return data[:start] + b"".join(tokens) + data[end:]


def _retype(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    start, end = _around(data, rng)
    tokens = _TOKEN.findall(data[start:end])
    if tokens:
        tokens[rng.randrange(len(tokens))] = rng.choice(NUMBERS)
    return data[:start] + b"".join(tokens) + data[end:]


def _lines(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    kind = rng.randrange(3)
    if kind == 0:
        rng.shuffle(lines)
    elif kind == 1:
        del lines[rng.randrange(len(lines))]
    else:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return b"\n".join(lines)


def _nest(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    a = _at(data, rng)
    opening = rng.choice((b"[", b'{"a":', b"((", b"[{"))
    return data[:a] + opening * rng.choice((3, 3, 300, 300, 300, 20_000)) + data[a:]


def _whole(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    """Another whole number where one stands in a binary file, of one to eight bytes."""
    width = rng.choice((1, 2, 4, 8))
    a = rng.randrange(max(len(data) - width, 0) + 1)
    value = rng.choice((0, 1, 2, 13, -1, 1 << 8 * width - 1, rng.randrange(256)))
    return data[:a] + (value % (1 << 8 * width)).to_bytes(width, "big") + data[a + width :]


def _page(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    """One block of a binary file in the place of another."""
    size = rng.choice((16, 512, 1024, 4096))
    a, b = (rng.randrange(max(len(data) // size, 1)) * size for _n in range(2))
    return data[:a] + data[b : b + size] + data[a + size :]


Mutation = Callable[[bytes, Sequence[bytes], random.Random], bytes]
MUTATIONS: tuple[Mutation, ...] = (
    _flip,
    _set,
    _cut,
    _remove,
    _repeat,
    _pump,
    _splice,
    _rubbish,
    _numbers,
    _numbers,
    _swap,
    _retype,
    _retype,
    _lines,
    _nest,
)
BYTEWISE: tuple[Mutation, ...] = (
    _flip,
    _flip,
    _set,
    _set,
    _cut,
    _remove,
    _repeat,
    _splice,
    _rubbish,
    _whole,
    _whole,
    _whole,
    _page,
    _page,
)
"""For what is no text."""
