"""PyTorch execution traces and Chakra graphs, as far as they have times.

## How to make the file

An execution trace has the operators and their order but no times. The times come from a profiler
trace of the same iterations; Chakra links the two:

    chakra_trace_link --rank 0 --chakra-host-trace et_0.json --chakra-device-trace kineto_0.json \\
        --output-file linked_0.json

## How to analyze it

    clusterprof analyze kineto_0.json            # the profiler trace has everything
    clusterprof analyze linked_0.json            # or the linked trace

## What is read

* **Linked traces** (JSON with `schema` and `nodes`): nodes with `ts` and `inclusive_dur`. Those
  with a `cat` of a device (`kernel`, `gpu_memcpy`) or a `stream` are its work, the others are
  operators.
* **Chakra protobuf** (`.et`): nodes with a start and a duration; `is_cpu_op` tells operators from
  device work.
* An execution trace of PyTorch, a graph that has durations only (what `chakra_converter` writes)
  and the JSON of Chakra's feeder (`workload_graph`) have no times: they are refused, with the
  command that adds them.

## How the numbers are computed

As for a Kineto trace. Runtime calls are not in these files, so idle time has no cause.

## What it cannot see

Runtime calls, loaders, steps. Where the trace has no rank, its file name may have it (`rank3`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.wire import (
    WireError,
    decode_text,
    read_fields,
    read_message_bytes,
    read_varint,
)
from clusterprof.analysis.importers.kineto.event_columns import GatheredEvents
from clusterprof.analysis.importers.kineto.event_stream import Args, Document, Event
from clusterprof.analysis.importers.kineto.importer import build_node

MAX_JSON_BYTES, MAX_JSON_NODES = 256 << 20, 1_000_000
"""Largest JSON that is decoded; a node takes some 150 bytes of memory."""
_STEP_MARKS = ("steps", "analyze the profiler trace instead")
_LINK = (
    "analyze the profiler trace of the same run, or add its times: chakra_trace_link"
    " --chakra-host-trace ET --chakra-device-trace KINETO --output-file LINKED"
)
_BATCH = 4096
_MAX_US = 4e15
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_MAX_HEAD_BYTES = 4096


@dataclass(slots=True)
class _Operation:
    """One node of the graph; times in microseconds, NaN if unknown."""

    name: str
    start_us: float
    duration_us: float
    on_device: bool
    lane: str
    category: str = ""


class _JsonNode(msgspec.Struct):
    id: int
    name: str = ""
    ts: float | None = None
    inclusive_dur: float | None = None
    dur: float | None = None
    cat: str | None = None
    stream: int | str | None = None
    tid: int | str | None = None


class _JsonGraph(msgspec.Struct):
    nodes: list[_JsonNode] = []
    workload_graph: msgspec.Raw = msgspec.Raw()


class Chakra:
    """Importer of execution traces and Chakra graphs."""

    name: ClassVar[str] = "chakra"
    title: ClassVar[str] = "PyTorch execution trace or Chakra graph"
    combines_files: ClassVar[bool] = False

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether this is a graph of operators in JSON, or Chakra's protobuf."""
        start = head.lstrip(b" \t\r\n\xef\xbb\xbf")
        if start[:1] == b"{":
            begin = start[:_MAX_HEAD_BYTES]
            is_graph = b'"schema"' in begin and b'"nodes"' in begin and b'"ctrl_deps"' in head
            return is_graph or b'"workload_graph"' in begin
        return _is_protobuf(head, path)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield one node per graph.

        Raises: CannotImportError when a graph has no times, or no work of a device.
        """
        for source, account in zip(sources, accounts):
            is_json = source.head.lstrip(b" \t\r\n\xef\xbb\xbf")[:1] == b"{"
            operations = _read_json(source) if is_json else _read_protobuf(source, account)
            yield _build(operations, source, account)


def _is_protobuf(head: bytes, path: Path) -> bool:
    """Return whether the first message is Chakra's metadata: a version, or attributes."""
    if not path.name.endswith(".et") or len(head) < 4:
        return False
    try:
        length, offset = read_varint(memoryview(head), 0)
        fields = list(read_fields(memoryview(head)[offset : offset + length]))
    except WireError:
        return False
    return bool(fields) and all(number in (1, 2) for number, _ in fields)


