"""Options of the training script; a fault is an option, of all ranks or of one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

_NUMBERS = {
    # of the job
    "steps": (40, "steps to train"),
    "compute-ms": (120.0, "device time of a step"),
    "model-mb": (1.0, "size of the gradients"),
    "workers": (1, "of the loader"),
    "prefetch": (2, "batches ahead per worker"),
    "queued-steps": (2, "how far the host may run ahead"),
    "micro-batches": (0, "of a pipeline over all ranks; 0 = data parallel"),
    "seed": (0, "of what the script draws"),
    # of loading
    "reads": (0, "per item"),
    "read-bytes": (65536, "per read"),
    "decode-ms": (4.0, "of a CPU, per batch"),
    "uneven-every": (0, "every so many batches one that takes uneven-ms"),
    "uneven-ms": (0.0, "decoding of an uneven batch"),
    "turns": (0, "takers of turns to load slowly"),
    "turn": (0, "which of them this rank is; -1 = each rank its own number"),
    "turn-every": (5, "steps of a turn"),
    "turn-read-ms": (0.0, "reading per batch, when it is this rank's turn"),
    "turn-ms": (0.0, "decoding per batch, when it is this rank's turn"),
    "hold-mb": (0, "kept in a worker's memory"),
    "touch-mb": (0, "of that, per batch, in turn"),
    # faults of the loop; amounts are per step unless said
    "host-ms": (0.0, "CPU of the host beside each of eight launches"),
    "item-syncs": (0, "1 = .item() after each launch"),
    "kernels": (8, "launches"),
    "launch-us": (0.0, "CPU per launch"),
    "copy-mb": (0.0, "copied to the device"),
    "pinned": (0, "1 = from pinned memory"),
    "alloc-ms": (0.0, "freeing and allocating device memory"),
    "recompile-every": (0, "steps between new shapes"),
    "recompile-operations": (30, "in the function that is compiled"),
    "gc-ms": (0.0, "of a full collection"),
    "gc-every": (0, "steps"),
    "gil-ms": (0.0, "for which another thread keeps the interpreter"),
    "log-ms": (0.0, "writing and syncing a log"),
    "log-bytes": (4096, "of a line in the file that --log names"),
    "checkpoint-ms": (0.0, "writing a checkpoint"),
    "checkpoint-mb": (0, "size of a checkpoint, written once however long it takes"),
    "checkpoint-every": (0, "steps"),
    "eval-ms": (0.0, "metrics on the CPU"),
    "eval-every": (0, "steps"),
    "start-ms": (0.0, "before the first step"),
    "clock-ratio": (1.0, "of the device's full clock"),
    "throttle-bits": (0x40, "reason, as in NVML"),
    "jitter": (0.0, "relative spread of the compute time"),
    "skew": (0.0, "spread of the log of the compute time, drawn per rank and step"),
    "fail-at": (-1, "step at which the rank exits, in its first life"),
    "hang-at": (-1, "step at which the rank stops for ever"),
    # of turns
    "in-turns": (0, "steps of a turn with the fault or without; 0 = it is always there"),
    "warm-up": (0, "steps before the first turn"),
    "switched": (0, "1 = somebody outside switches the fault"),
}


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    return parse_words(sys.argv[1:])


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Read the words of a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, (usual, what) in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(usual), default=usual, help=what)
    parser.add_argument("--folder", required=True, help="for stopwatches and what is written")
    parser.add_argument("--write-to", default="", help="for logs and checkpoints; else the folder")
    parser.add_argument("--data", default="", help="file, folder of files, or URL")
    parser.add_argument("--collectives", choices=["host", "device"], default="device")
    parser.add_argument("--buffered", action="store_true", help="read through the page cache")
    parser.add_argument("--log", default="", help="written and synced per step, the rank added")
    parser.add_argument("--checkpoint", default="", help="file of the checkpoint, the rank added")
    parser.add_argument("--chain", action="store_true", help="each rank sends the next its batch")
    parser.add_argument("--own", nargs=2, action="append", default=[], help="RANK NAME=VALUE")
    options = parser.parse_args(words)
    options.features = round((options.model_mb * (1 << 20) / 4 / 4) ** 0.5)
    return options


def apply_rank_options(options: argparse.Namespace, rank: int) -> argparse.Namespace:
    """Replace the options of all ranks by those of this rank where it has its own."""
    for owner, word in options.own:
        if int(owner) == rank:
            name, _, value = word.partition("=")
            name = name.replace("-", "_")
            setattr(options, name, type(getattr(options, name))(value))
    return options
