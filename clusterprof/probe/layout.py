"""The ring and its span kinds: constants that the probe and the recorder share.

Standard library only, Python 3.8 syntax: this file runs inside somebody's training process.
docs/design.md, section 4, is the description.
"""

import struct

MAGIC = b"CPRING1\n"
# magic, record bytes, capacity, pid, names capacity, started ticks, written, switched off
HEADER = struct.Struct("<8sIIIIQQQ")
WRITTEN_OFFSET = 32
SWITCHED_OFF_OFFSET = 40
NAMES_OFFSET = 64
NAME_BYTES = 48
NAMES_CAPACITY = 64
RECORDS_OFFSET = 4096
RECORD = struct.Struct("<Qqqqqqqq")  # sequence, start_ns, end_ns, kind, a, b, c, d
RECORD_BYTES = RECORD.size
COUNTER = struct.Struct("<Q")

FIRST_CAPACITY = 2048  # records in the ring of a first process: 10 s at 200 spans per second
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
FIRST_USER_KIND = 64

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
}

# Field d of a collective span (docs/design.md, section 12): the operation, its form, the peer.
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

PEER_SHIFT = 16
PEER_MASK = 0xFFFFFFFF

# Launcher variables that a registration keeps (docs/design.md, section 3).
VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "PALS_RANKID",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_RANK",
    "FLUX_TASK_LOCAL_ID",
    "FLUX_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "JOB_COMPLETION_INDEX",
    "CUDA_VISIBLE_DEVICES",
    "CLUSTERPROF_EMULATED",
)
NODE_LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)
