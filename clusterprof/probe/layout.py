"""Layout of the ring and the span kinds: constants shared by the probe and the recorder.

Standard library only, Python 3.8 syntax: this file runs inside the user's training
process. Specified in docs/design/recording-format.md.
"""

import struct

MAGIC = b"CPRING1\n"
# magic, record bytes, capacity, pid, names capacity, started ticks, written, switched off
HEADER = struct.Struct("<8sIIIIQQQ")
WRITTEN_OFFSET = 32
SWITCHED_OFF_OFFSET = 40
LOG_BYTES_OFFSET = 48  # size of the log of definitions behind the records; 0 = there is none
LOG_WRITTEN_OFFSET = 56  # bytes of it that are complete
NAMES_OFFSET = 64
NAME_BYTES = 48
NAMES_CAPACITY = 64
UNDER_WAY_OFFSET = 3136  # after the names
UNDER_WAY = struct.Struct("<qqqqq")  # start_ns, a, b, c, d of the collective operation begun last
RECORDS_OFFSET = 4096
RECORD = struct.Struct("<Qqqqqqqq")  # sequence, start_ns, end_ns, kind, a, b, c, d
RECORD_BYTES = RECORD.size
COUNTER = struct.Struct("<Q")

# Entries of the log: each is a tag and its numbers, then for texts their bytes. Files, functions
# and places count from 0, stacks from 1.
FILE_TAG, FUNCTION_TAG, PLACE_TAG, STACK_TAG = b"F", b"N", b"P", b"S"
FILE_ENTRY = struct.Struct("<cH")  # bytes of the path
FUNCTION_ENTRY = struct.Struct("<cHIH")  # file, first line, bytes of the name
PLACE_ENTRY = struct.Struct("<cHI")  # function, line
STACK_ENTRY = struct.Struct("<cHH")  # stack of the caller (0 = none), place
FIRST_LOG_BYTES = 65536
FORKED_LOG_BYTES = 32768
MAX_NAME_CHARACTERS = 200  # of a function; longer names are cut
MAX_PATH_CHARACTERS = 512  # of a file; of longer paths the end is kept
MAX_FRAMES = 64  # of a stack; the innermost are kept

FIRST_CAPACITY = 2048  # records in the ring of an unforked process: 10 s at 200 spans/s
FORKED_CAPACITY = 512  # in a forked child, such as a dataloader worker

DATA_WAIT = 1
FETCH = 2
STEP = 3
H2D = 4
CHECKPOINT = 5
GC = 6
OPTIMIZER = 7
EXPOSED = 8
FORWARD = 9
BACKWARD = 10
COLLECTIVE = 11
EVAL = 12
COMPILE = 13
LOADER_START = 14
HOOK_NOTE = 15
WORKER_START = 16
EXPOSED_COLLECTIVE = 17
SYNC = 18
ALLOCATOR = 19
INTERPRETER_WAIT = 24
STACK_SAMPLE = 25
STACK_SAMPLER = 26
STEP_COUNTER = 27
DEBUG_MODES = 28
# Only in imported traces (docs/design/importers.md); the probe never writes these.
STARVED = 20
LOADING = 21
HOST_WORK = 22  # what the host did instead of launching; the probe writes it for some hooks
EXPOSED_COPY = 23  # a copy between host and device that no other work hid; traces only
FIRST_USER_KIND = 64

WHOLE_NS = (1 << 63) - 1  # waited_ns of a `sync` that waited from its start to its end

KIND_NAMES = {
    DATA_WAIT: "data_wait",
    FETCH: "fetch",
    STEP: "step",
    H2D: "h2d",
    CHECKPOINT: "checkpoint",
    GC: "gc",
    OPTIMIZER: "optimizer",
    EXPOSED: "exposed",
    FORWARD: "forward",
    BACKWARD: "backward",
    COLLECTIVE: "collective",
    EVAL: "eval",
    COMPILE: "compile",
    LOADER_START: "loader_start",
    HOOK_NOTE: "hook_note",
    WORKER_START: "worker_start",
    EXPOSED_COLLECTIVE: "exposed_collective",
    SYNC: "sync",
    ALLOCATOR: "allocator",
    STARVED: "starved",
    LOADING: "loading",
    INTERPRETER_WAIT: "interpreter_wait",
    STACK_SAMPLE: "stack_sample",
    STACK_SAMPLER: "stack_sampler",
    STEP_COUNTER: "step_counter",
    DEBUG_MODES: "debug_modes",
    HOST_WORK: "host_work",
    EXPOSED_COPY: "exposed_copy",
}

