"""Read one node's recording: every whole frame, whatever happened to the rest.

    for record in (reader := NodeReader(list_node_folders(path)[0])):
        ...
    reader.damage.damaged_places      # 0 in a healthy recording

No byte is trusted: a frame counts when its checksum is right. After anything else the search
continues one byte later for the next magic with a valid frame, so that a wrong length hides
nothing. One frame is in memory at a time, and a recording that is still being written is read
up to its last whole frame.

It also finds the nodes of a job in the given recordings, each of them once:

    find_nodes([Path("host1"), Path("host2"), Path("shared/run")])

Recordings may come from node-local disks, some twice. A path is a recording, a node's folder
in it, or a segment of one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from clusterprof.errors import NoRecording
from clusterprof.trace import frame
from clusterprof.trace.decoder import Decoder, PackedSpans, UnknownLayoutError
from clusterprof.trace.plausibility import ImplausibleError, TimeFilter
from clusterprof.trace.remote import RemotePath, resolve_path
from clusterprof.trace.schema import Header, Record
from clusterprof.trace.segments import (
    SUFFIX,
    find_missing_segments,
    format_segment_name,
    is_segment,
    list_names,
    list_segments,
    merge_segments,
    read_digests,
)

if TYPE_CHECKING:
    import hashlib

_CHUNK_BYTES = 1 << 20
_SEARCH_BUDGET_BYTES = 64 << 20
_SEARCH_BUDGET_FACTOR = 16
_MAX_LISTED = 12
"""Recordings named in the message about a folder that holds several."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What the last reading of a node had to skip."""

    damaged_bytes: int = 0
    """Bytes skipped before, between or after whole frames."""
    damaged_places: int = 0
    """Number of contiguous ranges these bytes form."""
    torn_tail_bytes: int = 0
    """Bytes at the end of a file: a frame that was being written when the recorder stopped."""
    frames_read: int = 0
    unknown_frames: int = 0
    """Whole frames that this version cannot interpret, or that are invalid."""
    implausible_records: int = 0
    """Records of valid frames that say what no recorder writes (trace.plausibility)."""
    implausible_example: str = ""
    """What is wrong with the first of them."""
    implausible_attributes: int = 0
    """Attributes of events that no recorder writes; the events were read without them."""
    altered_segments: int = 0
    """Segments that differ from their listed SHA-256, or are gone; complete when all was read."""
    altered_example: str = ""
    """Name of the first of them."""


class DamageCounter:
    """Counts damage over all segments of a node."""

    def __init__(self) -> None:
        self.damaged_bytes = self.damaged_places = self.torn_tail_bytes = 0
        self.frames_read = self.unknown_frames = self.implausible_records = 0
        self.implausible_example, self.implausible_attributes = "", 0
        self.altered_segments, self.altered_example = 0, ""
        self.bytes_read = self.bytes_searched = 0

    def damage(self) -> Damage:
        """Return the damage counted so far."""
        return Damage(**{field.name: getattr(self, field.name) for field in fields(Damage)})

    def add_implausible(self, records: int, example: str, attributes: int = 0) -> None:
        """Count records and attributes that say what no recorder writes."""
        self.implausible_records += records
        self.implausible_attributes += attributes
        self.implausible_example = self.implausible_example or example

    def add_altered(self, names: Sequence[str]) -> None:
        """Count segments that are not as the recorder closed them."""
        self.altered_segments += len(names)
        self.altered_example = self.altered_example or "".join(names[:1])

    def may_search(self, size: int) -> bool:
        """Return whether another candidate frame of this size may be checked.

        A hostile file full of heads that announce megabytes would otherwise cost hours;
        accidental damage never comes near the limit.
        """
        if (
            self.bytes_searched + size
            > _SEARCH_BUDGET_BYTES + _SEARCH_BUDGET_FACTOR * self.bytes_read
        ):
            return False
        self.bytes_searched += size
        return True


