"""Signals of storage: block devices, NFS, Lustre and CIFS."""

from __future__ import annotations

from clusterprof.signals.made import declare as _signal

# --- disk: /proc/diskstats ----------------------------------------------------------------------
DISK_READ_BYTES = _signal("disk.read_bytes_total", "disk", "Bytes read from the device.")
DISK_READS = _signal("disk.reads_total", "disk", "Read requests completed.")
DISK_READ_TIME = _signal("disk.read_ns_total", "disk", "Sum over reads of queue and service time.")
DISK_WRITE_BYTES = _signal("disk.write_bytes_total", "disk", "Bytes written to the device.")
DISK_WRITES = _signal("disk.writes_total", "disk", "Write requests completed.")
DISK_WRITE_TIME = _signal("disk.write_ns_total", "disk", "Sum over writes of their time.")
DISK_BUSY = _signal("disk.busy_ns_total", "disk", "Time with at least one request outstanding.")
DISK_QUEUE = _signal("disk.queue_ns_total", "disk", "Integral of the requests outstanding.")

# --- mounts: /proc/self/mountstats (NFS); device = "<mount point>" or "<mount point>:<OP>" -------
NFS_OPS = _signal("nfs.operations_total", "mount:op", "Operations of this kind finished.")
NFS_QUEUE = _signal("nfs.queue_ns_total", "mount:op", "Sum of time waiting for an RPC slot.")
NFS_RTT = _signal("nfs.rtt_ns_total", "mount:op", "Sum of time between sending and the reply.")
NFS_EXECUTE = _signal("nfs.execute_ns_total", "mount:op", "Sum of time from request to result.")
NFS_RETRANSMITS = _signal("nfs.retransmits_total", "mount:op", "Requests sent more than once.")
NFS_TIMEOUTS = _signal(
    "nfs.timeouts_total", "mount:op", "Major timeouts: the server did not answer for long."
)
NFS_READ_BYTES = _signal("nfs.read_bytes_total", "mount", "Bytes received from the server.")
NFS_WRITE_BYTES = _signal("nfs.write_bytes_total", "mount", "Bytes sent to the server.")
NFS_BACKLOG = _signal("nfs.backlog_count_total", "mount", "Integral of the requests in backlog.")
# What follows, and the backlog, is added up over the connections of a mount (nconnect). The
# integrals are over requests, not time: each request adds the length it found when it was sent.
NFS_SENDS = _signal("nfs.sends_total", "mount", "Requests sent, those sent again too.")
NFS_BAD_XIDS = _signal("nfs.bad_xids_total", "mount", "Replies that no request was waiting for.")
NFS_CONNECTS = _signal("nfs.connects_total", "mount", "Times a connection was made.")
NFS_SLOTS_USED = _signal(
    "nfs.slots_used_count_total", "mount", "Integral of the slots in use; by sends: their mean."
)
NFS_SENDING = _signal(
    "nfs.sending_count_total", "mount", "Integral of the requests waiting to be sent."
)
NFS_PENDING = _signal(
    "nfs.pending_count_total", "mount", "Integral of the requests waiting for their reply."
)
NFS_SLOTS_MOST = _signal(
    "nfs.slots_most_count", "mount", "Most slots a connection has had in use; largest of them."
)
NFS_CONNECTIONS = _signal("nfs.connections_count", "mount", "Connections the mount goes over.")

# --- lustre: device = mount point, "<mount point>:<kind>" or the name of a target ----------------
LUSTRE_READ_BYTES = _signal(
    "lustre.read_bytes_total", "mount", "Bytes programs read, from the cache too."
)
LUSTRE_WRITE_BYTES = _signal("lustre.write_bytes_total", "mount", "Bytes programs wrote.")
LUSTRE_OPS = _signal(
    "lustre.operations_total", "mount:op", "Calls of programs of this kind (open, getattr, …)."
)
LUSTRE_OP_TIME = _signal(
    "lustre.operation_ns_total", "mount:op", "Sum over these calls of their time."
)
LUSTRE_FETCHED_BYTES = _signal(
    "lustre.fetched_bytes_total", "mount", "Bytes that came from the object servers."
)
LUSTRE_STORED_BYTES = _signal(
    "lustre.stored_bytes_total", "mount", "Bytes that went to the object servers."
)
LUSTRE_RPCS = _signal(
    "lustre.rpcs_total", "mount:kind", "RPCs answered, by kind: read, write, metadata."
)
LUSTRE_RPC_TIME = _signal(
    "lustre.rpc_ns_total", "mount:kind", "Sum over RPCs of the time between sending and the reply."
)
LUSTRE_AT_LIMIT = _signal(
    "lustre.rpcs_at_limit_total",
    "mount",
    "Read RPCs that took the last place of max_rpcs_in_flight of their target.",
)
LUSTRE_PENDING = _signal(
    "lustre.pending_read_bytes", "mount", "Asked for and not yet in an RPC; whole pages."
)
LUSTRE_IN_FLIGHT = _signal(
    "lustre.read_rpcs_in_flight_count", "mount", "Read RPCs under way, all targets together."
)
LUSTRE_TIMEOUTS = _signal("lustre.timeouts_total", "mount", "RPCs that were given up and resent.")
LUSTRE_UNCONNECTED = _signal(
    "lustre.targets_unconnected_count",
    "mount",
    "Targets whose connection is neither up nor put to rest.",
)
LUSTRE_TARGET_RPCS = _signal(
    "lustre.target_rpcs_total", "target", "RPCs this server's target answered."
)
LUSTRE_TARGET_TIME = _signal(
    "lustre.target_rpc_ns_total", "target", "Sum over them of the time between sending and reply."
)

# --- cifs: /proc/fs/cifs; device = mount point or share, or "<that>:<OP>", or the server ---------
CIFS_READ_BYTES = _signal("cifs.read_bytes_total", "share", "Bytes received from the server.")
CIFS_WRITE_BYTES = _signal("cifs.write_bytes_total", "share", "Bytes sent to the server.")
CIFS_OPS = _signal("cifs.operations_total", "share:op", "Requests of this kind.")
CIFS_OP_TIME = _signal(
    "cifs.operation_ns_total",
    "server:op",
    "Sum over the requests to a server of their time, once they had a credit, to the end.",
)
CIFS_IN_FLIGHT = _signal("cifs.in_flight_count", "server", "Requests sent and not answered.")
CIFS_WAITING = _signal(
    "cifs.waiting_count", "server", "Requests that wait for a credit before they are sent."
)
CIFS_CREDITS = _signal("cifs.credits_count", "server", "Requests that may be sent at once.")
