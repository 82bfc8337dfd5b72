"""The ring and its span kinds: constants that the probe and the recorder share.

Standard library only, Python 3.8 syntax: this file runs inside somebody's training process.
docs/design.md, section 4, is the description.
"""

import struct

MAGIC = b"CPRING1\n"
HEADER = struct.Struct("<8sIIIIQQQ")  # magic, record_bytes, capacity, pid, names, started, written, off
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
}
