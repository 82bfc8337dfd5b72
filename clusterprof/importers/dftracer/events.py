"""DFTracer's lines, gathered by process: what matters of them, in arrays."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.text_lines import lines_of, whole_ns

MICROSECOND_NS = 1000
LOCAL, NETWORK, OBJECT = 1, 2, 3
NAMES_AT_MOST = 1_000_000
"""Files of which a name is kept."""
CLASSES_AT_MOST = PROCESSES_AT_MOST = 65_536
_CROWD = f"events of more than {PROCESSES_AT_MOST:,} processes"

Value = int | float | str | bool | None
Key = int | float | str


class _Arguments(msgspec.Struct):
    """What may stand in `args` and is used; versions before 2 write hashes as numbers."""

    hhash: Value = None
    fhash: Value = None
    name: Value = None
    value: Value = None
    ret: Value = None
    size: Value = None
    ppid: Value = None


class _Line(msgspec.Struct):
    name: str
    ph: str
    cat: str = ""
    pid: Value = None
    tid: Value = None
    ts: Value = None
    dur: Value = None
    args: _Arguments = msgspec.field(default_factory=_Arguments)


(
    WAIT, ITEM, COMPUTE, FORWARD, BACKWARD, OPTIMIZER, EPOCH, EVALUATION, CHECKPOINT, TRANSFER,
) = range(10)  # fmt: skip

_IO = ("POSIX", "STDIO")
_LOADERS = ("data_loader", "dataloader", "fetch", "data")
_PHASES = {"compute": COMPUTE, "forward": FORWARD, "backward": BACKWARD, "step": OPTIMIZER}
_DLIO = ("dlio_benchmark", "ai_framework")
_BYTES = frozenset(("read", "pread", "readv", "preadv"))
_READING = _BYTES | {
    "fread", "open", "openat", "fopen", "close", "fclose", "lseek", "fseek", "stat", "lstat",
    "fstat", "xstat", "lxstat", "fxstat", "fxstatat", "opendir", "readdir", "closedir", "access",
}  # fmt: skip
_NETWORK = re.compile(
    r"lustre|gpfs|(^|[/_-])nfs|beegfs|ceph|weka|panfs|daos|juicefs|glusterfs|/afs/", re.IGNORECASE
)
_LOCAL = re.compile(r"^/(tmp|dev/shm|local|raid|l/ssd|mnt/(nvme|ssd)|nvme|scratch/local)\d*(/|$)")


def kind_of_file_system(path: str) -> int:
    """Return what a path says of where it lies: LOCAL, NETWORK, OBJECT, 0 = nothing."""
    if re.match(r"(s3|gs|az|abfss?|hf)://", path):
        return OBJECT
    if _NETWORK.search(path):
        return NETWORK
    return LOCAL if _LOCAL.match(path) else 0


@dataclass(slots=True)
class Process:
    """One process, and what it was seen to do."""

    pid: int
    host: Key
    parent: int = 0
    rank: int | None = None
    world: int | None = None
    kinds: array[int] = field(default_factory=lambda: array("q"))
    """WAIT, ITEM, …: of `spans`."""
    spans: array[int] = field(default_factory=lambda: array("q"))
    """Two numbers each: start and end in ns."""
    reads: array[int] = field(default_factory=lambda: array("q"))
    """Four each: start, end, bytes, kind of file system."""
    emulated: bool = False
    """True when it is DLIO's, whose computing is a sleep."""


