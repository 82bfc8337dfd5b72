"""Declare signals of the network: interfaces, TCP, the job's sockets, network cards, RDMA
ports.

Declare signals of storage: block devices, NFS, Lustre and CIFS.
"""

from __future__ import annotations

from clusterprof.signals.signal import register_signal as _signal

# --- network: /proc/net/dev, /sys/class/net, /proc/net/snmp, netstat ------------------------------
NET_RECEIVE = _signal("network.receive_bytes_total", "nic", "Bytes received.")
NET_TRANSMIT = _signal("network.transmit_bytes_total", "nic", "Bytes sent.")
NET_RECEIVE_DROPS = _signal("network.receive_drops_total", "nic", "Packets dropped on receipt.")
NET_TRANSMIT_DROPS = _signal("network.transmit_drops_total", "nic", "Packets dropped on sending.")
NET_ERRORS = _signal("network.errors_total", "nic", "Packets with errors, both ways.")
NET_LINK_SPEED = _signal(
    "network.link_bytes_per_second", "nic", "Speed the link was brought up at."
)
TCP_SEGMENTS = _signal("tcp.segments_sent_total", "", "TCP segments sent, retransmissions too.")
TCP_RETRANSMITS = _signal("tcp.retransmits_total", "", "TCP segments sent again.")
TCP_TIMEOUTS = _signal("tcp.timeouts_total", "", "TCP retransmission timers that expired.")
NET_CARRIER_CHANGES = _signal(
    "network.carrier_changes_total", "nic", "Times the link went down or came up."
)
NET_BOND_MEMBERS_UP = _signal(
    "network.bond_members_up_count", "bond", "Members of the bond whose link is up."
)

# --- sockets: NETLINK_SOCK_DIAG; the job's own connections, by the interface they go out by -------
TCP_JOB_CONNECTIONS = _signal(
    "tcp.job_connections_count", "nic", "Established connections of the job that leave the machine."
)
TCP_JOB_UNSENT = _signal(
    "tcp.job_unsent_bytes", "nic", "Bytes written by the job and not yet acknowledged, sent or not."
)
TCP_JOB_UNREAD = _signal(
    "tcp.job_unread_bytes", "nic", "Bytes received for the job and not yet read by it."
)
TCP_JOB_LOST = _signal(
    "tcp.job_lost_segments_count", "nic", "Segments TCP currently considers lost."
)
TCP_JOB_RTT = _signal("tcp.job_rtt_ns", "nic", "Smoothed round-trip time, median of connections.")
TCP_JOB_MIN_RTT = _signal(
    "tcp.job_min_rtt_ns", "nic", "Shortest recent round-trip time, median of connections."
)
TCP_JOB_DELIVERY = _signal(
    "tcp.job_delivery_bytes_per_second",
    "nic",
    "TCP's last estimate of the delivery rate; sum over connections that sent.",
)
TCP_JOB_RETRANSMITS = _signal("tcp.job_retransmits_total", "nic", "Segments sent again.")
TCP_JOB_ECN_MARKED = _signal(
    "tcp.job_ecn_marked_total", "nic", "Segments that reached the peer marked for congestion."
)
TCP_JOB_BUSY = _signal(
    "tcp.job_busy_ns_total", "nic", "Time with data to send or to be acknowledged, all connections."
)
TCP_JOB_RWND_LIMITED = _signal(
    "tcp.job_rwnd_limited_ns_total", "nic", "Part of busy: the peer's receive window was full."
)
TCP_JOB_SNDBUF_LIMITED = _signal(
    "tcp.job_sndbuf_limited_ns_total", "nic", "Part of busy: the send buffer was too small."
)
TCP_JOB_ACKED = _signal("tcp.job_acked_bytes_total", "nic", "Bytes sent and acknowledged.")
TCP_JOB_RECEIVED = _signal("tcp.job_received_bytes_total", "nic", "Bytes received in order.")

# --- ethtool: counters of the network card's driver; device "<nic> rx" = asked to stop
NET_PAUSE_FRAMES = _signal(
    "network.pause_frames_total",
    "nic direction",
    "Pause frames of all priorities; rx: the peer asked this node to stop; tx: this node asked it.",
)
NET_PRIORITY_PAUSE_FRAMES = _signal(
    "network.priority_pause_frames_total",
    "nic direction priority",
    'Pause frames of one priority (PFC), "<nic> rx 3"; a part of network.pause_frames_total.',
)
NET_PAUSED = _signal(
    "network.paused_ns_total",
    "nic direction",
    "Time sending was held back by pause frames, sum over priorities; rx and tx as for the frames.",
)
NET_ECN_MARKED = _signal(
    "network.ecn_marked_total", "nic", "Packets with congestion marks, set by the card or received."
)
NET_CNP = _signal("network.cnp_total", "nic", "Congestion notifications received.")
NET_DISCARDS_PHY = _signal(
    "network.discards_phy_total",
    "nic",
    "Packets dropped at the port for lack of buffers, both ways.",
)
NET_OUT_OF_BUFFER = _signal(
    "network.out_of_buffer_total",
    "nic",
    "Packets dropped because the host provided no buffer: it receives too slowly.",
)
NET_SHAPED = _signal(
    "network.shaped_total", "nic", "Packets delayed or dropped by a cloud's limits, both ways."
)

