"""Faults in the script or on the network: the strength at which each costs its intended share.

A scenario names one of them in `real: {fault: …}`; names that are not here are faults of the
environment (`real/faults/`). The amount follows from the share: a step takes `step_ms` without the
fault, and `stall_ms` more make it longer by the share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clusterprof_lab.real.cable import Link

Words = list[str]
_LAUNCHES = 8
_PAGEABLE_MB_PER_MS, _PINNED_MB_PER_MS = 6.0, 25.0
_RECOMPILE_MS = 60.0  # of 30 operations, on one core of 2020
_EXPECTED_LARGEST = {2: 0.56, 3: 0.85, 4: 1.03}  # of so many normal draws, in standard deviations


@dataclass(frozen=True)
class FaultAim:
    """The intended cost of a fault, and its culprits."""

    share: float
    """Of the time in steps, from 0 to below 1."""
    step_ms: float
    """Of the clean job."""
    world: int
    culprits: Sequence[int]
    """Ranks that are hit; all of them for everybody."""
    random: np.random.Generator
    given: Mapping[str, Any] = field(default_factory=dict)
    """The scenario's `real:` section."""

    @property
    def stall_ms(self) -> float:
        """How much longer a step is to take."""
        return self.step_ms * self.share / (1.0 - self.share)

    @property
    def lateness_ms(self) -> float:
        """How much longer one rank computes: only the ranks that wait for it lose that time."""
        share = min(0.8, self.share * self.world / max(self.world - 1, 1))
        return self.step_ms * share / (1.0 - share)

    def get_culprit_option(self, name: str, value: float) -> Words:
        """Return an option of the culprits."""
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        if len(self.culprits) == self.world:
            return [f"--{name}={text}"]
        return [word for rank in self.culprits for word in ("--own", str(rank), f"{name}={text}")]


@dataclass(frozen=True)
class FaultOptions:
    """The options of the job and the limits of the network links."""

    script: Words = field(default_factory=list)
    links: Mapping[int, Link] = field(default_factory=dict)
    """By node."""
    one_way: Mapping[int, int] = field(default_factory=dict)
    """Bits per second towards a node, where its link has another rate that way."""
    flow_mbit: float = 0.0
    """What others send from the first node to the last meanwhile."""
    restarts: int = 0
    """How often failed ranks are restarted."""
    ends_badly: bool = False
    """The job hangs and has to be ended."""


def _make_script_fault(
    *parts: tuple[str, Callable[[FaultAim], float | int]],
) -> Callable[[FaultAim], FaultOptions]:
    def make(aim: FaultAim) -> FaultOptions:
        return FaultOptions(
            [word for name, amount in parts for word in aim.get_culprit_option(name, amount(aim))]
        )

    return make


def _make_stall(name: str) -> Callable[[FaultAim], FaultOptions]:
    return _make_script_fault((name, lambda aim: aim.stall_ms))


def _make_periodic_stall(
    name: str, *parts: tuple[str, Callable[[FaultAim], float | int]]
) -> Callable[[FaultAim], FaultOptions]:
    """Pause every few steps, each time correspondingly longer."""
    interval_steps = 4
    pause = (f"{name}-ms", lambda aim: aim.stall_ms * interval_steps)
    return _make_script_fault((f"{name}-every", lambda aim: interval_steps), pause, *parts)


def _make_throttle(aim: FaultAim) -> FaultOptions:
    compute_ms = float(aim.given.get("script", {}).get("compute-ms", 120.0))
    return FaultOptions(
        aim.get_culprit_option("clock-ratio", compute_ms / (compute_ms + aim.stall_ms))
    )


def _make_slow_compute(aim: FaultAim) -> FaultOptions:
    compute_ms = float(aim.given.get("script", {}).get("compute-ms", 120.0))
    return FaultOptions(aim.get_culprit_option("compute-ms", compute_ms + aim.lateness_ms))