class Scanner:
    """Scans one file front to back, with one frame and one chunk in memory."""

    def __init__(
        self, file: BinaryIO, count: DamageCounter, digest: hashlib._Hash | None = None
    ) -> None:
        """Take a file; `digest` is updated with all that is read."""
        self._file = file
        self._digest = digest
        self._count = count
        self._data = bytearray()
        self._at = 0  # in the data: where the next frame should begin

    def frames(self) -> Iterator[frame.Frame]:
        """Yield the whole frames; bytes between them are counted as damage."""
        skipped = 0  # bytes since the end of the last whole frame
        torn = False  # what was skipped looks like a frame that was never finished
        while self._ensure_bytes(1):
            size = self._frame_here(searching=skipped > 0)
            if size > 0:
                if skipped:
                    self._count.damaged_places += 1
                    self._count.damaged_bytes += skipped
                    skipped = 0
                payload_bytes = size - frame.HEAD_BYTES
                try:
                    scanned = frame.unpack_frame(self._data, self._at, payload_bytes)
                except frame.FrameError:
                    self._count.unknown_frames += 1
                else:
                    yield scanned
                self._at += size
                continue
            if not skipped:
                torn = size == _UNFINISHED
            skipped += self._skip()
        if torn and skipped:
            self._count.torn_tail_bytes += skipped
        elif skipped:
            self._count.damaged_places += 1
            self._count.damaged_bytes += skipped

    def _frame_here(self, searching: bool) -> int:
        """Return the size of the whole frame here; else _NO_FRAME or _UNFINISHED."""
        have = self._ensure_bytes(frame.HEAD_BYTES)
        if have < frame.HEAD_BYTES:
            start = bytes(self._data[self._at : self._at + len(frame.MAGIC)])
            return _UNFINISHED if frame.MAGIC.startswith(start) else _NO_FRAME
        payload_bytes = frame.read_payload_length(self._data, self._at)
        if payload_bytes is None:
            return _NO_FRAME
        size = frame.HEAD_BYTES + payload_bytes
        if self._ensure_bytes(size) < size:
            return _UNFINISHED
        if searching and not self._count.may_search(size):
            return _NO_FRAME
        return size if frame.has_valid_checksum(self._data, self._at, payload_bytes) else _NO_FRAME

    def _skip(self) -> int:
        """Advance to the next place where a frame might begin; return the distance."""
        position = self._data.find(frame.MAGIC, self._at + 1)
        if position < 0:
            # The magic may lie across the end of what was read.
            position = max(self._at + 1, len(self._data) - len(frame.MAGIC) + 1)
        skipped = position - self._at
        self._at = position
        return skipped

    def _ensure_bytes(self, wanted: int) -> int:
        """Read until `wanted` bytes are available from here on; return how many there are."""
        have = len(self._data) - self._at
        if have >= wanted:
            return have
        if self._at:
            del self._data[: self._at]
            self._at = 0
        while len(self._data) < wanted:
            chunk = self._file.read(max(_CHUNK_BYTES, wanted - len(self._data)))
            if not chunk:
                break
            self._data += chunk
            if self._digest is not None:
                self._digest.update(chunk)
            self._count.bytes_read += len(chunk)
        return len(self._data)


_NO_FRAME = 0
_UNFINISHED = -1


_Kind = TypeVar("_Kind")


def list_node_folders(path: Path) -> tuple[Path, ...]:
    """List the nodes of a recording: its subfolders, or the one folder or segment given.

    Raises: NoRecording with a description of the path when there is none.
    """
    path = resolve_path(path)
    require_permission(path)
    if path.is_file():
        if path.name.endswith(SUFFIX):
            return (path,)
        raise NoRecording(
            f"{path}: not a recording (no {SUFFIX} file)",
            "give the folder that `clusterprof record` wrote",
        )
    try:
        names = list_names(path)
    except OSError as error:
        raise NoRecording(
            f"{path}: {(error.strerror or str(error)).lower()}",
            "give the folder that `clusterprof record` wrote",
        ) from error
    if any(map(is_segment, names)):
        return (path,)
    nodes = tuple(path / name for name in names if list_segments(path / name))
    if not nodes:
        raise _build_empty_folder_error(path)
    return nodes


