"""Recommendations for a data path that waits for storage, and for slow network mounts."""

from __future__ import annotations

import shlex

from clusterprof.analysis.advice.base import (
    ExclusionRule,
    FilledRecommendation,
    Recommendation,
    mark_command,
)
from clusterprof.analysis.advice.context import AdviceContext, Disk
from clusterprof.analysis.advice.rules import (
    CPUS_CONTENDED,
    DEVICE_SATURATED,
    MEMORY_SHORT,
    NO_LIMIT,
    NO_WORKERS,
    ONE_NODE,
    PREFETCH_IS_HIGH,
    QUOTA_USED_UP,
    READS_ARE_LARGE,
    WORKERS_FILL_CPUS,
    WORKERS_UNKNOWN,
    choose_prefetch_factor,
    choose_worker_count,
    compute_max_workers,
    make_file_system_rule,
    make_missing_evidence_rule,
)
from clusterprof.units import format_quantity

COORDL_GAIN = "up to 5x over the page cache alone on one server (CoorDL, VLDB 2021)"
_READ_CAUSES = ("storage-local", "storage-remote", "storage-object")


def find_faster_disk(context: AdviceContext) -> Disk | None:
    """Find a solid-state disk of the node if the disk in use rotates; None otherwise."""
    used = next(
        (disk for disk in context.machine.disks if disk.name == context.resource_name), None
    )
    if used is None or not used.rotational:
        return None
    candidates = (
        disk
        for disk in context.machine.disks
        if disk.rotational is False
        and not disk.underlying_devices
        and disk.name.startswith(("nvme", "sd", "vd"))
    )
    return next(candidates, None)


def _fill_more_readers(context: AdviceContext) -> FilledRecommendation:
    workers, count = context.workers or 0, choose_worker_count(context)
    room = compute_max_workers(context)
    latency = context.find_evidence("read_latency_ns") or context.find_evidence("read_rpc_ns")
    reasons = [f"{workers} dataloader worker{'s read' if workers != 1 else ' reads'} at once"]
    if room is not None:
        reasons.append(f"the rank has CPUs for {room}")
    if latency is not None:
        reasons.append("reads mostly wait, so several can wait at once")
    target = count if count is not None else max(2 * workers, 2)
    change = f"{mark_command(f'DataLoader(num_workers={target})')} instead of num_workers={workers}"
    instruction = f"Raise num_workers from {workers} to {count}" if count is not None else ""
    return FilledRecommendation(change, tuple(reasons), instruction)


def _fill_prefetch(context: AdviceContext) -> FilledRecommendation:
    factor, raised = choose_prefetch_factor(context)
    return FilledRecommendation(
        f"{mark_command(f'DataLoader(prefetch_factor={raised})')} instead of {factor}",
        (f"prefetch_factor is {factor}",),
        f"Raise prefetch_factor from {factor} to {raised}",
    )


def _fill_packed_records(context: AdviceContext) -> FilledRecommendation:
    folder = shlex.quote(context.mount.point) if context.mount is not None else "DATA"
    size = context.find_evidence("read_size_bytes")
    return FilledRecommendation(
        f"{mark_command(f'tar --sort=name -cf shard-00000.tar -C {folder} SAMPLES')} (about 1 GB a"
        " shard), read in order with webdataset or a record reader",
        () if size is not None else ("how large reads are was not recorded",),
        "Pack samples into large records and read these in order; now the average read is"
        f" {format_quantity(size.value, 'bytes')}"
        if size is not None
        else "",
    )


def _fill_local_copy(context: AdviceContext) -> FilledRecommendation:
    if context.cause == "storage-object":
        return FilledRecommendation(
            f"{mark_command('aws s3 sync s3://BUCKET/PREFIX LOCAL/')} (or the store's own tool)"
            " before training starts, on each node, and point the data set at LOCAL",
            ("the path of LOCAL must lie on a disk of the node (clusterprof doctor lists them)",),
        )
    source = shlex.quote(context.mount.point) if context.mount is not None else "DATA"
    return FilledRecommendation(
        f"{mark_command(f'rsync -a {source}/ LOCAL/')} before training starts, on each node, and"
        " point the data set at LOCAL",
        ("the path of LOCAL must lie on a disk of the node (clusterprof doctor lists them)",),
    )


def _fill_faster_disk(context: AdviceContext) -> FilledRecommendation:
    disk = find_faster_disk(context)
    name = disk.name if disk is not None else "a solid-state disk"
    used = context.resource_name
    return FilledRecommendation(
        f"move the data from {used} to a folder on {name}, and point the data set at it",
        (f"{used} is a rotating disk, {name} is not",),
        f"Read the data from {name}, not from {used}",
    )


