"""The formats of clusterprof itself that a campaign mutates, each with its seeds and its reader.

A recording comes from another user, a ring and the files of the run directory from processes of the
job, an answer from NCCL, a message from a helper whose driver may have damaged its memory: each
reader must end in values or in a refusal, as an importer must.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.agent.isolation.process import decode_message, encode_message, take_payloads
from clusterprof.agent.processes.registry import ProcessGroupReader, Registry
from clusterprof.agent.processes.span_rings import SpanRings, open_ring
from clusterprof.analysis.cross_rank.hang_evidence import describe_reply
from clusterprof.analysis.job.dives import read_profile
from clusterprof.analysis.pipeline import analyze_with_details
from clusterprof.config.yaml_file import read_chain
from clusterprof.errors import ClusterprofError, Unavailable
from clusterprof.gate.stored_report import load_report
from clusterprof.output.renderers.json import build_document
from clusterprof.probe import layout
from clusterprof.trace.live_tail import NodeTail
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Columns, Record, Rows, Spans
from tests.scenarios.fuzz import forge
from tests.scenarios.fuzz.trial import READ, REFUSED, Case, Inputs, try_whole
from tests.support.ring_writer import NOW_NS, PID, TICKS, RingWriter

ROOT = Path(__file__).parents[3]
RECORDINGS = ROOT / "tests" / "recordings"
LONG_SEGMENT_FRAMES = 12
"""Of a recording of minutes: the first frames, which have records of each kind."""
LOG = (
    b"F\x0d\x00/job/train.py"
    b"N\x00\x00\x01\x00\x00\x00\x04\x00main"
    b"P\x00\x00\x03\x00\x00\x00"
    b"S\x00\x00\x00\x00"
)
"""A file, a function in it, a place in that and a stack, as in docs/design/recording-format.md."""


@dataclass(frozen=True)
class OwnFormat:
    """A format of ours: `seeds` makes the good files, `read_files` reads those of an input.

    forges: frames stay valid, and their contents are changed.
    """

    name: str
    seeds: Callable[[], list[Case]]
    read_files: Callable[[Path, Case], object]
    forges: bool = False
    is_recording: bool = False

    @property
    def cases(self) -> Sequence[Case]:
        """The good files; the same objects each time."""
        return _make_seeds(self)

    def make_generator(self) -> Callable[[int], Case]:
        """Return what gives the input of a number."""
        return ForgedInputs(self.cases).of if self.forges else Inputs(self.cases, self.name).of

    def read(self, case: Case, folder: Path, on_disk: bool = True) -> str:
        """Write a case as files and read them. Raises whatever the reader must not raise."""
        try:
            write_case(case, folder)
            self.read_files(folder, case)
        except ClusterprofError:
            return REFUSED
        finally:
            empty_folder(folder)
        return READ

    def analyze(self, case: Case, folder: Path) -> str | None:
        """Put a recording through the whole analysis; None for other formats, which have none."""
        return try_whole(case, folder) if self.is_recording else None


@cache
def _make_seeds(own_format: OwnFormat) -> tuple[Case, ...]:
    return tuple(own_format.seeds())


class ForgedInputs:
    """Recordings with valid frames that hold other values, by their numbers."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = cases
        self._rng = random.Random()

    def of(self, number: int) -> Case:
        """Return the input of a number."""
        rng = self._rng
        rng.seed((zlib.crc32(b"forged") << 64) + number)
        case = rng.choice(self._cases)
        files = list(case.files)
        for _ in range(rng.choice((1, 1, 2, 4))):
            index = rng.randrange(len(files))
            name, segment = files[index]
            files[index] = name, rng.choice(forge.MUTATIONS)(segment, rng)
        return Case(case.name, tuple(files))


def write_case(case: Case, folder: Path) -> None:
    """Write the files of a case below a folder, readable by this user alone."""
    for name, data in case.files:
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o600)