def find_new_node_folders(paths: Sequence[Path], known_folders: Collection[Path]) -> list[Path]:
    """Find the folders of nodes that have appeared in some recordings that still grow.

    known_folders: folders found before. A recording that has vanished, or has no node yet, is
    passed over if another has one. Raises: NoRecording when there is none at all.
    """
    folders: list[Path] = []
    for path in paths:
        try:
            folders += list_node_folders(path)
        except NoRecording:
            if not known_folders and len(paths) == 1:
                raise
    if not known_folders and not folders:
        list_node_folders(paths[0])  # raises the error that describes the path
    return [folder for folder in dict.fromkeys(folders) if folder not in known_folders]


def _build_empty_folder_error(path: Path) -> NoRecording:
    """Return the error for a folder without a readable recording of its own."""
    inside = list_recordings_inside(path)
    denied = [] if inside else list_unreadable_folders(path)
    if denied:
        return build_denied_error(denied[0].path)
    if not inside:
        return NoRecording(
            f"{path}: no recording in this folder (no {SUFFIX} files)",
            "give the folder that `clusterprof record` wrote",
        )
    if len(inside) == 1:
        return NoRecording(f"{path}: the recording is in {inside[0]}", f"give {inside[0]}")
    names = [str(folder) for folder in inside[:_MAX_LISTED]]
    suffix = f" and {len(inside) - _MAX_LISTED:,} older ones" if len(inside) > _MAX_LISTED else ""
    return NoRecording(
        f"{path}: holds {len(inside):,} recordings of different jobs, newest first:"
        f" {', '.join(names)}{suffix}",
        f"give one of them, for example {names[0]}",
    )


def list_recordings_inside(path: Path) -> list[Path]:
    """List the subfolders of a folder that are recordings, the one written last first."""
    written: list[tuple[float, Path]] = []
    try:
        folders = [Path(entry.path) for entry in os.scandir(path) if entry.is_dir()]
    except (OSError, TypeError):  # an object store is not searched
        return []
    for folder in folders:
        try:
            if list_segments(folder):
                continue  # a node of this recording
            nodes = [folder / name for name in list_names(folder)]
            written += [(read_write_time(node), folder) for node in nodes if list_segments(node)]
        except OSError:
            continue
    newest_first = sorted(written, key=lambda item: (-item[0], item[1]))
    return list(dict.fromkeys(folder for _, folder in newest_first))


def read_write_time(node: Path) -> float:
    """Return when a node's newest segment was last written, seconds since 1970; 0 without one."""
    try:
        if node.is_file():
            return node.stat().st_mtime
        return max((segment.stat().st_mtime for segment in list_segments(node)), default=0.0)
    except OSError:
        return 0.0


def require_permission(path: Path) -> None:
    """Check that this user may read a path; one that does not exist is accepted.

    Raises: NoRecording with the owner and the mode of what may not be read.
    """
    if isinstance(path, RemotePath):
        return
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            os.scandir(path).close()
        else:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError:
        raise build_denied_error(path) from None
    except OSError:
        return  # reported where the path is read


def build_denied_error(path: Path) -> NoRecording:
    """Return the error for a path that this user may not read: what, why, and what to do."""
    closed = path
    for parent in reversed(path.absolute().parents):
        if not os.access(parent, os.X_OK):
            closed = parent
            break
    try:
        status = os.stat(closed)
        of = f"{closed} belongs to {_get_user_name(status.st_uid)}"
        why = f"{of} and has mode {stat.S_IMODE(status.st_mode):04o}"
    except OSError:
        why = "a folder above it is closed"
    return NoRecording(
        f"{path}: permission denied: {why}; you are {_get_user_name(os.geteuid())}",
        f"ask its owner for `chmod -R g+rX {closed}`, or to record with --mode 0750;"
        " or analyze as that user",
    )


def _get_user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


