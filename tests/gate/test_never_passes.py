"""A hundred and more inputs that are broken, short, poorly covered, of another schema or swapped:
none of them passes. All are made from one small run that does pass."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clusterprof.errors import ClusterprofError
from clusterprof.gate import Policy, judge_runs, parse_any_rule
from clusterprof.gate.stored_report import load_report
from clusterprof.output.renderers.json import Json
from clusterprof.report.model import Report
from tests.support.gate_runs import draw_step_lengths, make_run

RULES = [
    parse_any_rule(text)
    for text in ("gpu.busy_ratio >= 50%", "stall.storage <= 20%", "step.p50_ns: +50%")
]


def candidate() -> Report:
    return make_run("now", draw_step_lengths(60, seed=1), storage=0.05, started=2)


def baseline() -> Report:
    return make_run("before", draw_step_lengths(60, seed=2), storage=0.05)


def document() -> Any:
    return json.loads(Json().render(candidate()))


def passes(path: Path, *before: Report) -> bool:
    """What the command line does with a stored report."""
    try:
        return (
            judge_runs(load_report(path), RULES, Policy(), (), before or (baseline(),)).exit_code
            == 0
        )
    except ClusterprofError as error:
        assert error.exit_code in (2, 5)
        return False


def cut(text: str) -> Iterator[tuple[str, bytes]]:
    for part in range(25):
        yield f"cut after {part}/25", text[: len(text) * part // 25].encode()
    for part in range(1, 16):
        at = len(text) * part // 16
        yield f"a hole at {part}/16", (text[:at] + text[at + 40 :]).encode()


def bytes_of(text: str) -> Iterator[tuple[str, bytes]]:
    data = text.encode()
    yield "nul bytes", data.replace(b'"emulated"', b"\0\0emulated")
    yield "bad UTF-8", data.replace(b"node-a", b"node-\xff", 1)
    yield "UTF-16", text.encode("utf-16")
    yield "twice", data + data
    yield "a list of it", b"[" + data + b"]"
    yield "NaN", data.replace(b'"coverage_ratio": 1.0', b'"coverage_ratio": NaN', 1)
    yield "1e999", data.replace(b'"coverage_ratio": 1.0', b'"coverage_ratio": 1e999', 1)
    yield "a page of a web server", b"<html>404</html>"
    yield "deep", b'{"format": ' + b"[" * 50_000
    yield "a gate's answer", b'{"format": "clusterprof-gate", "schema_version": 1, "exit_code": 0}'


def change(path: str, value: Any) -> Callable[[Any], None]:
    def apply(document: Any) -> None:
        *way, last = [int(key) if key.lstrip("-").isdigit() else key for key in path.split(".")]
        for key in way:
            document = document[key]
        if value is KeyError:
            del document[last]
        elif callable(value):
            document[last] = value(document[last])
        else:
            document[last] = value

    return apply


CHANGED: dict[str, Any] = {
    "format": "clusterprof-compare",
    "schema_version": 2,
    "emulated": True,
    "ranks": [],
    "metrics": [],
    "steps": None,
    "likeness": None,
    "ledger.lost_ns": 0,
    "ledger.in_step_ns": lambda ns: ns // 2,
    "ledger.buckets": [],
    "ledger.unattributed_ns": 1,
    "ledger.productive_ns": lambda ns: ns + 1,
    "ledger.window_ns": -1,
    "ledger.outside_ns": 1 << 70,
    "ranks.0.steps": 19,
    "ranks.1.steps": 0,
    "ranks.0.coverage_ratio": 0.89,
    "ranks.1.coverage_ratio": None,
    "ranks.0.lost_ns": 0,
    "ranks.0.buckets": [],
    "ranks.1.in_step_ns": 0,
    "ranks.0.coverage_ratio.": 2,
    "nodes.0.damaged_bytes": (64 << 10) + 1,
    "nodes.0.dropped_spans": 101,
    "nodes.0.damaged_bytes.": -1,
    "job.world_size": 4,
    "metrics.0.value": None,
    "metrics.0.value.": 1.7,
    "metrics.0.value..": -0.5,
    "metrics.0.unit": "ns",
    "metrics.0.name": "gpu.busy",
    "metrics.0.bound": "at most",
    "metrics.2.value": 0.0,
    "metrics.3.value": 1.0,
    "metrics.4.value": None,
    "metrics.7.value": None,
    "metrics.8.value": 9.0,
    "metrics.4.bound": "at least",
    "steps.lost_ns": lambda ns: [0] * len(ns),
    "steps.steps": lambda n: n[:-1],
    "steps.lengths": lambda text: text[1:],
    "steps.width": 0,
    "steps.lengths.": lambda text: ["1:1"] * len(text),
    "steps.busy_ns": lambda ns: [2 * x for x in ns],
    "steps.lost.0.ns": lambda ns: [2 * x for x in ns],
    "steps.in_step_ns": lambda ns: [*ns[::-1], 1],
    "likeness.gpu_models": [],
    "likeness.world_size": 3,
    "likeness.batch_size": None,
    "likeness.nodes": 2,
    "likeness.measured_by": ["host-spans"],
    "likeness.started_at_ns": 1,
    "likeness.recordings": ["before-1"],
    "likeness.tokens": 1.0,
    "findings.0.lost_ns": 1,
    "findings.0.grade": "Z",
}
GONE = (
    "format",
    "schema_version",
    "emulated",
    "ledger",
    "ranks",
    "metrics",
    "nodes",
    "steps",
    "likeness",
    "findings",
    "ledger.lost_ns",
    "ranks.0.steps",
    "ranks.0.coverage_ratio",
    "nodes.0.damaged_bytes",
    "metrics.0.value",
    "metrics.0.bound",
    "steps.lost",
    "job",
)


def broken() -> Iterator[tuple[str, bytes]]:
    text = json.dumps(document())
    yield from cut(text)
    yield from bytes_of(text)
    for path, value in CHANGED.items():
        parsed = document()
        change(path.rstrip("."), value)(parsed)
        yield f"{path} changed", json.dumps(parsed).encode()
    for path in GONE:
        parsed = document()
        change(path, KeyError)(parsed)
        yield f"{path} gone", json.dumps(parsed).encode()


def test_the_unmodified_run_passes(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(document()))
    assert passes(path)


def test_broken_short_and_foreign_schema_reports_never_pass(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    tried = 0
    for name, data in broken():
        if json_equal(data):
            continue  # a hole between two values
        path.write_bytes(data)
        assert not passes(path), name
        tried += 1
    assert tried >= 120


def json_equal(data: bytes) -> bool:
    try:
        return bool(json.loads(data) == document())
    except (ValueError, RecursionError):
        return False


def test_swapped_or_duplicated_runs_never_pass() -> None:
    now, before = candidate(), baseline()
    swapped = {
        "baseline and candidate": (before, now),
        "the candidate is its own baseline": (now, now),
        "the baseline is its own baseline": (before, before),
        "a copy under another name": (now, dataclasses.replace(now, title="copy")),
        "a candidate that was cut short": (
            make_run("cut", draw_step_lengths(25, seed=1), storage=0.05, started=2),
            before,
        ),
        "a baseline that was cut short": (
            now,
            make_run("cut", draw_step_lengths(25, seed=2), storage=0.05),
        ),
        "an emulated baseline": (now, dataclasses.replace(before, emulated=True)),
    }
    for name, (ours, theirs) in swapped.items():
        assert judge_runs(ours, RULES, Policy(), (), [theirs]).exit_code == 4, name
    for field, value in (("coverage_ratio", math.nan), ("coverage_ratio", 0.1), ("steps", 3)):
        rank = dataclasses.replace(before.ranks[0], **{field: value})  # type: ignore[arg-type]
        poor = dataclasses.replace(before, ranks=(rank, before.ranks[1]))
        assert judge_runs(now, RULES, Policy(), (), [poor]).exit_code == 4, field
