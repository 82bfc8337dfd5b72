"""Define canonical units, the name suffix of each, and their readable format.

Everything stored is in base units: integer nanoseconds, bytes, ratios from 0 to 1,
watts. Percent, milliseconds and gibibytes appear only in `format_quantity()`.

    format_quantity(1_530_000_000, "ns")   '1.53 s'
    format_quantity(0.178, "ratio")        '17.8 %'
    format_quantity(3 << 30, "bytes")      '3.0 GiB'
"""

from __future__ import annotations

import math
import re

# suffix of a signal's name -> unit. Longest suffix first: "_bytes_per_second" before "_bytes".
UNIT_SUFFIXES: tuple[tuple[str, str], ...] = (
    ("_bytes_per_second", "bytes/s"),
    ("_tokens_per_second", "tokens/s"),
    ("_samples_per_second", "samples/s"),
    ("_ns", "ns"),
    ("_bytes", "bytes"),
    ("_ratio", "ratio"),
    ("_watts", "watts"),
    ("_joules", "joules"),
    ("_celsius", "celsius"),
    ("_hertz", "hertz"),
    ("_count", "count"),
    ("_bits", "bits"),
    ("_factor", "factor"),
    ("_cost", "cost"),
)

SECOND_NS = 1_000_000_000  # nanoseconds in a second
SECTOR_BYTES = 512  # unit of /proc/diskstats and getrusage, whatever the device's own sector size


def infer_unit(name: str) -> str:
    """Infer the unit from the suffix of a name.

    A trailing `_total` marks a counter and is ignored; a `_total` without a unit before it
    counts occurrences.
    Raises: ValueError when the name has no unit suffix.
    """
    stem = name.removesuffix("_total")
    for suffix, unit in UNIT_SUFFIXES:
        if stem.endswith(suffix):
            return unit
    if stem != name:
        return "count"
    suffixes = ", ".join(suffix for suffix, _ in UNIT_SUFFIXES)
    raise ValueError(f"the name {name!r} does not end with its unit (one of {suffixes}, or _total)")


def format_quantity(value: float, unit: str) -> str:
    """Format a value in a readable unit: 1.53 s, 17.8 %, 3.0 GiB, 1,234."""
    if unit == "ns":
        return _format_ns(value)
    if unit == "ratio":
        return f"{100 * value:.1f} %"
    if unit in ("bytes", "bytes/s"):
        return _format_bytes(value) + ("/s" if unit == "bytes/s" else "")
    if unit == "count":
        return f"{value:,.0f}"
    if unit == "factor":
        return f"{value:.3f}"
    if unit == "cost":  # in the currency of the profile
        return f"{value:,.2f}"
    symbol = {"watts": "W", "joules": "J", "celsius": "°C", "hertz": "Hz"}.get(unit, unit)
    return f"{value:,.1f} {symbol}"


# unit as written after a number -> (unit, factor); one definition for gate and profiles
_WRITTEN_UNITS: dict[str, tuple[str, float]] = {
    "%": ("ratio", 0.01),
    "ns": ("ns", 1),
    "us": ("ns", 1e3),
    "µs": ("ns", 1e3),
    "ms": ("ns", 1e6),
    "s": ("ns", 1e9),
    "min": ("ns", 60e9),
    "h": ("ns", 3600e9),
    "B": ("bytes", 1),
    "KiB": ("bytes", 1 << 10),
    "MiB": ("bytes", 1 << 20),
    "GiB": ("bytes", 1 << 30),
    "TiB": ("bytes", 1 << 40),
    "kB": ("bytes", 1e3),
    "MB": ("bytes", 1e6),
    "GB": ("bytes", 1e9),
    "TB": ("bytes", 1e12),
    "W": ("watts", 1),
    "Hz": ("hertz", 1),
    "MHz": ("hertz", 1e6),
    "GHz": ("hertz", 1e9),
}
_MAX_QUANTITY_CHARACTERS = 500
_QUANTITY = re.compile(
    r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\s\d]*)\s*", re.ASCII
)


def parse_quantity(text: str) -> tuple[float, str]:
    """Parse a written number and its unit ("" when none is given) into canonical units.

    '5%' -> (0.05, 'ratio'); '250 ms' -> (250e6, 'ns'); '64 MiB' -> (67108864.0, 'bytes');
    '12.5' -> (12.5, '').
    Raises: ValueError with a readable message for any other text.
    """
    if len(text) > _MAX_QUANTITY_CHARACTERS:  # to match tens of thousands of digits takes seconds
        raise ValueError(f"{text[:20] + '…'!r} is not a number with a unit, such as 5% or 64 MiB")
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit, such as 5%, 250 ms or 64 MiB")
    number, written = float(match[1]), match[2]
    if math.isinf(number):
        raise ValueError(f"{text!r} is too large")
    if written == "":
        return number, ""
    if written not in _WRITTEN_UNITS:
        raise ValueError(f"{written!r} is not a unit; choose from {', '.join(_WRITTEN_UNITS)}")
    unit, factor = _WRITTEN_UNITS[written]
    # dividing by 100 is exact where multiplying by 0.01 is not: 7% must equal 0.07
    return (number / 100 if unit == "ratio" else number * factor), unit


def _format_ns(value: float) -> str:
    seconds = abs(value) / SECOND_NS
    sign = "-" if value < 0 else ""
    if seconds >= 5_400:
        return f"{sign}{seconds / 3600:.1f} h"
    if seconds >= 90:
        return f"{sign}{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{sign}{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{sign}{seconds * 1e3:.1f} ms"
    if seconds >= 1e-6:
        return f"{sign}{seconds * 1e6:.1f} µs"
    return f"{sign}{seconds * 1e9:.0f} ns"


def _format_bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable: the loop returns at TiB")
