"""node_exporter: its names of what a host does, and the labels that say of which device."""

from __future__ import annotations

from clusterprof.importers.telemetry.gathered import Meaning

_NS, _PAGE = 1e9, 4096.0


def _sum(signal: str, names: tuple[str, ...], scale: float = 1.0) -> dict[str, Meaning]:
    return {name: Meaning(signal, scale, name, parts=names) for name in names}


PLAIN: dict[str, tuple[Meaning, str]] = {
    "node_" + name: (meaning, label)
    for label, meanings in {
        "": {
            "pressure_cpu_waiting_seconds_total": Meaning("pressure.cpu_some_ns_total", _NS),
            "pressure_io_waiting_seconds_total": Meaning("pressure.io_some_ns_total", _NS),
            "pressure_io_stalled_seconds_total": Meaning("pressure.io_full_ns_total", _NS),
            "pressure_memory_waiting_seconds_total": Meaning("pressure.memory_some_ns_total", _NS),
            "pressure_memory_stalled_seconds_total": Meaning("pressure.memory_full_ns_total", _NS),
            "procs_running": Meaning("cpu.runnable_count"),
            "procs_blocked": Meaning("cpu.blocked_count"),
            "memory_MemAvailable_bytes": Meaning("memory.available_bytes"),
            "memory_Cached_bytes": Meaning("memory.cached_bytes"),
            "memory_Dirty_bytes": Meaning("memory.dirty_bytes"),
            "memory_Writeback_bytes": Meaning("memory.writeback_bytes"),
            "memory_SwapFree_bytes": Meaning("memory.swap_free_bytes"),
            "vmstat_pgmajfault": Meaning("memory.major_faults_total"),
            "vmstat_pgfault": Meaning("memory.faults_total"),
            "vmstat_pswpin": Meaning("memory.swap_in_bytes_total", _PAGE),
            "vmstat_pswpout": Meaning("memory.swap_out_bytes_total", _PAGE),
            "vmstat_oom_kill": Meaning("memory.oom_kills_total"),
            "netstat_Tcp_OutSegs": Meaning("tcp.segments_sent_total"),
            "netstat_Tcp_RetransSegs": Meaning("tcp.retransmits_total"),
            "netstat_TcpExt_TCPTimeouts": Meaning("tcp.timeouts_total"),
        },
        "cpu": {"schedstat_waiting_seconds_total": Meaning("cpu.run_delay_ns_total", _NS)},
        "device": {
            "disk_read_bytes_total": Meaning("disk.read_bytes_total"),
            "disk_reads_completed_total": Meaning("disk.reads_total"),
            "disk_read_time_seconds_total": Meaning("disk.read_ns_total", _NS),
            "disk_written_bytes_total": Meaning("disk.write_bytes_total"),
            "disk_writes_completed_total": Meaning("disk.writes_total"),
            "disk_write_time_seconds_total": Meaning("disk.write_ns_total", _NS),
            "disk_io_time_seconds_total": Meaning("disk.busy_ns_total", _NS),
            "disk_io_time_weighted_seconds_total": Meaning("disk.queue_ns_total", _NS),
            "network_receive_bytes_total": Meaning("network.receive_bytes_total"),
            "network_transmit_bytes_total": Meaning("network.transmit_bytes_total"),
            "network_receive_drop_total": Meaning("network.receive_drops_total"),
            "network_transmit_drop_total": Meaning("network.transmit_drops_total"),
            "network_speed_bytes": Meaning("network.link_bytes_per_second"),
            "network_carrier_changes_total": Meaning("network.carrier_changes_total"),
            **_sum(
                "network.errors_total",
                ("network_receive_errs_total", "network_transmit_errs_total"),
            ),
        },
        "device/port": {
            "infiniband_port_data_received_bytes_total": Meaning("rdma.receive_bytes_total"),
            "infiniband_port_data_transmitted_bytes_total": Meaning("rdma.transmit_bytes_total"),
            "infiniband_port_transmit_wait_total": Meaning("rdma.transmit_wait_total"),
            "infiniband_link_downed_total": Meaning("rdma.link_downed_total"),
            "infiniband_symbol_error_total": Meaning("rdma.symbol_errors_total"),
            "infiniband_port_errors_received_total": Meaning("rdma.receive_errors_total"),
            "infiniband_link_error_recovery_total": Meaning("rdma.link_recoveries_total"),
            "infiniband_rate_bytes_per_second": Meaning("rdma.link_bytes_per_second"),
            "infiniband_state_id": Meaning("rdma.state_count"),
            **_sum(
                "rdma.discards_total",
                (
                    "infiniband_port_discards_received_total",
                    "infiniband_port_discards_transmitted_total",
                ),
            ),
        },
    }.items()
    for name, meaning in meanings.items()
}
"""Name -> its meaning, and the labels that name the device."""

CPU = "node_cpu_seconds_total"
_USER, _SYSTEM = ("user", "nice"), ("system", "irq", "softirq")
CPU_MODES: dict[str, Meaning] = {
    **_sum("cpu.user_ns_total", _USER, _NS),
    **_sum("cpu.system_ns_total", _SYSTEM, _NS),
    "idle": Meaning("cpu.idle_ns_total", _NS),
    "iowait": Meaning("cpu.iowait_ns_total", _NS),
    "steal": Meaning("cpu.steal_ns_total", _NS),
}