# --- rdma: /sys/class/infiniband; device = "<device>/<port>" --------------------------------------
RDMA_RECEIVE = _signal("rdma.receive_bytes_total", "port", "Bytes received.")
RDMA_TRANSMIT = _signal("rdma.transmit_bytes_total", "port", "Bytes sent.")
RDMA_TRANSMIT_WAIT = _signal(
    "rdma.transmit_wait_total",
    "port",
    "Ticks of the card with data to send and none sent: no credits, or arbitration.",
)
RDMA_CNP = _signal(
    "rdma.cnp_total", "port", "Congestion notifications received: requests to send more slowly."
)
RDMA_CNP_SENT = _signal("rdma.cnp_sent_total", "port", "Congestion notifications it sent.")
RDMA_ECN_MARKED = _signal(
    "rdma.ecn_marked_total", "port", "Packets received with a congestion mark."
)
RDMA_OUT_OF_SEQUENCE = _signal(
    "rdma.out_of_sequence_total", "port", "Packets received out of sequence."
)
RDMA_RETRANSMITS = _signal(
    "rdma.retransmits_total", "port", "Retransmissions: rejected sequences, timeouts."
)
RDMA_DISCARDS = _signal("rdma.discards_total", "port", "Packets the port dropped, both ways.")
RDMA_LINK_DOWNED = _signal("rdma.link_downed_total", "port", "Times the link failed and went down.")
RDMA_SYMBOL_ERRORS = _signal(
    "rdma.symbol_errors_total", "port", "Minor errors of the link on one or more lanes."
)
RDMA_RECEIVE_ERRORS = _signal(
    "rdma.receive_errors_total", "port", "Packets received with an error and dropped."
)
RDMA_LINK_RECOVERIES = _signal(
    "rdma.link_recoveries_total", "port", "Times the link failed and recovered by itself."
)
RDMA_OUT_OF_BUFFER = _signal(
    "rdma.out_of_buffer_total", "port", "Messages received without a posted buffer."
)
RDMA_NOT_READY = _signal(
    "rdma.not_ready_total", "port", "Retransmissions because the peer had no buffer."
)
RDMA_STATE = _signal(
    "rdma.state_count", "port", "Port state: 1 down, 2 initializing, 3 armed, 4 active."
)
RDMA_LINK_SPEED = _signal(
    "rdma.link_bytes_per_second", "port", "Rate of the link, while it is active."
)
RDMA_LINK_WIDTH = _signal("rdma.link_width_lanes_count", "port", "Lanes of the link.")


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
    "nfs.timeouts_total", "mount:op", "Major timeouts: the server did not answer for a long time."
)
NFS_READ_BYTES = _signal("nfs.read_bytes_total", "mount", "Bytes received from the server.")
NFS_WRITE_BYTES = _signal("nfs.write_bytes_total", "mount", "Bytes sent to the server.")
NFS_BACKLOG = _signal("nfs.backlog_count_total", "mount", "Integral of the requests in backlog.")
# The following signals, and the backlog, are sums over the connections of a mount (nconnect).
# Integrals are over requests, not time: each request adds the queue length when it was sent.
NFS_SENDS = _signal("nfs.sends_total", "mount", "Requests sent, including retransmissions.")
NFS_BAD_XIDS = _signal("nfs.bad_xids_total", "mount", "Replies without a matching request.")
NFS_CONNECTS = _signal("nfs.connects_total", "mount", "Times a connection was made.")
NFS_SLOTS_USED = _signal(
    "nfs.slots_used_count_total", "mount", "Integral of the slots in use; over sends: the mean."
)
NFS_SENDING = _signal(
    "nfs.sending_count_total", "mount", "Integral of the requests waiting to be sent."
)
NFS_PENDING = _signal(
    "nfs.pending_count_total", "mount", "Integral of the requests waiting for their reply."
)
NFS_SLOTS_MOST = _signal(
    "nfs.slots_most_count", "mount", "Maximum of slots in use on any connection."
)
NFS_CONNECTIONS = _signal("nfs.connections_count", "mount", "Connections of the mount.")

# --- lustre: device = mount point, "<mount point>:<kind>" or the name of a target ----------------
LUSTRE_READ_BYTES = _signal(
    "lustre.read_bytes_total", "mount", "Bytes programs read, including from the cache."
)
LUSTRE_WRITE_BYTES = _signal("lustre.write_bytes_total", "mount", "Bytes programs wrote.")
LUSTRE_OPS = _signal(
    "lustre.operations_total", "mount:op", "Calls of programs of this kind (open, getattr, …)."
)
LUSTRE_OP_TIME = _signal(
    "lustre.operation_ns_total", "mount:op", "Sum over these calls of their time."
)
LUSTRE_FETCHED_BYTES = _signal(
    "lustre.fetched_bytes_total", "mount", "Bytes received from the object servers."
)
LUSTRE_STORED_BYTES = _signal(
    "lustre.stored_bytes_total", "mount", "Bytes sent to the object servers."
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
    "lustre.pending_read_bytes", "mount", "Bytes requested and not yet in an RPC; whole pages."
)
LUSTRE_IN_FLIGHT = _signal(
    "lustre.read_rpcs_in_flight_count", "mount", "Read RPCs under way, all targets together."
)
LUSTRE_TIMEOUTS = _signal("lustre.timeouts_total", "mount", "RPCs that timed out and were resent.")
LUSTRE_UNCONNECTED = _signal(
    "lustre.targets_unconnected_count", "mount", "Targets whose connection is neither up nor idle."
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
    "Sum over requests to a server of the time from their credit to their completion.",
)
CIFS_IN_FLIGHT = _signal("cifs.in_flight_count", "server", "Requests sent and not answered.")
CIFS_WAITING = _signal(
    "cifs.waiting_count", "server", "Requests that wait for a credit before they are sent."
)
CIFS_CREDITS = _signal("cifs.credits_count", "server", "Requests that may be sent at once.")