def _fill_fewer_bytes(context: AdviceContext) -> FilledRecommendation:
    return FilledRecommendation(
        "store samples resized and compressed as training needs them (once, offline), or spread the"
        f" data over more disks than {context.resource_name or 'this one'}",
        ("the waits read more than the disk can deliver",),
    )


NOT_SATURATED = ExclusionRule(
    "not-saturated",
    "the disk was busy for less than 90% of the waits, or had one request at a time, or this is"
    " unknown",
    lambda s: not DEVICE_SATURATED.holds(s),
)
NO_FASTER_DISK = ExclusionRule(
    "no-faster-disk",
    "the disk in use is solid-state, or the node has no solid-state disk",
    lambda s: find_faster_disk(s) is None,
)
NO_DISK = ExclusionRule(
    "no-disk",
    "the node has no visible local disk",
    lambda s: bool(s.machine.name) and not s.machine.disks,
)


def _fill_memory_limit(context: AdviceContext) -> FilledRecommendation:
    limit = context.machine.memory_limit_bytes or 0
    free_bytes = context.machine.min_available_bytes
    new_limit = format_quantity(2 * limit, "bytes")
    if context.machine.memory_bytes:
        new_limit = format_quantity(
            min(2 * limit, int(0.9 * context.machine.memory_bytes)), "bytes"
        )
    option = {"slurm": mark_command("sbatch --mem=N"), "kubernetes": "resources.limits.memory"}.get(
        context.machine.launcher, "memory.max of its cgroup (docker run --memory)"
    )
    reasons = [f"the job's limit is {format_quantity(limit, 'bytes')}"]
    if free_bytes is not None:
        reasons.append(
            f"the node had {format_quantity(free_bytes, 'bytes')} left at the lowest point"
        )
    return FilledRecommendation(
        f"{option}: {new_limit} instead of {format_quantity(limit, 'bytes')}", tuple(reasons)
    )


def _fill_contention(context: AdviceContext) -> FilledRecommendation:
    disk = context.resource_name or "the disk"
    return FilledRecommendation(
        f"{mark_command('sudo iotop -oPa')} or {mark_command('pidstat -d 1')} says who reads and"
        f" writes {disk}; move that to another disk, node or hour",
        what=f"Find what else uses {disk}, and move it or the data elsewhere",
    )


def _fill_io_weight(context: AdviceContext) -> FilledRecommendation:
    command = mark_command("systemctl set-property --runtime SCOPE IOWeight=1000")
    return FilledRecommendation(f"{command} (io.weight of its cgroup)")


