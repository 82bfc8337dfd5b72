"""Signals of the network: interfaces, TCP, the job's sockets, network cards, RDMA ports."""

from __future__ import annotations

from clusterprof.signals.made import declare as _signal

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
    "tcp.job_unsent_bytes", "nic", "Written by the job and not yet acknowledged, sent or not."
)
TCP_JOB_UNREAD = _signal(
    "tcp.job_unread_bytes", "nic", "Received for the job and not yet read by it."
)
TCP_JOB_LOST = _signal(
    "tcp.job_lost_segments_count", "nic", "Segments TCP takes to be lost at the moment."
)
TCP_JOB_RTT = _signal("tcp.job_rtt_ns", "nic", "Smoothed round-trip time, median of connections.")
TCP_JOB_MIN_RTT = _signal(
    "tcp.job_min_rtt_ns", "nic", "Shortest recent round-trip time, median of connections."
)
TCP_JOB_DELIVERY = _signal(
    "tcp.job_delivery_bytes_per_second",
    "nic",
    "Rate at which peers got data, as TCP last estimated it; sum of connections that sent.",
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

# --- ethtool: what the driver of a network card counts; device "<nic> rx" = it was told to stop ---
NET_PAUSE_FRAMES = _signal(
    "network.pause_frames_total",
    "nic direction",
    "Pause frames of all priorities; rx: the peer told us to stop sending, tx: we told the peer.",
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
    "network.ecn_marked_total", "nic", "Packets the card marked for congestion, or got marked."
)
NET_CNP = _signal("network.cnp_total", "nic", "Congestion notifications that came, as counted.")
NET_DISCARDS_PHY = _signal(
    "network.discards_phy_total",
    "nic",
    "Packets dropped at the port for want of buffers, both ways.",
)
NET_OUT_OF_BUFFER = _signal(
    "network.out_of_buffer_total",
    "nic",
    "Packets that came and found no buffer of the host's: it takes them in too slowly.",
)
NET_SHAPED = _signal(
    "network.shaped_total", "nic", "Packets a cloud's limits held back or dropped, both ways."
)

# --- rdma: /sys/class/infiniband; device = "<device>/<port>" --------------------------------------
RDMA_RECEIVE = _signal("rdma.receive_bytes_total", "port", "Bytes received.")
RDMA_TRANSMIT = _signal("rdma.transmit_bytes_total", "port", "Bytes sent.")
RDMA_TRANSMIT_WAIT = _signal(
    "rdma.transmit_wait_total",
    "port",
    "Ticks of the card with data to send and none sent: no credits, or another's turn.",
)
RDMA_CNP = _signal(
    "rdma.cnp_total", "port", "Congestion notifications that came: it was asked to send slower."
)
RDMA_CNP_SENT = _signal("rdma.cnp_sent_total", "port", "Congestion notifications it sent.")
RDMA_ECN_MARKED = _signal(
    "rdma.ecn_marked_total", "port", "Packets that came with a mark of congestion."
)
RDMA_OUT_OF_SEQUENCE = _signal(
    "rdma.out_of_sequence_total", "port", "Packets that came out of sequence."
)
RDMA_RETRANSMITS = _signal(
    "rdma.retransmits_total", "port", "Times it had to send again: refused sequences, timeouts."
)
RDMA_DISCARDS = _signal("rdma.discards_total", "port", "Packets the port dropped, both ways.")
RDMA_LINK_DOWNED = _signal("rdma.link_downed_total", "port", "Times the link failed and went down.")
RDMA_SYMBOL_ERRORS = _signal(
    "rdma.symbol_errors_total", "port", "Minor errors of the link on one or more lanes."
)
RDMA_RECEIVE_ERRORS = _signal(
    "rdma.receive_errors_total", "port", "Packets that came with an error and were dropped."
)
RDMA_LINK_RECOVERIES = _signal(
    "rdma.link_recoveries_total", "port", "Times the link failed and came back by itself."
)
RDMA_OUT_OF_BUFFER = _signal(
    "rdma.out_of_buffer_total", "port", "Messages that came and found no buffer posted for them."
)
RDMA_NOT_READY = _signal(
    "rdma.not_ready_total",
    "port",
    "Times a peer had no buffer for what was sent, and it had to be sent again.",
)
RDMA_STATE = _signal(
    "rdma.state_count", "port", "State by its number: 1 down, 2 initialising, 3 armed, 4 active."
)
RDMA_LINK_SPEED = _signal(
    "rdma.link_bytes_per_second", "port", "Rate of the link, while it is active."
)
RDMA_LINK_WIDTH = _signal("rdma.link_width_lanes_count", "port", "Lanes of the link.")
