"""What to do where copies to the accelerator, or waits for it, hold the step up."""

from __future__ import annotations

from clusterprof.remedies.base import Filled, Mend, Rule
from clusterprof.remedies.commands import run
from clusterprof.remedies.rules import without
from clusterprof.remedies.scene import Scene

_PINNED = "1.02-1.15x (Gao et al., ICSE 2024)"


def _pin(scene: Scene) -> Filled:
    loader = scene.setup.loader
    said = ("pin_memory is off",) if loader is not None and loader.pinned is False else ()
    pinned, copied = run("DataLoader(pin_memory=True)"), run('batch.to("cuda", non_blocking=True)')
    return Filled(f"{pinned} and {copied}", said)


def _stream(scene: Scene) -> Filled:
    return Filled(
        run("with torch.cuda.stream(copies): next_batch = batch.to(device, non_blocking=True)")
        + f"; then {run('torch.cuda.current_stream().wait_stream(copies)')} before it is used"
    )


def _metrics(scene: Scene) -> Filled:
    often = scene.number("per_step_count")
    each = f" ({often.value:.1f} in a step now)" if often is not None else ""
    return Filled(
        f"{run('total += loss.detach()')} and {run('if step % 100 == 0: print(total.item())')}: no"
        f" .item(), .cpu(), print(tensor) or torch.cuda.synchronize() in every step{each}"
    )


def _later(scene: Scene) -> Filled:
    return Filled(
        run('value = loss.detach().to("cpu", non_blocking=True)')
        + " into pinned memory, read one step later; torch.where in the place of if tensor:"
    )


REMEDIES = (
    Mend(
        "pin-memory", ("h2d-copy",), "Copy from pinned memory without blocking the host",
        'pin_memory=True in the loader, .to("cuda", non_blocking=True)', _pin,
        seen=("blocking_ratio", "pcie_receive_bytes_per_second"), published=_PINNED,
        moves="h2d.blocking_ratio falls to 0",
        worse="pinned memory cannot be swapped: batches held ahead are the node's for good",
        unless=(
            without("blocking_ratio", "no copy blocked the host"),
            Rule("memory-short", "the node is short of memory, which pinned pages make worse",
                 lambda s: s.machine.memory_short or "cpu-memory" in s.beside),
        ),
        effort="setting",
    ),
    Mend(
        "copy-ahead", ("h2d-copy",), "Copy the next batch while the present one computes",
        "a stream of its own for copies", _stream,
        seen=("blocking_ratio", "pcie_receive_bytes_per_second"), published=_PINNED,
        moves="copies no longer lie in lost time",
        worse="memory of the accelerator for one more batch",
        unless=(
            Rule("gpu-memory-full", "less than a fifth of the accelerator's memory was free",
                 lambda s: (f := s.setup.gpu_memory_free_ratio) is not None and f < 0.2),
        ),
        effort="code",
    ),
    Mend(
        "fetch-metrics-rarely", ("h2d-sync",), "Keep metrics on the accelerator, fetch them rarely",
        "no .item(), .cpu() or synchronize() in every step", _metrics,
        seen=("per_step_count", "sync.per_step_ns", "host.per_step_ns"),
        published="cases only (Gao et al., ICSE 2024)",
        moves="sync.per_step_count falls below 0.1", worse="metrics are seen later",
        unless=(
            Rule("few-waits", "the host waited less than once in ten steps",
                 lambda s: (v := s.value("sync.per_step_count")) is not None and v < 0.1),
        ),
        effort="code",
    ),
    Mend(
        "look-a-step-later", ("h2d-sync",), "Look at results a step later",
        "non-blocking copies into pinned memory; torch.where in the place of if tensor:", _later,
        seen=("per_step_count", "sync.per_step_ns"), moves="sync.per_step_ns falls",
        worse="a NaN is noticed a step later",
        effort="code",
    ),
)  # fmt: skip