STORAGE_RECOMMENDATIONS = (
    Recommendation(
        "stage-local",
        ("storage-remote", "storage-object", "storage-client-queue"),
        "Copy the data to a disk of the node before training",
        "rsync or a download at the start of the job",
        _fill_local_copy,
        evidence_names=(
            "remote_ratio",
            "queued_ratio",
            "socket_ratio",
            "read_latency_ns",
            "read_rpc_ns",
        ),
        published=COORDL_GAIN,
        expected_change="no bytes come from the server during steps",
        worse="the copy takes time and storage at the start of every job",
        unless=(NO_DISK,),
        addressee="node",
        effort="data",
    ),
    Recommendation(
        "pack-records",
        ("storage-local", "storage-object", "storage-remote"),
        "Pack samples into large records and read these in order",
        "tar shards, record files or Parquet of about 1 GB, shuffled in a buffer",
        _fill_packed_records,
        evidence_names=(
            "read_size_bytes",
            "reads_per_second_count",
            "disk.busy_ratio",
            "socket_ratio",
            "read_latency_ns",
            "read_rpc_ns",
        ),
        published=COORDL_GAIN,
        expected_change="reads become larger",
        worse="samples are shuffled within a buffer only, and single ones are harder to replace",
        unless=(READS_ARE_LARGE,),
        withheld_text="Larger records are not advised",
        effort="data",
    ),
    Recommendation(
        "more-readers",
        _READ_CAUSES,
        "Read with more dataloader workers",
        "DataLoader(num_workers=N), no more than there are free CPUs",
        _fill_more_readers,
        evidence_names=(
            "disk.read_latency_ns",
            "disk.busy_ratio",
            "disk.queue_count",
            "socket_ratio",
            "nfs.read_latency_ns",
            "read_rpc_ns",
        ),
        published="up to 47x for pipelines that were set up wrongly (Plumber, MLSys 2022)",
        expected_change="waits decrease while bytes read per second rise",
        worse="each worker needs memory for its copy of the data set and the batches it holds",
        unless=(
            WORKERS_UNKNOWN,
            DEVICE_SATURATED,
            WORKERS_FILL_CPUS,
            QUOTA_USED_UP,
            CPUS_CONTENDED,
            MEMORY_SHORT,
        ),
        withheld_text="More workers are not advised",
        needs_workers=True,
        effort="setting",
    ),
    Recommendation(
        "read-further-ahead",
        _READ_CAUSES,
        "Let each worker prefetch more",
        "DataLoader(prefetch_factor=4)",
        _fill_prefetch,
        evidence_names=("disk.busy_ratio",),
        expected_change="occasional waits disappear",
        worse="workers x prefetch_factor batches are held in host memory",
        unless=(WORKERS_UNKNOWN, NO_WORKERS, PREFETCH_IS_HIGH, DEVICE_SATURATED, MEMORY_SHORT),
        effort="setting",
    ),
    Recommendation(
        "faster-disk",
        ("storage-local",),
        "Read the data from a solid-state disk",
        "move the data to NVMe or another SSD of the node",
        _fill_faster_disk,
        evidence_names=("disk.read_latency_ns", "disk.busy_ratio"),
        published=COORDL_GAIN,
        expected_change="disk.read_latency_ns falls below 1 ms",
        worse="storage on that disk",
        unless=(NO_FASTER_DISK,),
        addressee="node",
        effort="data",
    ),
    Recommendation(
        "fewer-bytes",
        ("storage-local",),
        "Read fewer bytes, or spread them over more disks",
        "smaller samples, compression, striping",
        _fill_fewer_bytes,
        evidence_names=("disk.busy_ratio", "disk.queue_count", "disk.read_bytes_total"),
        published=COORDL_GAIN,
        expected_change="disk.busy_ratio falls",
        worse="smaller samples may cost accuracy; decompression costs CPU time",
        unless=(NOT_SATURATED,),
        effort="data",
    ),
    Recommendation(
        "raise-memory-limit",
        ("storage-cold-cache",),
        "Give the page cache room: raise the job's memory limit",
        "memory limit of the job's cgroup",
        _fill_memory_limit,
        evidence_names=("refaulted_bytes_total", "missed_ratio", "sample_read_bytes"),
        published=COORDL_GAIN,
        expected_change="memory.refaults_total stops rising after the first epoch",
        worse="other jobs on the node have less memory",
        unless=(NO_LIMIT, MEMORY_SHORT),
        addressee="node",
        effort="setting",
    ),
    Recommendation(
        "shard-over-nodes",
        ("storage-cold-cache", "storage-remote"),
        "Let each node read its own part of the data",
        "shards by node instead of the whole data set on each",
        lambda s: FilledRecommendation(
            f"give each of the {s.nodes} nodes 1/{s.nodes} of the shards (webdataset.split_by_node,"
            " DistributedSampler over shards)",
            (f"the job has {s.nodes} nodes, each of which reads the whole data set",),
        ),
        evidence_names=("refaulted_bytes_total", "missed_ratio", "read_bytes_total"),
        published=COORDL_GAIN,
        expected_change="bytes read per node and epoch fall to one share",
        worse="an epoch no longer shuffles samples across nodes",
        unless=(ONE_NODE,),
        addressee="job",
        effort="code",
    ),
    Recommendation(
        "keep-decoded",
        ("storage-cold-cache",),
        "Keep decoded samples on a disk of the node",
        "write decoded samples to local disk in the first epoch",
        FilledRecommendation("a cache folder on a local disk in the data set's __getitem__"),
        evidence_names=("missed_ratio", "sample_read_bytes"),
        expected_change="bytes from the slower store fall after the first epoch",
        worse="storage on that disk; augmentation must come after the cache",
        effort="code",
    ),
    Recommendation(
        "move-the-neighbour",
        ("storage-contention",),
        "Find what else uses the disk, and move it or the data elsewhere",
        "iotop, pidstat -d; another disk, node or hour",
        _fill_contention,
        evidence_names=("others_ratio", "others_bytes_total", "disk.busy_ratio"),
        expected_change="disk.others_ratio falls",
        worse="the work that is moved",
        addressee="node",
        effort="look",
    ),
    Recommendation(
        "io-weight",
        ("storage-contention",),
        "Give the job's cgroup a larger share of the disk",
        "io.weight (needs root, and a scheduler such as bfq or io.cost)",
        _fill_io_weight,
        evidence_names=("others_ratio",),
        expected_change="disk.busy_ratio stays, waits decrease",
        worse="other users of the disk",
        addressee="node",
        effort="site",
    ),
)