class Job:
    """All files of a job, as they are read."""

    def __init__(self) -> None:
        self.processes: dict[tuple[Key, int], Process] = {}
        self.hosts: dict[Key, str] = {}
        self.files: dict[Key, int] = {}
        """Kind of file system by hash."""
        self._decode: Callable[[bytes], _Line] = msgspec.json.Decoder(_Line).decode
        self._classes: dict[tuple[str, str], int | None] = {}
        self._beyond = 0

    def read(self, source: Source, account: Account) -> None:
        """Take in one file."""
        rank, world = rank_of(source.path.name)
        for line in lines_of(source, account):
            line = line.strip().rstrip(b",")
            if line in (b"", b"[", b"]"):
                continue
            try:
                one = self._decode(line.lstrip(b"["))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                account.skipped["lines that are no event"] += 1
                continue
            if one.ph == "M":
                self._name(one)
            elif one.ph == "X":
                self._take(one, account, rank, world)
            else:
                account.skipped["events of other kinds"] += 1

    def _name(self, one: _Line) -> None:
        value, name = _key(one.args.value), one.args.name
        if value is None or not isinstance(name, str):
            return
        if one.name == "HH" and len(self.hosts) < NAMES_AT_MOST:
            self.hosts[value] = name
        elif one.name == "FH" and len(self.files) < NAMES_AT_MOST:
            self.files[value] = kind_of_file_system(name)

    def _take(self, one: _Line, account: Account, rank: int | None, world: int | None) -> None:
        start, length = whole_ns(one.ts, MICROSECOND_NS), whole_ns(one.dur, MICROSECOND_NS)
        if start is None or length is None or not isinstance(one.pid, int):
            account.skipped["events without a time, a duration or a process"] += 1
            return
        if start < 0 or length < 0 or abs(one.pid) >= 1 << 31:
            account.skipped["events with a negative time or a senseless process"] += 1
            return
        process = self._process(one, account)
        if process is None:
            return
        if rank is not None and process.rank is None:
            process.rank, process.world = rank, world
        if one.cat in _IO:
            self._input(one, process, start, start + length, account)
            return
        process.emulated |= one.cat in _DLIO
        if one.name == "start" and isinstance(one.args.ppid, int):
            process.parent = one.args.ppid
        kind = self._class(one)
        if kind is None or not length:
            return
        process.kinds.append(kind)
        process.spans.extend((start, start + length))
        account.read[_SAID[kind]] += 1

    def _class(self, one: _Line) -> int | None:
        """What an event means. Raises CannotImportError where each has a name of its own."""
        key = (one.cat, one.name)
        if key in self._classes:
            return self._classes[key]
        kind = class_of(*key)
        if len(self._classes) < CLASSES_AT_MOST:
            self._classes[key] = kind
            return kind
        self._beyond += 1
        if self._beyond > NAMES_AT_MOST:
            raise CannotImportError(
                f"more than {NAMES_AT_MOST:,} events with names of their own",
                "name events after what they do, not after when",
            )
        return kind

    def _process(self, one: _Line, account: Account) -> Process | None:
        host = _key(one.args.hhash)
        key = ("" if host is None else host, int(one.pid or 0))
        if key not in self.processes:
            if len(self.processes) >= PROCESSES_AT_MOST:
                account.skipped[_CROWD] += 1
                if account.skipped[_CROWD] > NAMES_AT_MOST:
                    raise CannotImportError(_CROWD, "give the traces of fewer nodes")
                return None
            self.processes[key] = Process(key[1], key[0])
        return self.processes[key]

    def _input(self, one: _Line, process: Process, start: int, end: int, account: Account) -> None:
        name = one.name.strip("_").removesuffix("64")
        if name not in _READING:
            account.skipped["writes and other system calls"] += 1
            return
        got = one.args.ret if name in _BYTES or name == "fread" else 0
        size = one.args.size if name == "fread" else 1
        bytes_ = got * size if isinstance(got, int) and isinstance(size, int) else 0
        kind = self.files.get(_key(one.args.fhash) or "", 0)
        process.reads.extend((start, end, min(max(bytes_, 0), 1 << 50), kind))
        account.read["reads, opens and looks at files"] += 1


_SAID = {
    WAIT: "waits for a batch", ITEM: "items loaded", COMPUTE: "computing",
    FORWARD: "forward passes",
    BACKWARD: "backward passes", OPTIMIZER: "optimizer steps", EPOCH: "epochs",
    EVALUATION: "evaluations", CHECKPOINT: "checkpoints", TRANSFER: "copies to the device",
}  # fmt: skip


def class_of(category: str, name: str) -> int | None:
    """Return what an event of the application means to us; None: nothing."""
    last = name.rpartition(".")[2]
    if category in _LOADERS:
        if last in ("__getitem__", "item"):
            return ITEM
        return WAIT if last in ("iter", "fetch") else None
    if category == "ai_framework":
        return COMPUTE if last == "compute" else None
    if category == "compute":
        return _PHASES.get(last)
    if category == "checkpoint":
        return CHECKPOINT if last in ("save_checkpoint", "capture", "checkpoint") else None
    if category == "device":
        return TRANSFER if last == "transfer" else None
    if category in ("pipeline", "dlio_benchmark"):
        if last in ("_eval", "evaluate", "test"):
            return EVALUATION
        return EPOCH if last in ("_train", "epoch") or name == "epoch.block" else None
    return None


def _key(value: Value) -> Key | None:
    return value if isinstance(value, (int, float, str)) and value == value else None


def rank_of(name: str) -> tuple[int | None, int | None]:
    """Return rank and size of the job in a file's name, as DLIO writes it: trace-3-of-8.pfw."""
    match = re.search(r"-(\d{1,7})-of-(\d{1,7})\.pfw", name)
    return (int(match[1]), int(match[2])) if match else (None, None)