def _read_json(source: Source) -> Iterator[_Operation]:
    """Yield the nodes of a JSON graph.

    Raises: CannotImportError when it is too large, damaged, or a graph without times.
    """
    data = bytearray()
    for block in source.blocks(1 << 20):
        data += block
        if len(data) > MAX_JSON_BYTES:
            break
    if len(data) > MAX_JSON_BYTES or data.count(b'"id"') > MAX_JSON_NODES:
        raise CannotImportError(
            f"{source.path.name}: more than {MAX_JSON_BYTES >> 20} MiB or {MAX_JSON_NODES:,} nodes;"
            f" {_LINK}"
        )
    try:
        graph = msgspec.json.decode(data, type=_JsonGraph)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise CannotImportError(
            f"{source.path.name}: not a readable graph ({error}); copy it again"
        ) from error
    if bytes(graph.workload_graph):
        raise CannotImportError(
            f"{source.path.name}: the JSON of Chakra's feeder has durations but no times; {_LINK}"
        )
    for node in graph.nodes:
        duration = node.inclusive_dur if node.inclusive_dur is not None else node.dur
        category = node.cat or ""
        yield _Operation(
            node.name,
            math.nan if node.ts is None else node.ts,
            math.nan if duration is None else duration,
            category in _DEVICE_CATEGORIES or node.stream is not None,
            str(node.stream if node.stream is not None else node.tid),
            category,
        )


def _read_protobuf(source: Source, account: Account) -> Iterator[_Operation]:
    """Yield the nodes of a `.et` file: messages, each after its length."""
    data = read_message_bytes(source)
    offset, is_metadata = 0, True
    try:
        while offset < len(data):
            length, offset = read_varint(data, offset)
            if length > len(data) - offset:
                raise WireError("a node is cut off")
            message, offset = data[offset : offset + length], offset + length
            if not is_metadata:
                yield _read_node(message)
            is_metadata = False
    except WireError as error:
        account.cut = f"damaged: {error}; everything before was read"


def _read_node(message: memoryview) -> _Operation:
    operation = _Operation("", math.nan, math.nan, False, "")
    for number, value in read_fields(message):
        if number == 2:
            operation.name = decode_text(value)[:512]
        elif number == 6 and isinstance(value, int) and value:  # 0 is what an unset field reads as
            operation.start_us = float(value)
        elif number == 7 and isinstance(value, int):
            operation.duration_us = float(value)
        elif number == 10 and not isinstance(value, int):
            _read_attribute(value, operation)
    return operation


def _read_attribute(data: memoryview, operation: _Operation) -> None:
    name = ""
    for number, value in read_fields(data):
        if number == 1:
            name = decode_text(value)
        elif name == "is_cpu_op" and isinstance(value, int):
            operation.on_device = value == 0
        elif name in ("stream", "tid") and isinstance(value, int):
            operation.lane = str(value)


def _build(operations: Iterator[_Operation], source: Source, account: Account) -> NodeTables:
    gathered = GatheredEvents(account)
    batch: list[Event] = []
    count = 0
    base_us = math.nan
    for operation in operations:
        count += 1
        start, duration = operation.start_us, operation.duration_us
        if not (abs(start) < _MAX_US and 0 <= duration < _MAX_US):
            account.skipped["nodes without a time"] += 1
            continue
        base_us = start if math.isnan(base_us) else base_us
        category = operation.category if operation.category in _DEVICE_CATEGORIES else "kernel"
        batch.append(
            Event(
                "X",
                category if operation.on_device else "cpu_op",
                operation.name,
                1,
                operation.lane,
                start - base_us,
                duration,
                Args(-1, 0) if operation.on_device else Args(),
            )
        )
        if len(batch) >= _BATCH:
            gathered.take(batch)
            gathered.kinds.check_refills()
            batch = []
    gathered.take(batch)
    gathered.finish()
    if not gathered.devices:
        damage, account.cut = account.cut, ""
        raise CannotImportError(
            f"{source.path.name}: of {count:,} nodes none is work of a device with a start and a"
            f" duration{f' ({damage})' if damage else ''}; {_LINK}"
        )
    return build_node(gathered, Document(), source, Chakra.name, _STEP_MARKS)