MANY_CONNECTIONS = 8
_REPORT = "no figure; on 504 GPUs requests queued on clients in slow restarts and saves"
_REPORT += " (arXiv 2605.09370)"
_NOT_NFS = make_file_system_rule("nfs", "NFS")
_NOT_LUSTRE = make_file_system_rule("lustre", "Lustre")
_NOT_CIFS = make_file_system_rule("cifs", "CIFS")


def _quote_mount_point(context: AdviceContext) -> str:
    """Return the mount point quoted for a command."""
    if context.mount is not None:
        return shlex.quote(context.mount.point)
    name = context.resource_name
    return shlex.quote(name) if name else "MOUNT"


def _quote_source(context: AdviceContext) -> str:
    if context.mount is not None and context.mount.source:
        return shlex.quote(context.mount.source)
    return "SERVER:/EXPORT"


def _describe_mount(context: AdviceContext) -> tuple[str, ...]:
    mount = context.mount
    if mount is None:
        return ()
    count = mount.connections
    connections = "" if count is None else f", {count} connection{'' if count == 1 else 's'}"
    return (f"{mount.point} is {mount.type}{connections}",)


def _fill_nconnect(context: AdviceContext) -> FilledRecommendation:
    command = mark_command(
        f"umount {_quote_mount_point(context)}; mount -t nfs -o"
        f" nconnect={MANY_CONNECTIONS},rsize=1048576 {_quote_source(context)}"
        f" {_quote_mount_point(context)}"
    )
    change = f"{command} (or in fstab; the first mount of a server decides)"
    return FilledRecommendation(
        change,
        _describe_mount(context),
        f"Mount {_quote_mount_point(context)} with nconnect={MANY_CONNECTIONS}",
    )


def _fill_rpcs(context: AdviceContext) -> FilledRecommendation:
    return FilledRecommendation(
        mark_command("lctl set_param osc.*.max_rpcs_in_flight=32 osc.*.max_pages_per_rpc=1024")
        + " (root;"
        f" -P keeps it), and {mark_command('lfs setstripe -c 4 DATA')} on the folder of the data"
        " before it is written",
        _describe_mount(context),
    )


def _fill_multichannel(context: AdviceContext) -> FilledRecommendation:
    return FilledRecommendation(
        mark_command(
            f"umount {_quote_mount_point(context)}; mount -t cifs -o"
            f" multichannel,max_channels=4,rsize=4194304 {_quote_source(context)}"
            f" {_quote_mount_point(context)}"
        ),
        _describe_mount(context),
    )


def _fill_packed_files(context: AdviceContext) -> FilledRecommendation:
    return FilledRecommendation(
        mark_command(
            f"tar --sort=name -cf shard-00000.tar -C {_quote_mount_point(context)} SAMPLES"
        )
        + " (about 1 GB a shard), and an index file instead of os.listdir and os.stat",
        _describe_mount(context),
    )


def _fill_attribute_cache(context: AdviceContext) -> FilledRecommendation:
    command = mark_command(
        f"umount {_quote_mount_point(context)}; mount -t nfs -o ro,nocto,actimeo=3600"
        f" {_quote_source(context)} {_quote_mount_point(context)}"
    )
    return FilledRecommendation(
        f"mount -o remount is not enough: {command}", _describe_mount(context)
    )


