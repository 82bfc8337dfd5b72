"""What drivers of RDMA cards call their counters: which files make up one number of ours.

Names by driver, from their source under drivers/infiniband/hw and from their makers:

    mlx5     counters.c; docs.nvidia.com "Understanding mlx5 Linux Counters". Those of queues have
             32 bits and begin anew, those of congestion 64
    mlx4     main.c, the diagnostic counters rq_num_* and sq_num_*; 32 bits
    bnxt_re  hw_counters.c; rx_bytes is what came to single addresses, on newer cards rx_roce_only_*
    irdma    verbs.c; the driver adds up 24 to 56 bits to 64, so nothing wraps. Generation 3 says
             "RNR received", "Rcvd Out of order packets" with blanks in the file's name
    efa      efa_verbs.c; docs.aws.amazon.com "Monitor an Elastic Fabric Adapter": rx_bytes and
             tx_bytes are all the device carried; what reads and writes moved is not added to them
    ionic    the Pensando driver's octets of single and many addresses
    hfi1     mad.c, chip.c (Omni-Path): see `OPA`
    cxi      not below /sys/class/infiniband: `linux/cxi.py`

The specification's own counters (`port_*`, `symbol_error`, …) are those of InfiniBand Architecture
volume 1, performance management: data in words of four octets, and a narrow counter stops at its
end.
"""

from __future__ import annotations

from typing import NamedTuple

WORD_BYTES = 4
FLIT_BYTES = 8
_CLASSES = range(8)  # of traffic, on a Slingshot card


class Source(NamedTuple):
    """The files one signal is added up from: those of the first group of which any is there."""

    groups: tuple[tuple[str, ...], ...]
    factor: int = 1


# Where each counter stops; data and packets have 64 bits where the port has the extended set.
ENDS = {
    "symbol_error": 0xFFFF,
    "link_error_recovery": 0xFF,
    "link_downed": 0xFF,
    "port_rcv_errors": 0xFFFF,
    "port_xmit_discards": 0xFFFF,
    "port_xmit_wait": 0xFFFFFFFF,
    "port_rcv_data": 0xFFFFFFFF,
    "port_xmit_data": 0xFFFFFFFF,
}


def _of_classes(*stems: str) -> tuple[str, ...]:
    return tuple(f"{stem}_{number}" for stem in stems for number in _CLASSES)


RECEIVED = Source(
    (
        ("rx_roce_only_bytes",),
        ("rx_bytes",),
        ("ip4InOctets", "ip6InOctets"),
        ("rx_rdma_ucast_bytes", "rx_rdma_mcast_bytes"),
        ("hni_sts_rx_ok_octets",),
    )
)
SENT = Source(
    (
        ("tx_roce_only_bytes",),
        ("tx_bytes",),
        ("ip4OutOctets", "ip6OutOctets"),
        ("tx_rdma_ucast_bytes", "tx_rdma_mcast_bytes"),
        ("hni_sts_tx_ok_octets",),
    )
)
RECEIVED_WORDS = Source((("port_rcv_data",),), WORD_BYTES)
SENT_WORDS = Source((("port_xmit_data",),), WORD_BYTES)
XMIT_WAIT = Source((("port_xmit_wait",), ("TxWait",)))
CNP_RECEIVED = Source(
    (
        ("rp_cnp_handled", "rp_cnp_ignored"),
        ("rx_cnp_pkts",),
        ("cnpHandled", "cnpIgnored"),
        ("rx_rdma_cnp_pkts",),
        ("DcRcvBcn",),
    )
)
CNP_SENT = Source((("np_cnp_sent",), ("np_cnp_pkts",), ("tx_cnp_pkts",), ("cnpSent",),
                   ("tx_rdma_cnp_pkts",)))  # fmt: skip
ECN_MARKED = Source(
    (
        ("np_ecn_marked_roce_packets",),
        ("rx_ecn_marked_pkts",),
        ("RxECNMrkd",),
        ("DcRcvFcn",),
        _of_classes("ixe_tc_req_ecn_pkts", "ixe_tc_rsp_ecn_pkts"),
    )
)
OUT_OF_SEQUENCE = Source(
    (
        ("out_of_sequence",),
        ("oos_drop_count",),
        ("out_of_seq_request",),
        ("rq_num_oos",),
        ("Rcvd Out of order packets",),
    )
)
RETRANSMITS = Source(
    (
        ("packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err", "roce_adp_retrans"),
        ("seq_err_naks_rcvd", "to_retransmits"),
        ("sq_num_oos", "sq_num_to"),
        ("RetransSegs",),
        ("tcpRetransSegs",),
        ("retrans_pkts",),
        ("pct_spt_timeouts", "pct_sct_timeouts"),
    )
)
OUT_OF_BUFFER = Source((("out_of_buffer",), ("rx_out_of_buffer",), ("rq_num_rnr",), ("RNR sent",)))
NOT_READY = Source((("rnr_nak_retry_err",), ("rnr_naks_rcvd",), ("sq_num_rnr",), ("RNR received",)))
LINK_DOWNED = Source((("link_downed",),))
LINK_RECOVERIES = Source((("link_error_recovery",),))
SYMBOL_ERRORS = Source((("symbol_error",), ("hni_pcs_uncorrected_cw",)))
RECEIVE_ERRORS = Source((("port_rcv_errors",),))
DISCARDS = Source(
    (
        (
            "port_xmit_discards",
            "rx_roce_discards",
            "tx_roce_discards",
            "rx_drops",
            "ip4InDiscards",
            "ip6InDiscards",
            *_of_classes("hni_discard_cntr"),
        ),
    )
)


class Dialect(NamedTuple):
    """How a driver departs from the specification."""

    factors: dict[str, int]
    """By file: how many bytes one is, where it is not the source's factor."""
    empty: frozenset[str]
    """Files that are there and always 0, since the driver does not fill them."""


PLAIN = Dialect({}, frozenset())
OPA = Dialect(
    # mad.c, pma_get_ib_portcounters_ext: flits of eight octets go out as they are counted.
    {"port_rcv_data": FLIT_BYTES, "port_xmit_data": FLIT_BYTES},
    # pma_get_ib_portcounters: "N/A for OPA", and nothing for the ticks of waiting.
    frozenset({"symbol_error", "port_xmit_wait"}),
)
