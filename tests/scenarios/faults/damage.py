"""Recordings that are torn, flipped, overwritten or forged, through every command.

A forged frame is valid by length and checksum, and its contents are changed: numbers far away,
other types, fields that are missing. Each mutated recording goes through all commands in a process
of its own with limits of CPU time and memory; a traceback, a death or a limit is a broken promise.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from clusterprof.trace.reader import DamageCounter, NodeReader, Scanner
from clusterprof.trace.segments import format_segment_name
from tests.scenarios.faults.model import Fault, Trial
from tests.scenarios.fuzz.forge import forge_segment, join_raw_frames, read_raw_frames
from tests.support.trace_samples import (
    find_frame_boundaries,
    make_second,
    make_simple_records,
    read_frames,
    write_recording,
)

RECORDINGS = Path(__file__).parents[2] / "recordings"
SOURCES = ("v1", "dlrm-8rank", "h200/sleep")
CPU_SECONDS = 20
"""Of one command on a recording of at most 200 kB."""
WALL_SECONDS = 120
"""Of one command: it may wait for a busy machine, and not for ever."""
MEMORY_BYTES = 1 << 30
"""Of address space, beyond what the process had."""
GOOD_STATUS = range(7)
FLIPS = 500
FUZZED = 100
"""Mutated files of each format in a trial."""


def list_commands(run: Path, healthy: Path, out: Path) -> list[list[str]]:
    """Return every command that reads a recording, with its output formats."""
    exports = ("perfetto", "speedscope", "collapsed", "csv", "json", "openmetrics")
    return [
        ["analyze", str(run)],
        ["analyze", str(run), "--full"],
        ["analyze", str(run), "--json"],
        ["analyze", str(run), "-o", str(out / "report.html")],
        ["analyze", str(run), "-o", str(out / "report.md")],
        ["gate", str(run), "--min-util", "70%", "--max-stall", "storage=5%"],
        ["compare", str(healthy), str(run)],
        ["top", str(run), "--once"],
        ["dump", str(run)],
        *(["export", str(run), "--to", name, "-o", f"{out / name}/"] for name in exports),
    ]


def damage_recording(folder: Path, number: int) -> Trial:
    """Cut, flip, overwrite, repeat or reorder; then every command."""
    return _run_commands(folder, number, (cut, flip, overwrite, repeat, reorder, rename))


def forge_recording(folder: Path, number: int) -> Trial:
    """Change what valid frames hold; then every command."""
    return _run_commands(folder, number, (forge_segment,))


def _run_commands(folder: Path, number: int, mutations: Sequence[Callable[..., None]]) -> Trial:
    draw = random.Random(number)
    source = RECORDINGS / SOURCES[0 if number % 8 else 2] if number % 2 else RECORDINGS / SOURCES[1]
    run, out = folder / "run", folder / "output"
    shutil.copytree(source, run)
    out.mkdir()
    segments = sorted(run.rglob("*.cpf"))
    for _ in range(draw.choice((1, 1, 2, 4))):
        draw.choice(mutations)(draw.choice(segments), draw)
    prepare_process()
    commands = list_commands(run, source, out)
    broken = [words for words in map(run_command, commands) if words]
    assert not broken, "; ".join(broken)
    return Trial(injected=len(commands))


@cache
def prepare_process() -> None:
    """Run every command once, so that what is imported on first use is there before each fork."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        source = RECORDINGS / SOURCES[1]
        for command in list_commands(source, source, Path(name)):
            words = run_command(command, in_process=True)
            assert not words, words


def run_command(command: Sequence[str], in_process: bool = False) -> str:
    """Run a command in a fork with limits; return what was wrong, "" when nothing was."""
    if in_process:
        return _try_command(command)
    return run_in_fork(command[0], lambda: _try_command(command))