MOUNT_RECOMMENDATIONS = (
    Recommendation(
        "nconnect",
        ("storage-client-queue",),
        "Mount with more connections to the server",
        "mount -o nconnect=8 (Linux 5.3 and later), rsize=1048576",
        _fill_nconnect,
        evidence_names=(
            "queued_ratio",
            "slots_used_count",
            "nfs.backlog_count",
            "nfs.read_latency_ns",
            "nfs.read_rtt_ns",
        ),
        published=_REPORT,
        expected_change="nfs.read_latency_ns falls to nfs.read_rtt_ns",
        worse="more connections and threads at the server",
        unless=(
            _NOT_NFS,
            ExclusionRule(
                "many-connections",
                f"the mount has {MANY_CONNECTIONS} connections already",
                lambda s: s.mount is not None and (s.mount.connections or 0) >= MANY_CONNECTIONS,
            ),
        ),
        addressee="node",
        effort="site",
    ),
    Recommendation(
        "more-slots",
        ("storage-client-queue",),
        "Allow more requests in flight",
        "max_session_slots (NFSv4.1), sunrpc.tcp_max_slot_table_entries (NFSv3)",
        lambda s: FilledRecommendation(
            "NFSv4.1 and later: options nfs max_session_slots=180 in /etc/modprobe.d (64 by"
            " default), then mount again; NFSv3: raise sunrpc.tcp_max_slot_table_entries where it"
            " is 128 or less",
            _describe_mount(s),
        ),
        evidence_names=("queued_ratio", "slots_used_count", "nfs.backlog_count"),
        published=_REPORT,
        expected_change="nfs.backlog_count falls",
        worse="memory and queues at the server",
        unless=(
            _NOT_NFS,
            make_missing_evidence_rule("backlog_count", "no request was seen waiting for a slot"),
        ),
        addressee="node",
        effort="site",
    ),
    Recommendation(
        "more-lustre-rpcs",
        ("storage-client-queue",),
        "Allow more RPCs in flight to each target",
        "max_rpcs_in_flight, max_pages_per_rpc, stripes over more targets",
        _fill_rpcs,
        evidence_names=("queued_ratio", "rpcs_at_limit_ratio", "read_rpc_ns"),
        expected_change="lustre.rpcs_at_limit_ratio falls",
        worse="load of the object servers",
        unless=(_NOT_LUSTRE,),
        addressee="node",
        effort="site",
    ),
    Recommendation(
        "multichannel",
        ("storage-client-queue",),
        "Mount with several channels",
        "mount -t cifs -o multichannel,max_channels=4",
        _fill_multichannel,
        evidence_names=("queued_ratio",),
        expected_change="cifs.waiting_count falls",
        worse="connections at the server",
        unless=(_NOT_CIFS,),
        addressee="node",
        effort="site",
    ),
    Recommendation(
        "pack-files",
        ("storage-metadata",),
        "Pack small files into large records, and index once",
        "tar shards or record files; an index instead of listing folders",
        _fill_packed_files,
        evidence_names=("metadata_ratio", "metadata_operations_total"),
        expected_change="metadata_operations_total falls to a few per record",
        worse="samples are shuffled within a buffer only",
        effort="data",
    ),
    Recommendation(
        "cache-attributes",
        ("storage-metadata",),
        "Let the client keep attributes for longer",
        "mount -o ro,nocto,actimeo=3600 for data that is never written",
        _fill_attribute_cache,
        evidence_names=("metadata_ratio",),
        expected_change="GETATTR and ACCESS of nfs.operations_total fall",
        worse="changes made elsewhere are seen up to an hour late",
        unless=(_NOT_NFS,),
        addressee="node",
        effort="site",
    ),
    Recommendation(
        "mend-the-path",
        ("storage-remote",),
        "Find out why requests are retransmitted",
        "errors between this node and the server",
        lambda s: FilledRecommendation(
            f"{mark_command(f'nfsstat -m; mountstats --rpc {_quote_mount_point(s)}')} before and"
            " after a minute: retransmissions must not rise; then ping, MTU and errors of the"
            f" interface to the server ({mark_command('ip -s link')})",
            _describe_mount(s),
        ),
        evidence_names=("retransmits_total", "timeouts_total"),
        expected_change="nfs.retransmits_total does not rise",
        unless=(
            ExclusionRule(
                "nothing-sent-again",
                "no request was retransmitted or timed out",
                lambda s: (
                    not any(
                        n.endswith(("retransmits_total", "timeouts_total")) and v > 0
                        for n, v in s.values.items()
                    )
                ),
            ),
        ),
        addressee="node",
        effort="look",
    ),
)

FALLBACK_RECOMMENDATIONS = (
    Recommendation(
        "ask-the-server",
        ("storage-remote",),
        "Ask the operators of the server what limits it",
        "a read spends its time on the network and at the server",
        lambda s: FilledRecommendation(
            f"ask the operators of {_quote_source(s)} for load, disks and threads (NFS: nfsd"
            " threads, /proc/net/rpc/nfsd) at the times of the run",
            _describe_mount(s),
        ),
        evidence_names=("read_latency_ns", "read_rpc_ns", "read_bytes_total"),
        expected_change="the time of a read falls",
        unless=(
            make_missing_evidence_rule("read_bytes_total", "no bytes from a server were counted"),
        ),
        addressee="node",
        effort="site",
    ),
)
