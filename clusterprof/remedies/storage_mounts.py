"""What to do where a network mount is slow because of how it is mounted, or of how it is asked."""

from __future__ import annotations

import shlex

from clusterprof.remedies.base import Filled, Mend, Rule
from clusterprof.remedies.commands import run
from clusterprof.remedies.rules import kind_is_not, without
from clusterprof.remedies.scene import Scene

MANY_CONNECTIONS = 8
_REPORT = "no figure; on 504 GPUs requests queued on clients in slow restarts and saves"
_REPORT += " (arXiv 2605.09370)"
_NOT_NFS = kind_is_not("nfs", "NFS")
_NOT_LUSTRE = kind_is_not("lustre", "Lustre")
_NOT_CIFS = kind_is_not("cifs", "CIFS")


def _point(scene: Scene) -> str:
    """The mount as a word of a command."""
    if scene.mount is not None:
        return shlex.quote(scene.mount.point)
    name = scene.resource.partition(" (")[0]
    return shlex.quote(name) if name else "MOUNT"


def _source(scene: Scene) -> str:
    if scene.mount is not None and scene.mount.source:
        return shlex.quote(scene.mount.source)
    return "SERVER:/EXPORT"


def _said(scene: Scene) -> tuple[str, ...]:
    mount = scene.mount
    if mount is None:
        return ()
    count = mount.connections
    many = "" if count is None else f", {count} connection{'' if count == 1 else 's'}"
    return (f"{mount.point} is {mount.type}{many}",)


def _nconnect(scene: Scene) -> Filled:
    command = run(
        f"umount {_point(scene)}; mount -t nfs -o nconnect={MANY_CONNECTIONS},rsize=1048576"
        f" {_source(scene)} {_point(scene)}"
    )
    change = f"{command} (or in fstab; the first mount of a server decides)"
    return Filled(change, _said(scene), f"Mount {_point(scene)} with nconnect={MANY_CONNECTIONS}")


def _slots(scene: Scene) -> Filled:
    return Filled(
        "NFSv4.1 and later: options nfs max_session_slots=180 in /etc/modprobe.d (64 by default),"
        " then mount anew; NFSv3: raise sunrpc.tcp_max_slot_table_entries where it is 128 or less",
        _said(scene),
    )


def _rpcs(scene: Scene) -> Filled:
    return Filled(
        f"{run('lctl set_param osc.*.max_rpcs_in_flight=32 osc.*.max_pages_per_rpc=1024')} (root;"
        f" -P keeps it), and {run('lfs setstripe -c 4 DATA')} on the folder of the data before it"
        " is written",
        _said(scene),
    )


def _multichannel(scene: Scene) -> Filled:
    return Filled(
        run(
            f"umount {_point(scene)}; mount -t cifs -o multichannel,max_channels=4,rsize=4194304"
            f" {_source(scene)} {_point(scene)}"
        ),
        _said(scene),
    )


def _records(scene: Scene) -> Filled:
    return Filled(
        f"{run(f'tar --sort=name -cf shard-00000.tar -C {_point(scene)} SAMPLES')} (about 1 GB a"
        " shard), and an index file in the place of os.listdir and os.stat",
        _said(scene),
    )


def _attributes(scene: Scene) -> Filled:
    command = run(
        f"umount {_point(scene)}; mount -t nfs -o ro,nocto,actimeo=3600 {_source(scene)}"
        f" {_point(scene)}"
    )
    return Filled(f"to remount is not enough: {command}", _said(scene))


def _path(scene: Scene) -> Filled:
    return Filled(
        f"{run(f'nfsstat -m; mountstats --rpc {_point(scene)}')} before and after a minute:"
        " retransmissions must not rise; then ping, MTU and errors of the interface to the server"
        f" ({run('ip -s link')})",
        _said(scene),
    )


def _ask_server(scene: Scene) -> Filled:
    return Filled(
        f"ask whoever runs {_source(scene)} for load, disks and threads (NFS: nfsd threads,"
        " /proc/net/rpc/nfsd) at the times of the run",
        _said(scene),
    )