def _make_skew(aim: FaultAim) -> FaultOptions:
    """The slowest rank's draw determines the length of each step."""
    spread = aim.share / (1.0 - aim.share) / _EXPECTED_LARGEST.get(aim.world, 1.0)
    return FaultOptions([f"--skew={spread:.4f}", f"--seed={int(aim.random.integers(1 << 30))}"])


def _make_tiny_kernels(aim: FaultAim) -> FaultOptions:
    """Kernels shorter than it takes to launch them."""
    count = 480
    compute_ms = float(aim.given.get("script", {}).get("compute-ms", 120.0))
    launch_us = 1000 * (compute_ms + aim.stall_ms) / count
    return FaultOptions([f"--kernels={count}", f"--launch-us={launch_us:.1f}"])


_TURN = 6


def _compute_turn_ms(aim: FaultAim) -> float:
    """A batch of a slow turn: what is ahead when the turn begins hides some of it."""
    given = aim.given.get("script", {})
    ahead = int(given.get("prefetch", 2)) + int(given.get("queued-steps", 2))
    return aim.step_ms * (_TURN + ahead) / _TURN + aim.stall_ms


def _make_two_culprits(aim: FaultAim) -> FaultOptions:
    """One rank reads for long, another decodes for long, in turns of a few steps."""
    reader, decoder = map(str, aim.culprits[:2])
    own = (
        (reader, f"turn-read-ms={_compute_turn_ms(aim):.2f}"),
        (decoder, f"turn-ms={_compute_turn_ms(aim)}"),
        (reader, "turns=2"),
        (decoder, "turns=2"),
        (decoder, "turn=1"),
    )
    words = [word for rank, value in own for word in ("--own", rank, value)]
    return FaultOptions([*words, f"--turn-every={_TURN}"])


def _make_wandering(aim: FaultAim) -> FaultOptions:
    words = [f"--turns={aim.world}", "--turn=-1", f"--turn-every={_TURN}"]
    return FaultOptions([*words, f"--turn-read-ms={_compute_turn_ms(aim):.2f}"])


def _make_heavy_stage(aim: FaultAim) -> FaultOptions:
    """The last stage computes longer for each micro-batch."""
    compute_ms = float(aim.given.get("script", {}).get("compute-ms", 120.0))
    return FaultOptions(
        ["--own", str(aim.world - 1), f"compute-ms={compute_ms + aim.lateness_ms:.2f}"]
    )


def _compute_model_mb(aim: FaultAim) -> float:
    return float(aim.given.get("script", {}).get("model-mb", 4.0))


def _make_rate_cap(aim: FaultAim) -> FaultOptions:
    rate = round(_compute_model_mb(aim) * (1 << 20) * 8 / (aim.stall_ms / 1000))
    return FaultOptions(links={1: Link(rate_bits_per_second=rate)})


def _make_latency(aim: FaultAim) -> FaultOptions:
    """A ring of two nodes crosses the link a few times per all-reduce: measured, not derived."""
    trips = float(aim.given.get("trips", 4.0))
    return FaultOptions(links={1: Link(delay_s=aim.stall_ms / 1000 / trips)})


def _make_loss(aim: FaultAim) -> FaultOptions:
    """What a lost frame costs depends on the kernel: measured, not derived."""
    ratio = 0.0025 * aim.share / (1.0 - aim.share)
    return FaultOptions(links={1: Link(delay_s=0.0005, loss_ratio=min(0.02, ratio))})


def _make_background(aim: FaultAim) -> FaultOptions:
    """The job gets about half of a link that others fill."""
    rate = round(_compute_model_mb(aim) * (1 << 20) * 8 * 2 / (aim.stall_ms / 1000))
    link = Link(rate_bits_per_second=rate)
    return FaultOptions(links={1: link}, flow_mbit=1.5 * rate / 1e6)


