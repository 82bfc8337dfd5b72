"""Metric names of AMD's device-metrics-exporter and Omnistat.

Fields of NVIDIA's DCGM, and their short names in `dcgmi dmon`.

Units are those of the field's documentation. Violation times are ns, whatever the
help text of old exporters claims (us); rates of PCIe and NVLink are bytes per
second, though some exporters declare them as counters.

Metric names of node_exporter, and the labels that identify the device.

Mapping from labeled metrics like `DCGM_FI_DEV_GPU_UTIL{gpu="0",…}` to our signals.

Labeled series from any form of Prometheus data, sorted into columns by host and device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from clusterprof.analysis.importers.core.base import Account
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.metrics.metric_readings import (
    MAX_READINGS,
    HostReadings,
    MetricMapping,
    MetricReadings,
    ReadingColumn,
)

_PERCENT, _MEGA = 0.01, 1e6

OMNISTAT_METRICS: dict[str, MetricMapping] = {
    "rocm_utilization_percentage": MetricMapping("gpu.busy_ratio", _PERCENT),
    "rocm_average_socket_power_watts": MetricMapping("gpu.power_watts"),
    "rocm_current_socket_power_watts": MetricMapping("gpu.power_watts", choice=1),
    "rocm_power_cap_watts": MetricMapping("gpu.power_limit_watts"),
    "rocm_vram_total_bytes": MetricMapping("gpu.memory_total_bytes"),
    "rocm_vram_busy_percentage": MetricMapping("gpu.memory_busy_ratio", _PERCENT),
    "rocm_temperature_celsius": MetricMapping("gpu.temperature_celsius"),
    "rocm_temperature_edge_celsius": MetricMapping("gpu.temperature_celsius", choice=1),
    "rocm_temperature_hbm_celsius": MetricMapping("gpu.temperature_celsius", choice=2),
    "rocm_sclk_clock_mhz": MetricMapping("gpu.sm_clock_hertz", _MEGA),
    "rocm_mclk_clock_mhz": MetricMapping("gpu.memory_clock_hertz", _MEGA),
}

AMD_EXPORTER_METRICS: dict[str, MetricMapping] = {
    "gpu_gfx_activity": MetricMapping("gpu.busy_ratio", _PERCENT),
    "gpu_umc_activity": MetricMapping("gpu.memory_busy_ratio", _PERCENT),
    "gpu_package_power": MetricMapping("gpu.power_watts"),
    "gpu_average_package_power": MetricMapping("gpu.power_watts", choice=1),
    "gpu_junction_temperature": MetricMapping("gpu.temperature_celsius"),
    "gpu_edge_temperature": MetricMapping("gpu.temperature_celsius", choice=1),
}


_PERCENT_DCGM_NAMES, _MEGA_DCGM_NAMES, _MIB = 0.01, 1e6, float(1 << 20)

DCGM_FIELDS: dict[str, MetricMapping] = {
    "DCGM_FI_" + name: meaning
    for name, meaning in {
        "PROF_GR_ENGINE_ACTIVE": MetricMapping("gpu.busy_ratio"),
        "DEV_GPU_UTIL": MetricMapping("gpu.busy_ratio", _PERCENT_DCGM_NAMES, choice=1),
        "DEV_MEM_COPY_UTIL": MetricMapping("gpu.memory_busy_ratio", _PERCENT_DCGM_NAMES),
        "PROF_SM_ACTIVE": MetricMapping("gpu.sm_active_ratio"),
        "PROF_SM_OCCUPANCY": MetricMapping("gpu.sm_occupancy_ratio"),
        "PROF_PIPE_TENSOR_ACTIVE": MetricMapping("gpu.tensor_active_ratio"),
        "PROF_DRAM_ACTIVE": MetricMapping("gpu.memory_bandwidth_ratio"),
        "PROF_PCIE_RX_BYTES": MetricMapping("gpu.pcie_receive_bytes_per_second"),
        "PROF_PCIE_TX_BYTES": MetricMapping("gpu.pcie_transmit_bytes_per_second"),
        "PROF_NVLINK_RX_BYTES": MetricMapping("gpu.nvlink_receive_bytes_per_second"),
        "PROF_NVLINK_TX_BYTES": MetricMapping("gpu.nvlink_transmit_bytes_per_second"),
        "DEV_FB_USED": MetricMapping("gpu.memory_used_bytes", _MIB),
        "DEV_FB_TOTAL": MetricMapping("gpu.memory_total_bytes", _MIB),
        "DEV_POWER_USAGE": MetricMapping("gpu.power_watts"),
        "DEV_ENFORCED_POWER_LIMIT": MetricMapping("gpu.power_limit_watts"),
        "DEV_POWER_MGMT_LIMIT": MetricMapping("gpu.power_limit_watts", choice=1),
        "DEV_TOTAL_ENERGY_CONSUMPTION": MetricMapping("gpu.energy_joules_total", 1e-3),
        "DEV_GPU_TEMP": MetricMapping("gpu.temperature_celsius"),
        "DEV_SM_CLOCK": MetricMapping("gpu.sm_clock_hertz", _MEGA_DCGM_NAMES),
        "DEV_MEM_CLOCK": MetricMapping("gpu.memory_clock_hertz", _MEGA_DCGM_NAMES),
        "DEV_MAX_SM_CLOCK": MetricMapping("gpu.sm_clock_max_hertz", _MEGA_DCGM_NAMES),
        "DEV_CLOCKS_EVENT_REASONS": MetricMapping("gpu.throttle_bits"),
        "DEV_CLOCK_THROTTLE_REASONS": MetricMapping("gpu.throttle_bits", choice=1),
        "DEV_THERMAL_VIOLATION": MetricMapping("gpu.thermal_violation_ns_total"),
        "DEV_POWER_VIOLATION": MetricMapping("gpu.power_violation_ns_total"),
        "DEV_BOARD_LIMIT_VIOLATION": MetricMapping("gpu.board_limit_violation_ns_total"),
        "DEV_RELIABILITY_VIOLATION": MetricMapping("gpu.reliability_violation_ns_total"),
        "DEV_SYNC_BOOST_VIOLATION": MetricMapping("gpu.sync_boost_violation_ns_total"),
        "DEV_PCIE_LINK_GEN": MetricMapping("gpu.pcie_generation_count"),
        "DEV_PCIE_LINK_WIDTH": MetricMapping("gpu.pcie_width_count"),
        "DEV_PCIE_REPLAY_COUNTER": MetricMapping("gpu.pcie_replays_total"),
        "DEV_ECC_SBE_VOL_TOTAL": MetricMapping("gpu.ecc_corrected_total"),
        "DEV_ECC_DBE_VOL_TOTAL": MetricMapping("gpu.ecc_uncorrected_total"),
        "DEV_CORRECTABLE_REMAPPED_ROWS": MetricMapping("gpu.remapped_rows_corrected_count"),
        "DEV_UNCORRECTABLE_REMAPPED_ROWS": MetricMapping("gpu.remapped_rows_uncorrected_count"),
        "DEV_ROW_REMAP_FAILURE": MetricMapping("gpu.remap_failed_count"),
        "DEV_ROW_REMAP_PENDING": MetricMapping("gpu.remap_pending_count"),
        "DEV_RETIRED_PENDING": MetricMapping("gpu.retirement_pending_count"),
        "DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": MetricMapping("gpu.nvlink_replays_total"),
        "DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": MetricMapping("gpu.nvlink_recoveries_total"),
        "DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": MetricMapping("gpu.nvlink_crc_errors_total"),
    }.items()
}

XID_METRIC = "DCGM_FI_DEV_XID_ERRORS"

DCGM_SHORT_NAMES: dict[str, str] = {
    "GPUTL": "DEV_GPU_UTIL",
    "MCUTL": "DEV_MEM_COPY_UTIL",
    "GRACT": "PROF_GR_ENGINE_ACTIVE",
    "SMACT": "PROF_SM_ACTIVE",
    "SMOCC": "PROF_SM_OCCUPANCY",
    "TENSO": "PROF_PIPE_TENSOR_ACTIVE",
    "DRAMA": "PROF_DRAM_ACTIVE",
    "PCITX": "PROF_PCIE_TX_BYTES",
    "PCIRX": "PROF_PCIE_RX_BYTES",
    "NVLTX": "PROF_NVLINK_TX_BYTES",
    "NVLRX": "PROF_NVLINK_RX_BYTES",
    "FBUSD": "DEV_FB_USED",
    "FBTTL": "DEV_FB_TOTAL",
    "POWER": "DEV_POWER_USAGE",
    "TOTEC": "DEV_TOTAL_ENERGY_CONSUMPTION",
    "TMPTR": "DEV_GPU_TEMP",
    "SMCLK": "DEV_SM_CLOCK",
    "MMCLK": "DEV_MEM_CLOCK",
    "DVCCTR": "DEV_CLOCK_THROTTLE_REASONS",
    "TVIOL": "DEV_THERMAL_VIOLATION",
    "PVIOL": "DEV_POWER_VIOLATION",
}
"""Column heads of `dcgmi dmon`, in capitals -> field."""


_NS, _PAGE = 1e9, 4096.0


def _build_sum_mappings(
    signal: str, names: tuple[str, ...], scale: float = 1.0
) -> dict[str, MetricMapping]:
    return {name: MetricMapping(signal, scale, name, parts=names) for name in names}


NODE_METRICS: dict[str, tuple[MetricMapping, str]] = {
    "node_" + name: (meaning, label)
    for label, meanings in {
        "": {
            "pressure_cpu_waiting_seconds_total": MetricMapping("pressure.cpu_some_ns_total", _NS),
            "pressure_io_waiting_seconds_total": MetricMapping("pressure.io_some_ns_total", _NS),
            "pressure_io_stalled_seconds_total": MetricMapping("pressure.io_full_ns_total", _NS),
            "pressure_memory_waiting_seconds_total": MetricMapping(
                "pressure.memory_some_ns_total", _NS
            ),
            "pressure_memory_stalled_seconds_total": MetricMapping(
                "pressure.memory_full_ns_total", _NS
            ),
            "procs_running": MetricMapping("cpu.runnable_count"),
            "procs_blocked": MetricMapping("cpu.blocked_count"),
            "memory_MemAvailable_bytes": MetricMapping("memory.available_bytes"),
            "memory_Cached_bytes": MetricMapping("memory.cached_bytes"),
            "memory_Dirty_bytes": MetricMapping("memory.dirty_bytes"),
            "memory_Writeback_bytes": MetricMapping("memory.writeback_bytes"),
            "memory_SwapFree_bytes": MetricMapping("memory.swap_free_bytes"),
            "vmstat_pgmajfault": MetricMapping("memory.major_faults_total"),
            "vmstat_pgfault": MetricMapping("memory.faults_total"),
            "vmstat_pswpin": MetricMapping("memory.swap_in_bytes_total", _PAGE),
            "vmstat_pswpout": MetricMapping("memory.swap_out_bytes_total", _PAGE),
            "vmstat_oom_kill": MetricMapping("memory.oom_kills_total"),
            "netstat_Tcp_OutSegs": MetricMapping("tcp.segments_sent_total"),
            "netstat_Tcp_RetransSegs": MetricMapping("tcp.retransmits_total"),
            "netstat_TcpExt_TCPTimeouts": MetricMapping("tcp.timeouts_total"),
        },
        "cpu": {"schedstat_waiting_seconds_total": MetricMapping("cpu.run_delay_ns_total", _NS)},
        "device": {
            "disk_read_bytes_total": MetricMapping("disk.read_bytes_total"),
            "disk_reads_completed_total": MetricMapping("disk.reads_total"),
            "disk_read_time_seconds_total": MetricMapping("disk.read_ns_total", _NS),
            "disk_written_bytes_total": MetricMapping("disk.write_bytes_total"),
            "disk_writes_completed_total": MetricMapping("disk.writes_total"),
            "disk_write_time_seconds_total": MetricMapping("disk.write_ns_total", _NS),
            "disk_io_time_seconds_total": MetricMapping("disk.busy_ns_total", _NS),
            "disk_io_time_weighted_seconds_total": MetricMapping("disk.queue_ns_total", _NS),
            "network_receive_bytes_total": MetricMapping("network.receive_bytes_total"),
            "network_transmit_bytes_total": MetricMapping("network.transmit_bytes_total"),
            "network_receive_drop_total": MetricMapping("network.receive_drops_total"),
            "network_transmit_drop_total": MetricMapping("network.transmit_drops_total"),
            "network_speed_bytes": MetricMapping("network.link_bytes_per_second"),
            "network_carrier_changes_total": MetricMapping("network.carrier_changes_total"),
            **_build_sum_mappings(
                "network.errors_total",
                ("network_receive_errs_total", "network_transmit_errs_total"),
            ),
        },
        "device/port": {
            "infiniband_port_data_received_bytes_total": MetricMapping("rdma.receive_bytes_total"),
            "infiniband_port_data_transmitted_bytes_total": MetricMapping(
                "rdma.transmit_bytes_total"
            ),
            "infiniband_port_transmit_wait_total": MetricMapping("rdma.transmit_wait_total"),
            "infiniband_link_downed_total": MetricMapping("rdma.link_downed_total"),
            "infiniband_symbol_error_total": MetricMapping("rdma.symbol_errors_total"),
            "infiniband_port_errors_received_total": MetricMapping("rdma.receive_errors_total"),
            "infiniband_link_error_recovery_total": MetricMapping("rdma.link_recoveries_total"),
            "infiniband_rate_bytes_per_second": MetricMapping("rdma.link_bytes_per_second"),
            "infiniband_state_id": MetricMapping("rdma.state_count"),
            **_build_sum_mappings(
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
"""Metric name -> its mapping, and the labels that identify the device."""

NODE_CPU_METRIC = "node_cpu_seconds_total"
_USER, _SYSTEM = ("user", "nice"), ("system", "irq", "softirq")
CPU_MODES: dict[str, MetricMapping] = {
    **_build_sum_mappings("cpu.user_ns_total", _USER, _NS),
    **_build_sum_mappings("cpu.system_ns_total", _SYSTEM, _NS),
    "idle": MetricMapping("cpu.idle_ns_total", _NS),
    "iowait": MetricMapping("cpu.iowait_ns_total", _NS),
    "steal": MetricMapping("cpu.steal_ns_total", _NS),
}


HOST_LABELS = (
    "Hostname",
    "hostname",
    "nodename",
    "node",
    "kubernetes_node",
    "host",
    "instance",
    "target",
)
"""Labels that can name the host; the first that is present counts."""
_IGNORED_DISKS = ("dm-", "md", "loop", "ram", "zram", "nbd", "fd", "sr")  # of others, or virtual
_DISK_PREFIX, _NIC_PREFIX = "node_disk_", "node_network_"


_KNOWN_NAMES = frozenset(
    {
        *DCGM_FIELDS,
        *NODE_METRICS,
        *OMNISTAT_METRICS,
        *AMD_EXPORTER_METRICS,
        NODE_CPU_METRIC,
        XID_METRIC,
    }
)


def is_known(name: str) -> bool:
    """Return whether a metric name has a mapping."""
    return name in _KNOWN_NAMES


def find_host(labels: Mapping[str, str]) -> tuple[str, str]:
    """Find the host of a series, empty if unknown, and its scraped address without port."""
    address = _strip_port(labels.get("instance", ""))
    for label in HOST_LABELS:
        if labels.get(label):
            return _strip_port(labels[label]), address
    return "", address


def find_mapping(name: str, labels: Mapping[str, str]) -> tuple[MetricMapping, str] | None:
    """Find the mapping and device of a series; None if it has no signal."""
    gpu_mapping = (
        DCGM_FIELDS.get(name) or OMNISTAT_METRICS.get(name) or AMD_EXPORTER_METRICS.get(name)
    )
    if gpu_mapping is not None:
        if labels.get("location", "edge") not in ("edge", "hotspot", "junction", "0"):
            return None  # Omnistat's memory temperature
        return gpu_mapping, find_gpu(labels)
    if name == NODE_CPU_METRIC:
        cpu_mapping = CPU_MODES.get(labels.get("mode", ""))
        return (cpu_mapping, labels["cpu"]) if cpu_mapping and labels.get("cpu") else None
    if name not in NODE_METRICS:
        return None
    meaning, label = NODE_METRICS[name]
    if not label:
        return meaning, ""
    parts = [labels.get(label_name, "") for label_name in label.split("/")]
    device = "/".join(parts)
    is_ignored = name.startswith(_DISK_PREFIX) and device.startswith(_IGNORED_DISKS)
    is_ignored = is_ignored or (name.startswith(_NIC_PREFIX) and device == "lo")
    return (meaning, device) if all(parts) and not is_ignored else None


def find_gpu(labels: Mapping[str, str]) -> str:
    """Find the identity of a GPU: its UUID, else its number; with the instance id for MIG."""
    uuid = next((labels[label] for label in ("UUID", "uuid", "gpu_uuid") if labels.get(label)), "")
    index = next((labels[label] for label in ("gpu", "card", "gpu_id") if labels.get(label)), "")
    device = uuid or (f"gpu{index}" if index.isdecimal() else index)
    part = labels.get("GPU_I_ID", "")
    return f"{device} MIG {part}" if part else device


def _strip_port(address: str) -> str:
    head, colon, port = address.rpartition(":")
    return head if colon and port.isdecimal() else address


_MAX_XIDS = 4096
_VENDOR_PREFIXES = (("DCGM_", "nvidia"), ("rocm_", "amd"), ("gpu_", "amd"))


class LabeledSeries:
    """Collector of labeled series that yields a node for each host."""

    def __init__(self) -> None:
        self._timed = MetricReadings()
        self._untimed = MetricReadings()
        self._addresses: dict[str, set[str]] = {}
        self._at: dict[str, str] = {}
        self._remaining_readings = MAX_READINGS
        self._xids: Counter[tuple[str, str, int]] = Counter()

    def column(
        self, name: str, labels: Mapping[str, str], timed: bool, account: Account
    ) -> ReadingColumn | None:
        """Return the column for the readings of a series; None if the series has no signal."""
        mapping = find_mapping(name, labels)
        if mapping is None:
            if name != XID_METRIC:
                reason = "of an ignored device or kind" if is_known(name) else "of unknown names"
                account.skipped[f"series {reason}"] += 1
            return None
        meaning, device = mapping
        host, address = find_host(labels)
        readings = self._timed if timed else self._untimed
        column = readings.column(host, meaning, device)
        if column is None:
            account.skipped["series beyond the limit"] += 1
            return None
        if address and address != host:
            self._addresses.setdefault(address, set()).add(host)
        account.read["series"] += 1
        if meaning.signal.startswith("gpu."):
            vendor = next(
                (vendor for start, vendor in _VENDOR_PREFIXES if name.startswith(start)), ""
            )
            readings.device(
                host,
                device,
                vendor=vendor,
                name=labels.get("modelName", ""),
                uuid=labels.get("UUID", ""),
                pci_address=labels.get("pci_bus_id", ""),
            )
        return column

    def add(self, column: ReadingColumn, t_ns: int, value: float, account: Account) -> bool:
        """Add a reading; False if the limit is reached."""
        if self._remaining_readings <= 0:
            account.skipped["readings beyond the limit"] += 1
            return False
        self._remaining_readings -= 1
        column.add(t_ns, value)
        return True

    def error(self, labels: Mapping[str, str], value: float) -> None:
        """Record the last error (Xid) reported by a device's driver; 0 means none."""
        if 0 < value < 1 << 16 and len(self._xids) < _MAX_XIDS:
            host, _ = find_host(labels)
            self._xids[host, labels.get("gpu", "") or find_gpu(labels), int(value)] += 1

    def nodes(self, source: str, account: Account) -> Iterator[NodeTables]:
        """Yield a node for each host; an address is merged into the host that others map it to."""
        self._merge_addresses()
        timed = {name for name, host in self._timed.hosts.items() if host.columns}
        for name in timed & set(self._untimed.hosts):
            untimed_host = self._untimed.hosts.pop(name)
            count = sum(len(column.t_ns) for column in untimed_host.columns.values())
            account.skipped["readings without a time, where others have one"] += count
        self._untimed.has_wall_clock = False
        if self._untimed.hosts:
            account.notes.append("readings without a time are shown as those of one instant")
        for (host, gpu, number), _ in sorted(self._xids.items()):
            account.notes.append(
                f"{host or 'a node'}: GPU {gpu}: the driver's last error is Xid {number}"
            )
        yield from self._timed.nodes(source, account)
        yield from self._untimed.nodes(source, account)

    def _merge_addresses(self) -> None:
        """Merge the readings of an address into the one host that was named together with it."""
        for readings in (self._timed, self._untimed):
            for address, names in self._addresses.items():
                if len(names) != 1 or address not in readings.hosts:
                    continue
                unnamed = readings.hosts.pop(address)
                named = readings.hosts.setdefault(next(iter(names)), HostReadings())
                named.columns = {**unnamed.columns, **named.columns}
                named.devices = {**unnamed.devices, **named.devices}