def run_in_fork(name: str, call: Callable[[], str]) -> str:
    """Call in a process of its own with limits; return its words, or how it died."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            memory = pages * resource.getpagesize() + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            spent = int(sum(os.times()[:2]))
            resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU_SECONDS, spent + CPU_SECONDS + 5))
            signal.alarm(WALL_SECONDS)
            os.write(writer, call().encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        words = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGXCPU:
        return f"{name}: more than {CPU_SECONDS} s of CPU"
    return words or (f"{name}: died of signal {-status}" if status else "")


def _try_command(command: Sequence[str]) -> str:
    from clusterprof.cli.app import main

    errors = io.StringIO()
    name = " ".join(word for word in command if "/" not in word)
    try:
        output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = main(list(command))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException as error:  # what escapes is what is looked for
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return f"{name}: {type(error).__name__} at {where}: {error}"[:200]
    if "Traceback" in errors.getvalue():
        return f"{name}: a traceback"
    return "" if status in GOOD_STATUS else f"{name}: exit code {status}"


# --- mutations of one segment ---


def cut(path: Path, draw: random.Random) -> None:
    """Keep only the beginning."""
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data) + 1)])


def flip(path: Path, draw: random.Random) -> None:
    """Flip 1 to 32 bits."""
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 4, 32)) if data else 0):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(bytes(data))


def overwrite(path: Path, draw: random.Random) -> None:
    """Overwrite a block with zeros, noise or the magic."""
    data = path.read_bytes()
    at, size = draw.randrange(len(data) + 1), draw.choice((16, 512, 4096))
    noise = draw.choice((bytes(size), draw.randbytes(size), (b"CPF\x01" * size)[:size]))
    path.write_bytes(data[:at] + noise + data[at + size :])


def repeat(path: Path, draw: random.Random) -> None:
    """Write some frames twice."""
    frames = read_raw_frames(path.read_bytes())
    start = draw.randrange(len(frames) + 1)
    path.write_bytes(join_raw_frames([*frames, *frames[start:]]))


def reorder(path: Path, draw: random.Random) -> None:
    """Shuffle the frames, or leave some out."""
    frames = read_raw_frames(path.read_bytes())
    draw.shuffle(frames)
    path.write_bytes(join_raw_frames(frames[: draw.randrange(len(frames) + 1)]))


def rename(path: Path, draw: random.Random) -> None:
    """Move the segment to another number, or put a folder, a link or a pipe in its place."""
    kind = draw.randrange(4)
    target = path.with_name(format_segment_name(draw.choice((2, 9, 999_999))))
    if kind == 0 and not target.exists():
        shutil.copy(path, target)
    elif kind == 1 and not target.exists():
        target.mkdir()
    elif kind == 2 and not target.exists():
        target.symlink_to("/etc/passwd")
    elif not target.exists():
        os.mkfifo(target)


# --- the reader alone ---


@cache
def _write_sample() -> tuple[bytes, tuple[int, ...], int]:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        node = Path(name) / "node"
        write_recording(node, [make_simple_records(), *(make_second(n) for n in range(60))])
        data = (node / "000001.cpf").read_bytes()
        frames, _ = read_frames(node)
    return data, tuple(find_frame_boundaries(data)), len(frames)


def flip_bits(folder: Path, number: int) -> Trial:
    """Flip one bit, 500 times: each costs its frame and no other, and is counted."""
    data, _, frames = _write_sample()
    draw = random.Random(number)
    for _ in range(FLIPS):
        bad = bytearray(data)
        bad[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        count = DamageCounter()
        got = sum(1 for _ in Scanner(io.BytesIO(bad), count).frames())
        assert got == frames - 1, f"{frames - got} frames were lost"
        assert count.damaged_bytes + count.torn_tail_bytes > 0
    return Trial(1.0, FLIPS)


def cut_file(folder: Path, number: int) -> Trial:
    """Cut the file, 500 times: all whole frames before the cut are read."""
    data, starts, _ = _write_sample()
    draw = random.Random(number)
    for at in (draw.randrange(len(data)) for _ in range(FLIPS)):
        whole = sum(end <= at for end in starts[1:])
        count = DamageCounter()
        got = sum(1 for _ in Scanner(io.BytesIO(data[:at]), count).frames())
        assert (got, count.damaged_places) == (whole, 0)
        assert count.torn_tail_bytes == at - starts[whole]
    return Trial(0.0, FLIPS)


def overwrite_blocks(folder: Path, number: int) -> Trial:
    """Overwrite 4 KiB, 20 times: only the frames that it touches are lost."""
    data, starts, _ = _write_sample()
    draw = random.Random(number)
    worst = 0
    for _ in range(20):
        at = draw.randrange(len(data) - 4096)
        noise = draw.choice([bytes(4096), draw.randbytes(4096), b"CPF\x01" * 1024])
        bad = data[:at] + noise + data[at + 4096 :]
        # a frame of which the block repeats the very bytes that were there is whole
        touched = sum(data[start:end] != bad[start:end] for start, end in pairwise(starts))
        segment = folder / "000001.cpf"
        segment.write_bytes(bad)
        reader = NodeReader(segment)
        got = sum(1 for _ in reader.frames())
        assert got == len(starts) - 1 - touched
        assert reader.damage.damaged_bytes + reader.damage.torn_tail_bytes > 0
        worst = max(worst, touched)
    return Trial(float(worst), 20)


# --- files that somebody changed ---


def alter_segments(folder: Path, number: int) -> Trial:
    """Change closed segments without damage, 20 times: all are counted, the gate cannot tell."""
    draw, sealed = random.Random(number), folder / "sealed"
    seconds = [make_second(n) for n in range(60)]
    write_recording(sealed / "node", seconds, segment_bytes=4_000)
    write_recording(folder / "other", [[*second, *make_simple_records()] for second in seconds])
    assert _count_altered(sealed / "node") == 0
    prepare_process()
    for attempt in range(20):
        run = folder / f"run-{attempt}"
        shutil.copytree(sealed, run)
        changed = draw.choice(ALTERATIONS)(run / "node", folder / "other", draw)
        counted = _count_altered(run / "node")
        assert counted == changed, f"{changed} files were changed, {counted} counted"
        status, output = _run_gate(run)
        assert status == 4 and "the recording of node-1 was changed" in output, output
    return Trial(0.0, 20)


def _count_altered(node: Path) -> int:
    reader = NodeReader(node)
    for _ in reader.frames():
        pass
    return reader.damage.altered_segments


def _run_gate(run: Path) -> tuple[int, str]:
    from clusterprof.cli.app import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = main(["gate", str(run), "--min-util", "0%"])
    return status, output.getvalue()


def _forge_until_changed(node: Path, _: Path, draw: random.Random) -> int:
    """Change what valid frames hold; return the number of segments that differ."""
    segment = draw.choice(sorted(node.glob("*.cpf")))
    whole = segment.read_bytes()
    while segment.read_bytes() == whole:
        forge_segment(segment, draw)
    return 1


def _replace(node: Path, other: Path, draw: random.Random) -> int:
    """Put a segment of another recording into the place of one."""
    shutil.copy(other / "000001.cpf", draw.choice(sorted(node.glob("*.cpf"))))
    return 1


def _swap(node: Path, _: Path, draw: random.Random) -> int:
    first, second = draw.sample(sorted(node.glob("*.cpf")), 2)
    first.rename(node / "between")
    second.rename(first)
    (node / "between").rename(second)
    return 2


def _remove(node: Path, _: Path, draw: random.Random) -> int:
    draw.choice(sorted(node.glob("*.cpf"))[1:]).unlink()
    return 1


def _append(node: Path, other: Path, draw: random.Random) -> int:
    """Append whole frames of another recording."""
    with draw.choice(sorted(node.glob("*.cpf"))).open("ab") as file:
        file.write((other / "000001.cpf").read_bytes())
    return 1


def _shorten(node: Path, _: Path, draw: random.Random) -> int:
    """Cut a segment at the end of a frame."""
    segment = draw.choice(sorted(node.glob("*.cpf")))
    data = segment.read_bytes()
    segment.write_bytes(data[: draw.choice(find_frame_boundaries(data)[1:-1])])
    return 1


ALTERATIONS = (
    _forge_until_changed,
    _forge_until_changed,
    _replace,
    _swap,
    _remove,
    _append,
    _shorten,
)


# --- files of other tools ---


@cache
def _open_formats() -> tuple[tuple[Any, Any], ...]:
    """Return importer and numbered inputs of every format that has seeds."""
    from clusterprof.analysis.importers.registry import IMPORTERS
    from tests.scenarios.fuzz.trial import SEEDS, Inputs, cases_in, try_one

    formats = []
    for importer in IMPORTERS:
        cases = cases_in(SEEDS / importer.name)
        for case in cases:
            try_one(importer, case)  # what is imported on first use is there before each fork
        if cases:
            formats.append((importer, Inputs(cases, f"faults-{importer.name}")))
    return tuple(formats)


def fuzz_importers(folder: Path, number: int) -> Trial:
    """Read mutated files of every format: records or a refusal, nothing else."""
    from tests.scenarios.fuzz.trial import try_one

    broken = []
    formats = _open_formats()
    for importer, inputs in formats:

        def read_inputs(importer: Any = importer, inputs: Any = inputs) -> str:
            for at in range(number * FUZZED, (number + 1) * FUZZED):
                try:
                    try_one(importer, inputs.of(at))
                except BaseException as error:  # what escapes is what is looked for
                    return f"{importer.name} input {at}: {type(error).__name__}: {error}"[:200]
            return ""

        words = run_in_fork(importer.name, read_inputs)
        broken += [words] if words else []
    assert not broken, "; ".join(broken)
    return Trial(injected=FUZZED * len(formats))


FAULTS = (
    Fault(
        "file-cut",
        "a file is cut at any byte",
        "500 cuts a trial, read by the scanner of frames",
        cut_file,
        40,
        200,
        "whole frames",
        "cuts",
    ),
    Fault(
        "bit-flipped",
        "a bit of a file flips",
        "500 flips a trial, read by the scanner of frames",
        flip_bits,
        40,
        200,
        "frames for each flip",
        "flips",
    ),
    Fault(
        "block-overwritten",
        "4 KiB of a file are overwritten with zeros, noise or the frames' own mark",
        "20 blocks a trial, read by the reader",
        overwrite_blocks,
        50,
        500,
        "frames for each block",
        "blocks",
    ),
    Fault(
        "recording-altered",
        "closed files of a recording are forged, replaced, swapped, removed, extended, shortened; "
        "all their frames are valid",
        "20 changes a trial, read by the reader and by `gate`",
        alter_segments,
        50,
        500,
        "changes unnoticed",
        "changes",
    ),
    Fault(
        "recording-damaged",
        "a recording is cut, flipped, overwritten, repeated, shuffled; files are folders, links, "
        "pipes",
        "every command in a process of its own, 20 s of CPU and 1 GiB",
        damage_recording,
        100,
        7000,
        counted="commands",
    ),
    Fault(
        "recording-forged",
        "valid frames hold other values: far away, of other types, missing",
        "every command in a process of its own, 20 s of CPU and 1 GiB",
        forge_recording,
        200,
        7000,
        counted="commands",
    ),
    Fault(
        "importers-fuzzed",
        "a file of another tool is mutated: bits, numbers, tokens, lines, nesting",
        f"{FUZZED} mutated files of every format in a trial, 20 s of CPU and 1 GiB for them",
        fuzz_importers,
        100,
        4000,
        counted="files",
    ),
)