def empty_folder(folder: Path) -> None:
    """Remove what lies in a folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


# --- recordings ---


def list_recordings() -> list[Case]:
    """Return small recordings: those of version 1, and the first frames of a long one."""
    cases = []
    for folder in sorted(RECORDINGS.glob("*/*-0badcafe-5")) + sorted(RECORDINGS.glob("*/*/vm-*")):
        files = []
        for path in sorted(folder.glob("*.cpf")):
            frames = forge.read_raw_frames(path.read_bytes())[:LONG_SEGMENT_FRAMES]
            files.append((path.name, forge.join_raw_frames(frames)))
        cases.append(Case(folder.parent.name, tuple(files)))
    return cases


def read_recording(folder: Path, _: Case) -> None:
    """Read all records in both ways, and follow the recording as `top` does."""
    for record in NodeReader(folder):
        for column in _list_columns(record):
            np.asarray(column).sum()
    for _packed in NodeReader(folder, accepts_implausible_times=True).packed():
        pass
    tail = NodeTail(folder)
    tail.poll(60 * 10**9)
    for _record in tail.records(0):
        pass


def _list_columns(record: Record) -> Sequence[Any]:
    if isinstance(record, Columns):
        return [record.t_ns, *record.values]
    if isinstance(record, Rows):
        return record.columns
    return list(record.columns.values()) if isinstance(record, Spans) else ()


# --- what the processes of the job write ---


def make_ring() -> list[Case]:
    """Return the ring of a process with records of several kinds, a name and a log."""
    writer = RingWriter(capacity=32, log_bytes=4096)
    for number in range(40):
        kind = (layout.STEP, layout.DATA_WAIT, layout.COLLECTIVE, layout.FIRST_USER_KIND)[
            number % 4
        ]
        writer.put(kind, 1 + number * 1000, 900 + number * 1000, number)
    writer.write_log(LOG)
    data = bytes(writer.memory)
    writer.close()
    return [Case("ring", (("rings/ring", data),))]


def read_ring(folder: Path, _: Case) -> None:
    """Open a ring and take all that it holds, as of a living and of an ended process."""
    try:
        ring = open_ring(str(folder / "rings" / "ring"), PID, TICKS, memory_file=False)
    except Unavailable as error:
        raise ClusterprofError(error.message) from error
    try:
        for ring.ended in (False, False, True):
            ring.look()
            ring.take(NOW_NS)
            ring.take_definitions()
            ring.under_way(NOW_NS, final=ring.ended)
            ring.switched_off()
        ring.take_definitions(repeat=True)
    finally:
        ring.close()


def make_run_directory() -> list[Case]:
    """Return a run directory in which a process announces itself, its ring and a group."""
    process = {"pid": PID, "started_ticks": TICKS}
    registration = {
        **process,
        "role": "command",
        "variables": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "SLURM_JOB_ID": "77"},
        "device": "0",
        "script": "train.py",
    }
    group = {"pid": PID, "group": 3, "ranks": [0, 1], "name": "tp"}
    ((_, data),) = make_ring()[0].files
    files = (
        (f"register/{PID}.json", json.dumps(registration).encode()),
        (f"groups/{PID}.3.json", json.dumps(group).encode()),
        (f"rings/{PID}.json", json.dumps({**process, "path": f"{PID}.ring"}).encode()),
        (f"rings/{PID}.ring", data),
    )
    return [Case("run-directory", files)]


def read_run_directory(folder: Path, _: Case) -> None:
    """Take registrations, groups and rings, as the recorder does until it ends."""
    registry, groups, rings = Registry(folder), ProcessGroupReader(folder), SpanRings(folder)
    try:
        registry.look(NOW_NS)
        rings.look(NOW_NS)
        rings.look(NOW_NS)
        for source in (registry, groups, rings):
            source.take(NOW_NS)
            source.finish(NOW_NS)
    finally:
        rings.close()
        registry.close()


# --- other files and answers ---


def make_report() -> list[Case]:
    """Return the stored report of the recording of version 1."""
    report = analyze_with_details([RECORDINGS / "v1"]).report
    return [Case("v1", (("report.json", json.dumps(build_document(report)).encode()),))]


def make_profiles() -> list[Case]:
    """Return a profile for recording and one for a gate."""
    short = b"extends: default\nsampling: {hz: 5}\nrecording:\n  max_bytes: 2 GiB\n"
    gate = (
        b'extends: ci\ngate:\n  assertions:\n    - "gpu.busy_ratio >= 70%"\n'
        b'  regressions: ["step.p50_ns: +5%"]\n  min_steps: 20\n  min_coverage_ratio: 90%\n'
    )
    return [Case("short", (("a.yaml", short),)), Case("gate", (("a.yaml", gate),))]


def make_ras_answers() -> list[Case]:
    """Return an answer of NCCL's RAS service as JSON, and one as text."""
    ranks = [
        {"rank": rank, "host": "node-1", "pid": 100 + rank, "collective_counts": {"AllReduce": 811}}
        for rank in range(3)
    ]
    missing = [{"rank": 3, "host": "node-2", "pid": 9, "status": {"considered_dead": True}}]
    ranks[2] = {**ranks[2], "collective_counts": {"AllReduce": 810, "Broadcast": 1}}
    communicator = {"hash": "0x5f", "size": 4, "ranks": ranks, "missing_ranks": missing}
    document = json.dumps({"nccl_version": "2.28.3", "communicators": [communicator]})
    text = "Job summary\n\nErrors\n======\n\nDEAD\n  1 process is dead\n\nWarnings\n========\n"
    return [
        Case("json", (("answer", b"RAS\n" + document.encode()),)),
        Case("text", (("answer", text.encode()),)),
    ]