REMEDIES = (
    Mend(
        "nconnect", ("storage-client-queue",), "Mount with more connections to the server",
        "mount -o nconnect=8 (Linux 5.3 and later), rsize=1048576", _nconnect,
        seen=("queued_ratio", "slots_used_count", "nfs.backlog_count", "nfs.read_latency_ns",
              "nfs.read_rtt_ns"),
        published=_REPORT, moves="nfs.read_latency_ns falls to nfs.read_rtt_ns",
        worse="more connections and threads at the server",
        unless=(
            _NOT_NFS,
            Rule("many-connections", f"the mount has {MANY_CONNECTIONS} connections already",
                 lambda s: s.mount is not None
                 and (s.mount.connections or 0) >= MANY_CONNECTIONS),
        ),
        place="node",
        effort="site",
    ),
    Mend(
        "more-slots", ("storage-client-queue",), "Allow more requests under way",
        "max_session_slots (NFSv4.1), sunrpc.tcp_max_slot_table_entries (NFSv3)", _slots,
        seen=("queued_ratio", "slots_used_count", "nfs.backlog_count"), published=_REPORT,
        moves="nfs.backlog_count falls", worse="memory and queues at the server",
        unless=(_NOT_NFS, without("backlog_count", "no request was seen waiting for a slot")),
        place="node",
        effort="site",
    ),
    Mend(
        "more-lustre-rpcs", ("storage-client-queue",), "Allow more RPCs under way to each target",
        "max_rpcs_in_flight, max_pages_per_rpc, stripes over more targets", _rpcs,
        seen=("queued_ratio", "rpcs_at_limit_ratio", "read_rpc_ns"),
        moves="lustre.rpcs_at_limit_ratio falls", worse="load of the object servers",
        unless=(_NOT_LUSTRE,),
        place="node",
        effort="site",
    ),
    Mend(
        "multichannel", ("storage-client-queue",), "Mount with several channels",
        "mount -t cifs -o multichannel,max_channels=4", _multichannel, seen=("queued_ratio",),
        moves="cifs.waiting_count falls", worse="connections at the server",
        unless=(_NOT_CIFS,),
        place="node",
        effort="site",
    ),
    Mend(
        "pack-files", ("storage-metadata",), "Pack small files into large records, and index once",
        "tar shards or record files; an index in the place of listing folders", _records,
        seen=("metadata_ratio", "metadata_operations_total"),
        moves="metadata_operations_total falls to a few per record",
        worse="samples are shuffled within a buffer only",
        effort="data",
    ),
    Mend(
        "cache-attributes", ("storage-metadata",), "Let the client keep attributes for longer",
        "mount -o ro,nocto,actimeo=3600 for data that nobody writes", _attributes,
        seen=("metadata_ratio",), moves="GETATTR and ACCESS of nfs.operations_total fall",
        worse="changes made elsewhere are seen up to an hour late", unless=(_NOT_NFS,),
        place="node",
        effort="site",
    ),
    Mend(
        "mend-the-path", ("storage-remote",), "Find out why requests are sent again",
        "errors between this node and the server", _path,
        seen=("retransmits_total", "timeouts_total"),
        moves="nfs.retransmits_total does not rise",
        unless=(
            Rule("nothing-sent-again", "no request was sent again or timed out",
                 lambda s: not any(n.endswith(("retransmits_total", "timeouts_total")) and v > 0
                                   for n, v in s.values.items())),
        ),
        place="node",
        effort="look",
    ),
)  # fmt: skip

LAST = (
    Mend(
        "ask-the-server", ("storage-remote",), "Ask whoever runs the server what limits it",
        "the time of a read is spent on the way and at the server", _ask_server,
        seen=("read_latency_ns", "read_rpc_ns", "read_bytes_total"),
        moves="the time of a read falls",
        unless=(without("read_bytes_total", "no bytes from a server were counted"),),
        place="node",
        effort="site",
    ),
)  # fmt: skip