class NodeReader:
    """The records of one node, in the order in which they were written; can be iterated
    repeatedly.
    """

    def __init__(self, folder: Path, accepts_implausible_times: bool = False) -> None:
        """Take the folder of a node, or a single segment; nothing is opened yet.

        accepts_implausible_times: return also records whose times disagree with all others.
        """
        self._accepts_implausible_times = accepts_implausible_times
        self.path = folder
        self._count = DamageCounter()
        self._segment: tuple[int, FileIO | None] = (0, None)

    @property
    def damage(self) -> Damage:
        """Damage found by the last iteration so far; complete when it has finished."""
        return self._count.damage()

    @property
    def read_bytes(self) -> int:
        """Progress of the last iteration: bytes of all segments read so far."""
        before, file = self._segment
        return before + (0 if file is None or file.closed else file.tell())

    def __iter__(self) -> Iterator[Record]:
        for records in self.frames():
            yield from records

    def frames(self) -> Iterator[list[Record]]:
        """Yield the records of each frame together; never raises for invalid bytes."""
        return self._filter(Decoder.records)

    def packed(self) -> Iterator[list[Record | PackedSpans]]:
        """Yield the records of each frame, leaving columns encoded that are cheaper to decode in
        bulk.
        """
        return self._filter(Decoder.packed)

    def _filter(
        self, decode: Callable[[Decoder, frame.Frame], list[_Kind]]
    ) -> Iterator[list[_Kind]]:
        """Yield the records whose times agree with those of other frames."""
        count = self._count = DamageCounter()
        if self._accepts_implausible_times:
            yield from self._decode(decode, count)
            return
        times = TimeFilter(self._has_first_segment())
        yield from times.filter_frames(self._decode(decode, count))
        count.add_implausible(times.refused, times.example)

    def _has_first_segment(self) -> bool:
        segments = [self.path] if self.path.is_file() else list_segments(self.path)
        return not segments or segments[0].name == format_segment_name(1)

    def _decode(
        self, decode: Callable[[Decoder, frame.Frame], list[_Kind]], count: DamageCounter
    ) -> Iterator[list[_Kind]]:
        decoder = Decoder()
        searched = False
        for source in self._scan(count):
            try:
                try:
                    records = decode(decoder, source)
                except UnknownLayoutError:
                    if searched:
                        raise
                    searched = True  # once; it may be in any segment
                    for definition in self._scan(DamageCounter()):
                        decoder.add_layouts(definition)
                    records = decode(decoder, source)
            except ImplausibleError as error:
                count.add_implausible(1, str(error))
                continue
            except frame.FrameError:
                count.unknown_frames += 1
                continue
            count.frames_read += 1
            count.add_implausible(0, "".join(decoder.problems[:1]), len(decoder.problems))
            decoder.problems.clear()
            yield records

    def _scan(self, count: DamageCounter) -> Iterator[frame.Frame]:
        before = 0
        is_alone = self.path.is_file()
        digests = read_digests(self.path.parent if is_alone else self.path)
        segments = [self.path] if is_alone else list_segments(self.path)
        for segment in segments:
            try:
                with segment.open("rb", buffering=0) as file:
                    self._segment = before, file
                    listed = digests.get(segment.name)
                    digest = sha256() if listed else None
                    yield from Scanner(file, count, digest).frames()
                    if digest is not None and digest.hexdigest() != listed:
                        count.add_altered([segment.name])
                    before += file.tell()
                    self._segment = before, None
            except FileNotFoundError:
                continue  # removed by the size limit meanwhile; the recording says so
            except OSError:
                count.damaged_places += 1
        if not is_alone:
            count.add_altered(find_missing_segments(digests, [path.name for path in segments]))


_INPUT_HINT = "give the folders that `clusterprof record` wrote"


@dataclass(frozen=True, slots=True)
class SkippedInput:
    """A path or folder that is not analyzed."""

    path: Path
    why: str
    remedy: str
    is_copy: bool
    """True when nothing is missing: another folder holds an equal recording."""


@dataclass(frozen=True, slots=True)
class NodeSources:
    """The recordings to read."""

    folders: tuple[Path, ...]
    """One per node and recorder, in the order of the paths."""
    skipped: tuple[SkippedInput, ...] = ()


