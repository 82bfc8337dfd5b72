"""What to do where the data path waits for storage."""

from __future__ import annotations

import shlex

from clusterprof.remedies.base import Filled, Mend, Rule
from clusterprof.remedies.commands import run
from clusterprof.remedies.rules import (
    CPUS_CONTENDED,
    DEVICE_SATURATED,
    MEMORY_SHORT,
    MUCH_PREFETCHED,
    NO_LIMIT,
    NO_WORKERS,
    ONE_NODE,
    QUOTA_USED_UP,
    READS_ARE_LARGE,
    WORKERS_FILL_CPUS,
    WORKERS_UNKNOWN,
    next_workers,
    room_for_workers,
)
from clusterprof.remedies.scene import Disk, Scene
from clusterprof.units import human

COORDL = "up to 5x over the page cache alone on one server (CoorDL, VLDB 2021)"
_READERS = ("storage-local", "storage-remote", "storage-object")


def _disk_of(scene: Scene) -> str:
    return scene.resource.partition(" (")[0]


def faster_disk(scene: Scene) -> Disk | None:
    """Return a disk of the node that does not rotate, where the one in use does."""
    used = next((one for one in scene.machine.disks if one.name == _disk_of(scene)), None)
    if used is None or not used.rotational:
        return None
    found = (
        one for one in scene.machine.disks
        if one.rotational is False and not one.on and one.name.startswith(("nvme", "sd", "vd"))
    )  # fmt: skip
    return next(found, None)


def _more_readers(scene: Scene) -> Filled:
    workers, new = scene.workers or 0, next_workers(scene)
    room = room_for_workers(scene)
    latency = scene.number("read_latency_ns") or scene.number("read_rpc_ns")
    more = [f"{workers} dataloader worker{'s read' if workers != 1 else ' reads'} at once"]
    if room is not None:
        more.append(f"the rank has CPUs for {room}")
    if latency is not None:
        more.append("a read spends that time waiting, so several can wait at once")
    to = new if new is not None else max(2 * workers, 2)
    change = f"{run(f'DataLoader(num_workers={to})')} in the place of num_workers={workers}"
    what = f"Raise num_workers from {workers} to {new}" if new is not None else ""
    return Filled(change, tuple(more), what)


def _prefetch(scene: Scene) -> Filled:
    loader = scene.setup.loader
    now = loader.prefetch if loader is not None and loader.prefetch else 2
    return Filled(
        f"{run(f'DataLoader(prefetch_factor={max(4, 2 * now)})')} in the place of {now}",
        (f"prefetch_factor is {now}",),
        f"Raise prefetch_factor from {now} to {max(4, 2 * now)}",
    )


def _pack(scene: Scene) -> Filled:
    place = shlex.quote(scene.mount.point) if scene.mount is not None else "DATA"
    size = scene.number("read_size_bytes")
    return Filled(
        f"{run(f'tar --sort=name -cf shard-00000.tar -C {place} SAMPLES')} (about 1 GB a shard),"
        " read in order with webdataset or a record reader",
        () if size is not None else ("how large reads are was not recorded",),
        f"Pack samples into large records and read these in order; now a read asks for"
        f" {human(size.value, 'bytes')}"
        if size is not None
        else "",
    )


def _stage(scene: Scene) -> Filled:
    if scene.cause == "storage-object":
        return Filled(
            f"{run('aws s3 sync s3://BUCKET/PREFIX LOCAL/')} (or the store's own tool) before"
            " training starts, on each node, and point the data set at LOCAL",
            ("the path of LOCAL must lie on a disk of the node (clusterprof doctor lists them)",),
        )
    source = shlex.quote(scene.mount.point) if scene.mount is not None else "DATA"
    return Filled(
        f"{run(f'rsync -a {source}/ LOCAL/')} before training starts, on each node, and point the"
        " data set at LOCAL",
        ("the path of LOCAL must lie on a disk of the node (clusterprof doctor lists them)",),
    )


def _faster(scene: Scene) -> Filled:
    disk = faster_disk(scene)
    name = disk.name if disk is not None else "a disk that does not rotate"
    used = _disk_of(scene)
    return Filled(
        f"move the data from {used} to a folder on {name}, and point the data set at it",
        (f"{used} rotates, {name} does not",),
        f"Read the data from {name}, not from {used}",
    )