def _make_one_way(aim: FaultAim) -> FaultOptions:
    rate = round(_compute_model_mb(aim) * (1 << 20) * 8 / (aim.stall_ms / 1000))
    return FaultOptions(one_way={1: rate})


def _make_big_model(aim: FaultAim) -> FaultOptions:
    """A healthy link, and more to send than a step can hide."""
    rate = 800_000_000
    size = aim.stall_ms / 1000 * rate / 8 / (1 << 20)
    links = {node: Link(rate_bits_per_second=rate) for node in (0, 1)}
    return FaultOptions([f"--model-mb={size:.2f}"], links=links)


def _make_stop(name: str) -> Callable[[FaultAim], FaultOptions]:
    def make(aim: FaultAim) -> FaultOptions:
        steps = int(aim.given.get("script", {}).get("steps", 40))
        words = aim.get_culprit_option(name, int(aim.random.integers(steps // 3, steps // 2)))
        return FaultOptions(words, restarts=int(name == "fail-at"), ends_badly=name == "hang-at")

    return make


AIMS: Mapping[str, Callable[[FaultAim], FaultOptions]] = {
    "none": lambda aim: FaultOptions(),
    "heavy-transform": _make_script_fault(("decode-ms", lambda aim: aim.step_ms + aim.stall_ms)),
    "no-workers": _make_script_fault(
        ("workers", lambda aim: 0), ("decode-ms", lambda aim: aim.step_ms + aim.stall_ms)
    ),
    "prefetch-one": _make_script_fault(
        ("workers", lambda aim: 2),
        ("prefetch", lambda aim: 1),
        ("uneven-every", lambda aim: 5),
        ("uneven-ms", lambda aim: 4 * aim.step_ms + 5 * aim.stall_ms),
    ),
    # A sixth of a step is under way on the device when it begins.
    "gil-hog": _make_script_fault(("gil-ms", lambda aim: aim.stall_ms + aim.step_ms / 6)),
    "gc": _make_periodic_stall("gc"),
    "logging": _make_stall("log-ms"),
    "checkpoint": _make_periodic_stall("checkpoint"),
    "evaluation": _make_periodic_stall("eval"),
    "slow-start": lambda aim: FaultOptions([f"--start-ms={4000 + 8000 * aim.share:.0f}"]),
    "pageable-copies": _make_script_fault(
        ("copy-mb", lambda aim: aim.stall_ms * _PAGEABLE_MB_PER_MS)
    ),
    "oversized-copies": _make_script_fault(
        ("copy-mb", lambda aim: aim.stall_ms * _PINNED_MB_PER_MS), ("pinned", lambda aim: 1)
    ),
    "item-syncs": _make_script_fault(
        ("item-syncs", lambda aim: 1), ("host-ms", lambda aim: aim.stall_ms / _LAUNCHES)
    ),
    "tiny-kernels": _make_tiny_kernels,
    "allocator-churn": _make_stall("alloc-ms"),
    "recompiles": _make_script_fault(
        ("recompile-every", lambda aim: max(1, round(_RECOMPILE_MS / aim.stall_ms))),
        ("recompile-operations", lambda aim: max(30, round(30 * aim.stall_ms / _RECOMPILE_MS))),
    ),
    "slow-rank": _make_slow_compute,
    "uneven-shards": _make_slow_compute,
    "throttle": _make_throttle,
    "skew": _make_skew,
    "wandering-loader": _make_wandering,
    "two-culprits": _make_two_culprits,
    "heavy-last-stage": _make_heavy_stage,
    "jitter": lambda aim: FaultOptions(
        ["--jitter=0.1", f"--seed={int(aim.random.integers(1 << 30))}"]
    ),
    "rate-cap": _make_rate_cap,
    "latency": _make_latency,
    "loss": _make_loss,
    "background-flow": _make_background,
    "one-way": _make_one_way,
    "big-all-reduce": _make_big_model,
    "restart": _make_stop("fail-at"),
    "hang": _make_stop("hang-at"),
}