def find_nodes(paths: Sequence[Path]) -> NodeSources:
    """Find the folders of all nodes in the given paths, each recording of a node once.

    Of two copies the larger one is taken. One unreadable path of several is skipped.
    Raises: NoRecording for a path that does not exist, and when nothing under any path can
    be read.
    """
    paths = [resolve_path(path) for path in paths]
    for path in paths:
        if not path_exists(path):
            raise NoRecording(f"{path}: no such file or directory", _format_missing_hint(path))
    folders: list[Path] = []
    left_out: list[SkippedInput] = []
    for path in paths:
        try:
            folders += list_node_folders(path)
        except NoRecording as error:
            if len(paths) == 1:
                raise
            why = error.message.removeprefix(f"{path}: ")
            left_out.append(SkippedInput(path, why, error.remedy, is_copy=False))
        left_out += list_unreadable_folders(path)
    if not folders:
        raise NoRecording(
            "; ".join(f"{skipped_input.path}: {skipped_input.why}" for skipped_input in left_out),
            _INPUT_HINT,
        )
    if len(folders) == 1:
        return NodeSources(tuple(folders), tuple(left_out))
    folders = merge_segments(folders)
    described = [(read_identity(folder), _measure_bytes(folder)) for folder in folders]
    chosen, copies = select_copies(folders, described)
    return NodeSources(tuple(folders[index] for index in chosen), (*left_out, *copies))


def path_exists(path: Path) -> bool:
    """Return whether there is anything at a path, be it a broken link.

    Raises: NoRecording when an object store does not answer.
    """
    if not isinstance(path, RemotePath):
        return os.path.lexists(path)
    try:
        return path.exists()
    except OSError as error:
        raise NoRecording(str(error), "check address, region and credentials") from error


def _format_missing_hint(path: Path) -> str:
    if any(letter in str(path) for letter in "*?["):
        return "no file matches this pattern; give the folders of the nodes"
    return "give the folder that `clusterprof record` wrote"


def list_unreadable_folders(path: Path) -> list[SkippedInput]:
    """List the folders of a recording that the user may not read."""
    out = []
    try:
        inside = [entry for entry in os.scandir(path) if entry.is_dir()]
    except OSError:
        return []
    for entry in sorted(inside, key=lambda entry: entry.name):
        try:
            os.scandir(entry.path).close()
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            remedy = "analyze as the user who recorded, or make the folder readable for this user"
            out.append(SkippedInput(path / entry.name, why, remedy, is_copy=False))
    return out


def select_copies(
    folders: Sequence[Path], described: Sequence[tuple[tuple[str, str], int]]
) -> tuple[list[int], list[SkippedInput]]:
    """Select each recording once, of copies the largest.

    described: by folder the identity (read_identity) and the bytes. Returns the indices of the
    folders that are kept, and the copies that are left out.
    """
    index_of: dict[tuple[str, str], int] = {}
    left_out = []
    for index, (identity, size) in enumerate(described):
        original = index_of.get(identity)
        if original is None:
            index_of[identity] = index
            continue
        better, worse = (index, original) if size > described[original][1] else (original, index)
        index_of[identity] = better
        if os.path.realpath(folders[better]) != os.path.realpath(folders[worse]):
            why = f"a copy of the recording in {folders[better]}, which was used instead"
            left_out.append(SkippedInput(folders[worse], why, "", is_copy=True))
    return list(index_of.values()), left_out


def read_identity(folder: Path) -> tuple[str, str]:
    """Return the identity of a recording: the node's key and the boot id of its kernel.

    A folder whose header cannot be read is identified by its path.
    """
    for record in NodeReader(folder):
        if isinstance(record, Header):
            return record.node.get("key") or folder.name, record.node.get("boot_id", "")
    return os.path.realpath(folder), ""


def _measure_bytes(folder: Path) -> int:
    if folder.is_file():
        return folder.stat().st_size
    return sum(segment.stat().st_size for segment in list_segments(folder))