def _fewer_bytes(scene: Scene) -> Filled:
    return Filled(
        "store samples resized and compressed as training needs them (once, offline), or spread"
        f" the data over more disks than {_disk_of(scene) or 'this one'}",
        ("what is read in the waits is more than the disk gives",),
    )


def _not_saturated(scene: Scene) -> bool:
    return not DEVICE_SATURATED.holds(scene)


NOT_SATURATED = Rule(
    "not-saturated",
    "the disk was not busy for 90% of the waits, or with one request at a time only, or that is"
    " unknown",
    _not_saturated,
)
NO_FASTER_DISK = Rule(
    "no-faster-disk",
    "the disk in use does not rotate, or the node has none that does not",
    lambda s: faster_disk(s) is None,
)
NO_DISK = Rule(
    "no-disk",
    "the node shows no disk of its own",
    lambda s: bool(s.machine.name) and not s.machine.disks,
)


def _limit(scene: Scene) -> Filled:
    limit = scene.machine.limit_bytes or 0
    free = scene.machine.available_least_bytes
    to = human(2 * limit, "bytes")
    if scene.machine.memory_bytes:
        to = human(min(2 * limit, int(0.9 * scene.machine.memory_bytes)), "bytes")
    how = {
        "slurm": run("sbatch --mem=N"),
        "kubernetes": "resources.limits.memory",
    }.get(scene.machine.launcher, "memory.max of its cgroup (docker run --memory)")
    more = [f"the job's limit is {human(limit, 'bytes')}"]
    if free is not None:
        more.append(f"the node had {human(free, 'bytes')} left at the least")
    return Filled(f"{how}: {to} in the place of {human(limit, 'bytes')}", tuple(more))


def _shard(scene: Scene) -> Filled:
    return Filled(
        f"give each of the {scene.nodes} nodes 1/{scene.nodes} of the shards"
        " (webdataset.split_by_node, DistributedSampler over shards)",
        (f"the job has {scene.nodes} nodes, each of which reads the whole data set",),
    )


def _contention(scene: Scene) -> Filled:
    disk = _disk_of(scene) or "the disk"
    return Filled(
        f"{run('sudo iotop -oPa')} or {run('pidstat -d 1')} says who reads and writes {disk}; move"
        " that to another disk, node or hour",
        what=f"Find who else uses {disk}, and move it or the data elsewhere",
    )


def _weight(scene: Scene) -> Filled:
    command = run("systemctl set-property --runtime SCOPE IOWeight=1000")
    return Filled(f"{command} (io.weight of its cgroup)")