def make_dive_trace() -> list[Case]:
    """Return a window of PyTorch's profiler, compressed."""
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur}
        for name, ts, dur in (("aten::linear", 1000, 500), ("aten::addmm", 1100, 300))
    ]
    events.append({**events[0], "cat": "kernel", "name": "gemm", "tid": 7})
    data = json.dumps({"traceEvents": events}).encode()
    return [
        Case("trace", (("trace.json", data),)),
        Case("gz", (("trace.gz", gzip.compress(data)),)),
    ]


def read_dive_trace(folder: Path, case: Case) -> None:
    """Read a window; one that is not compressed is compressed first."""
    name, data = case.files[0]
    path = folder / name
    if name.endswith(".json"):
        path.write_bytes(gzip.compress(data, 1))
    try:
        read_profile(path, 2, 4_000_000)
    except Unavailable as error:
        raise ClusterprofError(error.message) from error


def make_messages() -> list[Case]:
    """Return messages between the recorder and a helper."""
    messages = [["sample", 0, 17, {"busy_rate": 0.25, "name": "GPU", "none": None}], [True, [], -1]]
    return [Case("messages", (("pipe", b"".join(map(encode_message, messages))),))]


def read_messages(_: Path, case: Case) -> None:
    """Decode the messages in what came through a pipe."""
    buffer = bytearray(case.files[0][1])
    try:
        for payload in take_payloads(buffer):
            decode_message(payload)
    except ValueError as error:  # the helper counts as dead
        raise ClusterprofError(str(error)) from error


OWN_FORMATS = (
    OwnFormat("recording", list_recordings, read_recording, is_recording=True),
    OwnFormat("recording-forged", list_recordings, read_recording, True, is_recording=True),
    OwnFormat("ring", make_ring, read_ring),
    OwnFormat("run-directory", make_run_directory, read_run_directory),
    OwnFormat("report", make_report, lambda folder, _: load_report(folder / "report.json")),
    OwnFormat("profile", make_profiles, lambda folder, _: read_chain("./a.yaml", folder)),
    OwnFormat(
        "ras-answer",
        make_ras_answers,
        lambda _, case: describe_reply(case.files[0][1].decode("utf-8", "replace")),
    ),
    OwnFormat("dive-trace", make_dive_trace, read_dive_trace),
    OwnFormat("helper-message", make_messages, read_messages),
)
