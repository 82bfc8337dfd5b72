"""How to verify a cause by hand on a running job, without this tool."""

from __future__ import annotations

BY_HAND: dict[str, str] = {
    "storage-local": (
        "`iostat -x 1` on the node while it trains: `%util`, `r_await` and `rareq-sz` of the "
        "disk; `cat /proc/PID/stack` (root) of a worker, or `ps -o stat,wchan PID`: state D in "
        "`folio_wait` or `io_schedule`. Then run a few steps on data that is in memory (`vmtouch "
        "-t`): the waits must go."
    ),
    "storage-contention": (
        "`sudo iotop -oPa` or `pidstat -d 1`: who reads and writes besides the job, and `iostat "
        "-x 1`: how busy the disk is. Stop the other one: the waits must go."
    ),
    "storage-remote": (
        "`nfsiostat 1 MOUNT` (NFS: `avg RTT`), `lctl get_param osc.*.rpc_stats` (Lustre), "
        "`/proc/fs/cifs/Stats`; `ps -o stat,wchan PID` of a worker: `rpc_wait`, `cl_sync_io`. "
        "Read one file with `dd iflag=direct`: that is what the server gives to one reader."
    ),
    "storage-client-queue": (
        "`nfsiostat 1 MOUNT`: `avg exe` far above `avg RTT`; `mountstats --rpc MOUNT`: backlog. "
        "Lustre: `lctl get_param osc.*.rpc_stats`, the last rows of `rpcs in flight`. CIFS: "
        "`/proc/fs/cifs/DebugData`, requests waiting for credits."
    ),
    "storage-metadata": (
        "`nfsstat -c` or `mountstats --rpc MOUNT` twice: LOOKUP, GETATTR, ACCESS and OPEN against "
        "READ; `strace -f -c -p WORKER`: openat, stat and close against read."
    ),
    "storage-object": (
        "`ss -tni` on the node: connections to the store, their `rtt` and how much came; `ps -o "
        "stat,wchan PID` of a worker: `sk_wait_data`. Time one object with `curl -w "
        "'%{time_total} %{speed_download}'`."
    ),
    "storage-cold-cache": (
        "`grep workingset_refault /proc/vmstat` twice: it rises; `free -h`: how much is "
        "`buff/cache`; `cat memory.current memory.max` of the job's cgroup. Compare the data "
        "set's size with what is left."
    ),
    "input-wait": (
        "`py-spy dump --pid PID` of the training process while it waits: `_try_get_data` or "
        "`__next__` of the loader; `top -H -p WORKER`: near 100 % CPU is work, state D in `ps -o "
        "stat,wchan PID` is a disk or a server. Train some steps on one batch held in memory: the "
        "waits must go."
    ),
    "cpu-preprocess": (
        "`top -H -p WORKER`: its main thread near 100 % while the GPU waits; `py-spy record -d 30 "
        "--pid WORKER` names the functions. Iterate the DataLoader alone, without a model: "
        "batches per second must be those of training."
    ),
    "cpu-contention": (
        "`cat /proc/TID/schedstat` of the loading thread twice: the second number, nanoseconds "
        "ready without a CPU, rises; `vmstat 1`: `r` above the number of CPUs; `taskset -cp PID`: "
        "which CPUs it may use."
    ),
    "cpu-throttled": (
        "`cat cpu.stat` of the job's cgroup twice: `nr_throttled` and `throttled_usec` rise; `cat "
        "cpu.max`: quota and period."
    ),
    "cpu-loader-config": (
        "`py-spy dump --pid WORKER`: workers rest in `index_queue.get`. Print "
        "`loader.num_workers`, `loader.prefetch_factor`, `loader.persistent_workers`; set twice "
        "as much for some steps."
    ),
    "cpu-memory": (
        "`cat /proc/pressure/memory`; `vmstat 1`: `si` and `so`; `cat memory.current memory.max "
        "memory.events` of the job's cgroup."
    ),
    "cpu-gc": (
        "`gc.callbacks` or `gc.set_debug(gc.DEBUG_STATS)` in the training process: how long "
        "collections take and when. With `gc.disable()` for some steps the pauses must go."
    ),
    "cpu-gil": (
        "`py-spy dump --pid PID` some times: another thread holds the GIL (`py-spy top` shows it) "
        "while the main thread waits. `top -H -p PID`: that thread is on a CPU."
    ),
    "h2d-copy": (
        "`nsys profile` of some steps: `cudaMemcpyAsync` of pageable memory, or copies with no "
        "kernel beside them. `loader.pin_memory`, and `non_blocking=True` in `.to()`."
    ),
    "h2d-sync": (
        "`nsys profile`: `cudaStreamSynchronize` in the step, and kernels only after it; "
        "`torch.cuda.set_sync_debug_mode(1)` warns at each such call."
    ),
    "launch-bound": (
        "`nsys profile` or torch.profiler: gaps between kernels, and a launching thread without "
        "pause; `top -H -p PID`: the main thread near 100 %. Twice the batch must take less than "
        "twice the time."
    ),
    "launch-alloc": (
        "`torch.cuda.memory_stats()`: `num_alloc_retries` and `num_device_alloc` rise in steps; "
        "`torch.cuda.memory_summary()`: how much is reserved and not allocated."
    ),
    "launch-recompile": (
        "`TORCH_LOGS=recompiles` on the job: every line is one, with its reason. JAX: "
        "`jax.config.update('jax_log_compiles', True)`."
    ),
    "checkpoint": (
        "time `torch.save` (or your own save) around its call; `nvidia-smi dmon -s u`: no use of "
        "the GPU meanwhile."
    ),
    "eval-host": (
        "`py-spy dump --pid PID` in a pause: what the main thread is in; `strace -p PID -e "
        "trace=write,fsync,sendto -T`: how long its writes take."
    ),
    "startup": (
        "`python -X importtime TRAIN.py` up to the first step; timestamps of the first lines of "
        "the log; `TORCH_LOGS=+dynamo` for compilation."
    ),
    "device-throttled": (
        "`nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,POWER` on the node, under load: the "
        "reason that is active, and clocks against those of another GPU."
    ),
    "net-transfer": (
        "`all_reduce_perf -b 1M -e 1G -f 2` of nccl-tests on the same nodes: `busbw` against the "
        "rate of the links; `nsys profile`: how much of communication lies beside computation."
    ),
    "net-link": (
        "`ethtool -S DEVICE`, `ip -s link` (InfiniBand: `perfquery -x`, `ibqueryerrors`) twice on "
        "both ends: errors that rise; `iperf3` or `ib_write_bw` between the two nodes and between "
        "others."
    ),
    "net-congestion": (
        "`ethtool -S DEVICE | grep -E 'pause|ecn|cnp'` twice; `ss -tni`: `rtt` against `minrtt`. "
        "Run `ib_write_bw` or `iperf3` when the job is not there: then it is fast."
    ),
    "net-path": (
        "`NCCL_DEBUG=INFO`: the lines `NET/…` name what it uses; `ip -s link`, `perfquery`: which "
        "device carries the bytes. Name the other by `NCCL_SOCKET_IFNAME` or `NCCL_IB_HCA` for "
        "one run."
    ),
    "sync-imbalance": (
        "count tokens or samples per step on each rank and lay them beside the time of forward "
        "and backward: the rank that is waited for has more."
    ),
    "sync-slow-compute": (
        "run the same fixed batch on each rank (`dcgmi diag -r 2`, a matrix product of fixed "
        "size): the late one is slower with equal work. Swap two nodes."
    ),
    "sync-bubble": (
        "(stages - 1) / (micro-batches + stages - 1) of a step is what the schedule costs by "
        "itself; torch.profiler of the first and the last stage shows where they wait."
    ),
    "sync-unknown-peer": (
        "`ls RUN`: a folder for each node? `clusterprof doctor` on the node that is missing."
    ),
    "fail-hang": (
        "`py-spy dump --pid PID` on every rank: all but one are in the same operation; "
        "`TORCH_NCCL_TRACE_BUFFER_SIZE=2000` writes what each was in."
    ),
    "fail-restart": (
        "the launcher's log: exit codes and the first traceback; `dmesg -T` of that node: Xid, "
        "out of memory; `sacct -j JOB --format=State,ExitCode,NodeList`."
    ),
}
"""Cause id -> what to run, and what must be seen."""