REMEDIES = (
    Mend(
        "stage-local", ("storage-remote", "storage-object", "storage-client-queue"),
        "Copy the data to a disk of the node before training",
        "rsync or a download at the start of the job", _stage,
        seen=("remote_ratio", "queued_ratio", "socket_ratio", "read_latency_ns", "read_rpc_ns"),
        published=COORDL, moves="bytes from the server fall to none in steps",
        worse="time and room at the start of every job: start-up grows by the copy",
        unless=(NO_DISK,),
        place="node",
        effort="data",
    ),
    Mend(
        "pack-records", ("storage-local", "storage-object", "storage-remote"),
        "Pack samples into large records and read these in order",
        "tar shards, record files or Parquet of about 1 GB, shuffled in a buffer", _pack,
        seen=("read_size_bytes", "reads_per_second_count", "disk.busy_ratio", "socket_ratio",
              "read_latency_ns", "read_rpc_ns"),
        published=COORDL, moves="bytes of a read rise",
        worse="samples are shuffled within a buffer only, and single ones are harder to replace",
        unless=(READS_ARE_LARGE,),
        missed="Larger records are not advised",
        effort="data",
    ),
    Mend(
        "more-readers", _READERS, "Read with more dataloader workers",
        "DataLoader(num_workers=N), no more than CPUs are left", _more_readers,
        seen=("disk.read_latency_ns", "disk.busy_ratio", "disk.queue_count", "socket_ratio",
              "nfs.read_latency_ns", "read_rpc_ns"),
        published="up to 47x for pipelines that were set up wrongly (Plumber, MLSys 2022)",
        moves="waits get fewer while bytes read per second rise",
        worse="each worker needs memory for its copy of the data set and the batches it holds",
        unless=(WORKERS_UNKNOWN, DEVICE_SATURATED, WORKERS_FILL_CPUS, QUOTA_USED_UP,
                CPUS_CONTENDED, MEMORY_SHORT),
        missed="More workers are not advised",
        effort="setting",
    ),
    Mend(
        "read-further-ahead", _READERS, "Let each worker read further ahead",
        "DataLoader(prefetch_factor=4)", _prefetch, seen=("disk.busy_ratio",),
        moves="waits that come now and then disappear",
        worse="workers x prefetch_factor batches are held in host memory",
        unless=(WORKERS_UNKNOWN, NO_WORKERS, MUCH_PREFETCHED, DEVICE_SATURATED, MEMORY_SHORT),
        effort="setting",
    ),
    Mend(
        "faster-disk", ("storage-local",), "Read the data from a disk that does not rotate",
        "move the data to NVMe or another SSD of the node", _faster,
        seen=("disk.read_latency_ns", "disk.busy_ratio"), published=COORDL,
        moves="disk.read_latency_ns falls below 1 ms",
        worse="room on that disk", unless=(NO_FASTER_DISK,),
        place="node",
        effort="data",
    ),
    Mend(
        "fewer-bytes", ("storage-local",), "Read fewer bytes, or spread them over more disks",
        "smaller samples, compression, striping", _fewer_bytes,
        seen=("disk.busy_ratio", "disk.queue_count", "disk.read_bytes_total"), published=COORDL,
        moves="disk.busy_ratio falls",
        worse="smaller samples may cost accuracy; decompression costs CPU time",
        unless=(NOT_SATURATED,),
        effort="data",
    ),
    Mend(
        "raise-memory-limit", ("storage-cold-cache",),
        "Give the page cache room: raise the job's memory limit",
        "memory limit of the job's cgroup", _limit,
        seen=("refaulted_bytes_total", "missed_ratio", "sample_read_bytes"), published=COORDL,
        moves="memory.refaults_total stops rising after the first epoch",
        worse="memory that neighbours on the node no longer have",
        unless=(NO_LIMIT, MEMORY_SHORT),
        place="node",
        effort="setting",
    ),
    Mend(
        "shard-over-nodes", ("storage-cold-cache", "storage-remote"),
        "Let each node read its own part of the data",
        "shards by node in the place of the whole data set on each", _shard,
        seen=("refaulted_bytes_total", "missed_ratio", "read_bytes_total"), published=COORDL,
        moves="bytes read per node and epoch fall to one part",
        worse="an epoch no longer shuffles samples across nodes", unless=(ONE_NODE,),
        place="job",
        effort="code",
    ),
    Mend(
        "keep-decoded", ("storage-cold-cache",), "Keep decoded samples on a disk of the node",
        "write what a sample becomes to local disk in the first epoch",
        lambda s: Filled("a cache folder on a local disk in the data set's __getitem__"),
        seen=("missed_ratio", "sample_read_bytes"),
        moves="bytes from the slower store fall after the first epoch",
        worse="room on that disk; augmentation must come after the cache",
        effort="code",
    ),
    Mend(
        "move-the-neighbour", ("storage-contention",),
        "Find who else uses the disk, and move it or the data elsewhere",
        "iotop, pidstat -d; another disk, node or hour", _contention,
        seen=("others_ratio", "others_bytes_total", "disk.busy_ratio"),
        moves="disk.others_ratio falls", worse="whoever is moved",
        place="node",
        effort="look",
    ),
    Mend(
        "io-weight", ("storage-contention",), "Give the job's cgroup a larger share of the disk",
        "io.weight (needs root, and a scheduler such as bfq or io.cost)", _weight,
        seen=("others_ratio",), moves="disk.busy_ratio stays, waits get fewer",
        worse="whoever else uses the disk",
        place="node",
        effort="site",
    ),
)  # fmt: skip