# Kind -> what its fields a, b, c and d hold; the remaining fields are unused. Kinds that are not
# listed use none (docs/design/recording-format.md).
ARGUMENTS = {
    DATA_WAIT: ("batch", "worker_pid", "workers", "first"),
    FETCH: ("items", "user_cpu_ns", "system_cpu_ns", "read_bytes"),
    STEP: ("step", "marked_by", "samples", "tokens"),
    H2D: ("bytes", "non_blocking"),
    CHECKPOINT: ("bytes",),
    GC: ("generation", "collected"),
    EXPOSED: ("measured_sequence", "device_ns"),
    COLLECTIVE: ("group", "number", "bytes", "code"),
    COMPILE: ("compiled_before",),
    LOADER_START: ("workers", "pin_memory", "prefetch_factor", "persistent_workers"),
    HOOK_NOTE: ("hook", "hooked"),
    WORKER_START: ("worker", "workers", "parent_pid"),
    EXPOSED_COLLECTIVE: ("measured_sequence", "device_ns"),
    SYNC: ("waited_ns", "times"),
    ALLOCATOR: ("retries", "mallocs", "frees", "out_of_memory"),
    INTERPRETER_WAIT: ("pause_ns",),
    STACK_SAMPLE: ("stack", "interval_ns", "thread", "state"),
    STACK_SAMPLER: ("samples", "own_cpu_ns", "unreadable", "overflowed"),
    STEP_COUNTER: ("job_step", "step"),
    DEBUG_MODES: ("modes",),
    STARVED: ("launching_ns", "synced_ns", "memory_ns", "copying_ns"),
    LOADING: ("reading_ns", "computing_ns", "read_bytes", "storage"),
    HOST_WORK: ("activity", "function"),
    EXPOSED_COPY: ("bytes", "to_device_ns"),
}

# Activities of a `host_work` span.
WARMING_UP = 1
FREEING_MEMORY = 2
PREPARING_DATA = 3
READING_DATA = 4
SLEEPING = 5
WAITING_FOR_LOCK = 6
OTHER_WORK = 7
RUNNING_MODEL = 8  # operators, and Python of the model, that launched nothing
PINNING_MEMORY = 9
ALLOCATING_MEMORY = 10
COMPUTING_ON_HOST = 11  # operators and functions that launched nothing, for long

# Bits of the modes of a `debug_modes` span.
TORCH_PROFILER = 1
ANOMALY_DETECTION = 2
LINE_TRACING = 4
PYTHON_PROFILER = 8
BLOCKING_LAUNCHES = 16
COLLECTIVE_CHECKS = 32

# Where the files of a `loading` span are stored; 0 = unknown.
STORAGE_LOCAL = 1
STORAGE_NETWORK = 2
STORAGE_OBJECT = 3

# Parts of the code of a `collective` (docs/design/waits-between-ranks.md): operation, form, peer.
ALL_REDUCE = 1
ALL_GATHER = 2
REDUCE_SCATTER = 3
BROADCAST = 4
REDUCE = 5
GATHER = 6
SCATTER = 7
ALL_TO_ALL = 8
BARRIER = 9
SEND = 10
RECV = 11
GRADIENTS = 12
OTHER_OPERATION = 15
OPERATION_MASK = 0xFF

BLOCKING = 0
ISSUE = 1
WAIT = 2
FORM_SHIFT = 8
FORM_MASK = 0xF

# Set in the code of a blocking operation that another thread than the main one called: whether
# the main thread waited for it shows in its samples.
OTHER_THREAD = 1 << 13

PEER_SHIFT = 16
PEER_MASK = 0xFFFFFFFF

# Launcher variables kept in a registration (docs/design/recording-format.md). No tokens, no paths.
VARIABLES = (
    # torchrun, accelerate, DeepSpeed, Kubeflow (PET_* are torchrun's options)
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
    "CROSS_RANK",
    "CROSS_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "PET_RDZV_ID",
    "PET_NODE_RANK",
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    # Slurm
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_ACCOUNT",
    "SLURM_JOB_USER",
    "SLURM_JOB_NUM_NODES",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_JOB_START_TIME",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURMD_NODENAME",
    "SLURM_TOPOLOGY_ADDR",
    "SLURM_TOPOLOGY_ADDR_PATTERN",
    # MPI: Open MPI, MVAPICH, MPICH and Intel (PMI), PMIx
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_LOCAL_RANK",
    "PMI_SIZE",
    "PMI_JOBID",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    # PBS with PALS, Flux, LSF with jsrun
    "PBS_JOBID",
    "PALS_APID",
    "PALS_RANKID",
    "PALS_LOCAL_RANKID",
    "PALS_NODEID",
    "FLUX_JOB_ID",
    "FLUX_JOB_SIZE",
    "FLUX_JOB_NNODES",
    "FLUX_TASK_RANK",
    "FLUX_TASK_LOCAL_ID",
    "LSB_JOBID",
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_LOCAL_RANK",
    "JSM_NAMESPACE_SIZE",
    # Kubernetes, Ray, JAX
    "JOB_COMPLETION_INDEX",
    "JOBSET_NAME",
    "JOBSET_RESTART_ATTEMPT",
    "K8S_NODE_NAME",
    "K8S_NAMESPACE",
    "K8S_POD_NAME",
    "K8S_JOB_NAME",
    "K8S_JOB_UID",
    "RAY_JOB_ID",
    "RAY_RAYLET_PID",
    "JAX_PROCESS_ID",
    "JAX_NUM_PROCESSES",
    "JAX_COORDINATOR_ADDRESS",
    # Devices
    "CUDA_VISIBLE_DEVICES",
    "CLUSTERPROF_EMULATED",
    # Set by the site: when the job was submitted
    "CLUSTERPROF_QUEUED_AT",
)
VALUE_CHARACTERS = 256  # of a variable; longer values are cut
NODE_LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
    "JSM_NAMESPACE_LOCAL_RANK",
    "SLURM_LOCALID",
)
