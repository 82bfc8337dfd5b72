"""What the names of evidence mean: every number that a finding can show beside its claim.

A name is that of a recorded signal (`clusterprof.signals`), or of a quantity derived from
several, which is defined here.
"""

from __future__ import annotations

from clusterprof.signals import BY_NAME
from clusterprof.units import infer_unit

_OF_LOST = "Share of the lost time of the finding in which"
_OF_WAITS = "Share of the waits for data in which"
EVIDENCE_NAMES: dict[str, str] = {
    "allocator.frees_total": "Blocks that the allocator of device memory gave back to the driver.",
    "allocator.mallocs_total": "Blocks that the allocator of device memory took from the driver.",
    "allocator.retries_total": "Times that the allocator emptied its cache as memory was full.",
    "allocator.returned_ratio": "Share of the blocks from the driver that were given back to it.",
    "memory.refaulted_bytes_total": "Bytes read again that had been in the page cache before.",
    "process.write_chars_total": "Bytes that the processes of the rank wrote to files and pipes.",
    "awaited.in_timer_ratio": (
        f"{_OF_LOST} the training thread waited for a process that slept in a timer."
    ),
    "awaited.on_cpu_ratio": (
        "Share of the waits for another process or thread of the job in which that computed."
    ),
    "awaited.waiting_ratio": (
        f"{_OF_LOST} the training thread waited for another process or thread of the job."
    ),
    "checkpoint.mean_bytes": "Bytes written by a rank in one checkpoint, on average.",
    "checkpoint.mean_ns": "Length of one checkpoint on a rank, on average.",
    "comm_thread.runnable_ratio": (
        "Share of the transfers in which the communication threads were ready to run and "
        "had no CPU."
    ),
    "compile.again_ratio": "Share of the compilations whose code had been compiled before.",
    "compile.mean_ns": "Length of one compilation, on average.",
    "copy.bytes_per_second": "Rate of the copies between host and device.",
    "copy.to_device_ratio": f"{_OF_LOST} the copies went to the device.",
    "cpu.steal_ratio": "Share of the CPU time that the hypervisor gave to other machines.",
    "disk.busy_ratio": "Share of those waits in which the disk had requests to work on.",
    "disk.others_bytes_total": "Bytes that processes outside the job read and wrote.",
    "disk.others_ratio": "Part of the disk's traffic that belongs to processes outside the job.",
    "disk.queue_count": "Mean disk queue length during those waits.",
    "disk.read_bytes_per_second": "Rate at which the disk was read during those waits.",
    "disk.read_latency_ns": "Time of one read of the disk, on average.",
    "disk.read_size_bytes": "Size of one read of the disk, on average.",
    "cifs.read_latency_ns": "Time of one read of the CIFS mount, on average.",
    "eval.mean_ns": "Length of one evaluation on a rank, on average.",
    "gc.mean_ns": "Length of one run of Python's garbage collector, on average.",
    "h2d.blocking_ratio": "Share of the copies to the device that the host waited for.",
    "hang.longest_ns": (
        "Longest time that a rank had been in one operation, or that its device had been "
        "without work, when its recording ended."
    ),
    "hang.waiting_count": "Ranks that waited in an operation that did not end.",
    "host.allocating_ratio": f"{_OF_LOST} the host allocated device memory.",
    "host.asleep_ratio": (
        f"{_OF_LOST} the training thread slept, or waited for a lock or a connection."
    ),
    "host.between_launches_ratio": (
        f"{_OF_LOST} the host was in operators and functions that launched nothing."
    ),
    "host.elsewhere_ratio": f"{_OF_LOST} the host was in functions outside of training.",
    "host.freeing_ratio": f"{_OF_LOST} the host freed device memory.",
    "host.launching_ratio": (
        "Share of the gaps between kernels in which the host was launching, with pauses "
        "of at most a millisecond."
    ),
    "host.loading_ratio": (
        f"{_OF_LOST} the host loaded kernels, created contexts or captured graphs."
    ),
    "host.per_step_ns": (
        "Time that the host worked in a step in which it waited for the device, on average."
    ),
    "host.pinning_ratio": f"{_OF_LOST} the host pinned memory for copies.",
    "host.preparing_ratio": f"{_OF_LOST} the training thread was in functions that prepare data.",
    "host.synchronising_ratio": (
        f"{_OF_LOST} the host was still in the call that waits for the device."
    ),
    "input.reading_ratio": f"{_OF_LOST} the training thread itself read files.",
    "input.unseen_ratio": f"{_OF_WAITS} a trace does not show what the loader did.",
    "interpreter.kept_ratio": f"{_OF_LOST} another thread held Python's interpreter lock.",
    "job.cpus_allowed_count": "CPUs that the job may use.",
    "job.cpus_needed_count": "CPUs that the runnable threads of the job would have filled.",
    "kernel.cpu_ratio": "Part of one CPU that the busiest kind of kernel thread took.",
    "kernel.kswapd_ratio": f"{_OF_LOST} the kernel thread that frees memory, kswapd, ran.",
    "loader.own_work_ratio": (
        f"{_OF_WAITS} the training thread itself computed in the loader, not a worker."
    ),
    "loader.sample_read_bytes": "Bytes read from storage for one sample, on average.",
    "loader.workers_count": "Workers of the data loader of a rank.",
    "loading.reading_ratio": f"{_OF_WAITS} the loading thread read a file, according to a trace.",
    "lustre.read_rpc_ns": "Time of one read request to Lustre, on average.",
    "lustre.rpcs_at_limit_ratio": (
        "Share of the read requests that took the last free slot of their target."
    ),
    "memory.refaulted_ratio": "Share of the read bytes that had been in the page cache before.",
    "nccl.host_memory_channels_count": "NCCL channels that pass through host memory.",
    "nccl.socket_channels_count": "NCCL channels over sockets in place of RDMA.",
    "nccl.staged_channels_count": "NCCL channels without GPUDirect, staged in host memory.",
    "network.beyond_ratio": "Transfer time above expectation that no counter explains, over the"
    " time in steps.",
    "network.bytes_per_second": "Rate at which a rank sent while its operations were in transfer.",
    "network.expected_ratio": "Transfer time that the bytes need at the rate of the links, over"
    " the time in steps.",
    "network.moved_bytes": "Bytes that a rank sent in collective operations.",
    "network.operation_bytes": "Bytes that a rank sent in one operation, on average.",
    "network.operations_count": "Collective operations of a rank.",
    "network.operations_per_step_count": "Collective operations of a rank in one step.",
    "network.others_ratio": "Part of the interface's traffic that the job did not cause.",
    "network.path_ratio": "Achieved rate as a share of the link rate.",
    "network.rail_ratio": (
        "Traffic of the port as a part of that of a port of the same node in use."
    ),
    "nfs.backlog_count": "NFS requests that waited in the client, on average.",
    "nfs.read_latency_ns": "Time of one NFS read, on average, waiting in the client included.",
    "nfs.read_rtt_ns": "Time of one NFS read on network and server, on average.",
    "nfs.read_size_bytes": "Size of one NFS read, on average.",
    "nfs.slots_used_count": "NFS requests in flight, on average.",
    "other_thread.on_cpu_ratio": f"{_OF_LOST} another thread of the process computed.",
    "page_cache.missed_ratio": (
        "Share of the bytes that the loaders requested which were not in the page cache."
    ),
    "pressure.cpu_some_ratio": "Share of the time in which a task of the node waited for a CPU.",
    "rdma.others_ratio": "Part of the port's traffic that the job did not cause.",
    "rdma.rail_ratio": "Traffic of the port as a part of that of a port of the same node in use.",
    "rdma.transmit_wait_ratio": (
        "Share of the ticks with data to send in which the port had to wait."
    ),
    "restart.longest_ns": "Longest time from the end of a failed rank to its next first step.",
    "startup.longest_ns": "Longest time from the first record of a process to its first step.",
    "startup.share_ratio": (
        "Share of the lost time of the first step that was work which happens once."
    ),
    "step.own_lost_ns": "Lost time of a step of this rank that its own causes explain.",
    "step.all_to_all_bytes": "Bytes that this rank brings to all-to-all operations in a step, of"
    " those whose sizes differ between ranks. In a mixture of experts it brings what its experts"
    " computed.",
    "step.samples_excess_ratio": "Samples in a step of this rank beyond those of waiting ranks.",
    "step.tokens_excess_ratio": "Tokens in a step of this rank beyond those of waiting ranks.",
    "step.worked_ns": "Time of a step of this rank without its waits for others.",
    "sync.waits_per_step_count": "Times that the host waited for the device in one step.",
    "sync.waited_per_step_ns": "Time that the host waited for the device in one step.",
    "tcp.loss_limit_bytes_per_second": (
        "Highest rate of one TCP connection at the measured loss and round trip."
    ),
    "tcp.receiver_limited_ratio": "Share of the sending time in which the receiver's window was"
    " full.",
    "tcp.retransmit_ratio": "Share of the TCP segments that were sent again.",
    "thread.held_back_ratio": f"{_OF_LOST} the CPU limit of the container held the thread back.",
    "thread.in_timer_ratio": f"{_OF_LOST} the training thread slept in a timer.",
    "thread.on_connection_ratio": (
        f"{_OF_LOST} the training thread waited for a connection or a pipe."
    ),
    "thread.on_cpu_ratio": f"{_OF_LOST} the training thread computed.",
    "thread.on_lock_ratio": f"{_OF_LOST} the training thread waited for a lock.",
    "thread.polling_ratio": "Share of its sleep in loops that only wait for what others do.",
    "thread.runnable_ratio": f"{_OF_LOST} the thread was ready to run but had no CPU.",
    "thread.writing_ratio": f"{_OF_LOST} the training thread was blocked in writing or sending.",
    "worker.balance_ratio": (
        "CPU time that the workers of a loader spent on batches, the mean of all as a part of the "
        "busiest one's."
    ),
    "worker.blocked_ratio": f"{_OF_WAITS} the loading thread read or was blocked on the disk.",
    "worker.collecting_ratio": f"{_OF_WAITS} the worker of the loader collected garbage.",
    "worker.in_timer_ratio": f"{_OF_LOST} the thread that loads the data slept in a timer.",
    "worker.memory_ratio": f"{_OF_WAITS} the loading thread was blocked on memory.",
    "worker.not_ahead_ratio": (
        f"{_OF_WAITS} the batch would have been ready, had idle workers worked further ahead."
    ),
    "worker.on_cpu_ratio": (
        f"{_OF_WAITS} the loading thread computed. High values mean that preparing the "
        "batches takes the time, not reading them."
    ),
    "worker.remote_ratio": f"{_OF_WAITS} the loading thread was blocked on a network file system.",
    "worker.socket_ratio": f"{_OF_WAITS} the loading thread slept in a receive.",
    "worker.starting_ratio": f"{_OF_WAITS} the worker did not exist yet, or was starting.",
    "worker.without_work_ratio": f"{_OF_WAITS} no worker worked on the awaited batch.",
    "yardstick.communication_efficiency_ratio": (
        "Largest computing time of a rank over the time of the steps (POP)."
    ),
    "yardstick.goodput_ratio": "Time of useful steps over the whole time of the job.",
    "yardstick.load_balance_ratio": "Mean work of the ranks over that of the busiest (POP).",
    "yardstick.parallel_efficiency_ratio": "Load balance times communication efficiency (POP).",
    "yardstick.lost_cost": "Price of the lost device time.",
    "yardstick.million_tokens_cost": "Price of a million tokens.",
    "yardstick.slowdown_factor": "Time of the job over its time without stragglers.",
    "yardstick.samples_per_second": "Samples that the job processed in a second.",
    "yardstick.tokens_per_second": "Tokens that the job processed in a second.",
}
"""Name of a derived quantity -> its definition."""


def list_evidence_names() -> list[str]:
    """List all names that a finding can show as evidence."""
    return list(dict.fromkeys([*EVIDENCE_NAMES, *BY_NAME]))


def build_evidence_page(name: str) -> str | None:
    """Build the page of a name of evidence as Markdown; None if there is no such name."""
    signal = BY_NAME.get(name)
    about = EVIDENCE_NAMES.get(name) or (signal.doc if signal else "")
    if not about:
        return None
    about = about[:1].upper() + about[1:]
    origin = "a recorded signal" if signal else "a number derived from the recording"
    where = "A finding shows it as evidence. `clusterprof explain CAUSE` says how it is weighed."
    return f"# {name}: {origin}, in {infer_unit(name)}\n\n{about.rstrip('.')}.\n\n{where}\n"
