"""Faults in the script or in the cable: how strong they must be to cost their share.

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
class Aim:
    """What a fault is to cost, and whom it is to hit."""

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
        """How much longer one rank is to compute: only those who wait for it lose that time."""
        share = min(0.8, self.share * self.world / max(self.world - 1, 1))
        return self.step_ms * share / (1.0 - share)

    def of(self, name: str, value: float) -> Words:
        """Return an option of the culprits."""
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        if len(self.culprits) == self.world:
            return [f"--{name}={text}"]
        return [word for rank in self.culprits for word in ("--own", str(rank), f"{name}={text}")]


@dataclass(frozen=True)
class Made:
    """What the job and the cable get."""

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


def _script(*parts: tuple[str, Callable[[Aim], float | int]]) -> Callable[[Aim], Made]:
    def make(aim: Aim) -> Made:
        return Made([word for name, amount in parts for word in aim.of(name, amount(aim))])

    return make


def _stall(name: str) -> Callable[[Aim], Made]:
    return _script((name, lambda aim: aim.stall_ms))


def _every(name: str, *parts: tuple[str, Callable[[Aim], float | int]]) -> Callable[[Aim], Made]:
    """A pause every few steps, each so much longer."""
    interval_steps = 4
    pause = (f"{name}-ms", lambda aim: aim.stall_ms * interval_steps)
    return _script((f"{name}-every", lambda aim: interval_steps), pause, *parts)


def _throttle(aim: Aim) -> Made:
    compute_ms = float(aim.given.get("script", {}).get("compute-ms", 120.0))
    return Made(aim.of("clock-ratio", compute_ms / (compute_ms + aim.stall_ms)))


def _compute(aim: Aim) -> Made:
    compute_ms = float(aim.given.get("script", {}).get("compute-ms", 120.0))
    return Made(aim.of("compute-ms", compute_ms + aim.lateness_ms))


def _skew(aim: Aim) -> Made:
    """The longest of all ranks' draws sets the pace of each step."""
    spread = aim.share / (1.0 - aim.share) / _EXPECTED_LARGEST.get(aim.world, 1.0)
    return Made([f"--skew={spread:.4f}", f"--seed={int(aim.random.integers(1 << 30))}"])


def _tiny(aim: Aim) -> Made:
    """Kernels shorter than it takes to launch them."""
    count = 480
    compute_ms = float(aim.given.get("script", {}).get("compute-ms", 120.0))
    launch_us = 1000 * (compute_ms + aim.stall_ms) / count
    return Made([f"--kernels={count}", f"--launch-us={launch_us:.1f}"])


_TURN = 6


def _turn_ms(aim: Aim) -> float:
    """A batch of a slow turn: what is ahead when the turn begins hides some of it."""
    given = aim.given.get("script", {})
    ahead = int(given.get("prefetch", 2)) + int(given.get("queued-steps", 2))
    return aim.step_ms * (_TURN + ahead) / _TURN + aim.stall_ms


def _two_culprits(aim: Aim) -> Made:
    """One rank reads for long, another decodes for long, in turns of a few steps."""
    reader, decoder = map(str, aim.culprits[:2])
    own = (
        (reader, f"turn-read-ms={_turn_ms(aim):.2f}"),
        (decoder, f"turn-ms={_turn_ms(aim)}"),
        (reader, "turns=2"),
        (decoder, "turns=2"),
        (decoder, "turn=1"),
    )
    words = [word for rank, value in own for word in ("--own", rank, value)]
    return Made([*words, f"--turn-every={_TURN}"])


def _wandering(aim: Aim) -> Made:
    words = [f"--turns={aim.world}", "--turn=-1", f"--turn-every={_TURN}"]
    return Made([*words, f"--turn-read-ms={_turn_ms(aim):.2f}"])


def _heavy_stage(aim: Aim) -> Made:
    """The last stage computes longer for each micro-batch."""
    compute_ms = float(aim.given.get("script", {}).get("compute-ms", 120.0))
    return Made(["--own", str(aim.world - 1), f"compute-ms={compute_ms + aim.lateness_ms:.2f}"])


def _model_mb(aim: Aim) -> float:
    return float(aim.given.get("script", {}).get("model-mb", 4.0))


def _rate_cap(aim: Aim) -> Made:
    rate = round(_model_mb(aim) * (1 << 20) * 8 / (aim.stall_ms / 1000))
    return Made(links={1: Link(rate_bits_per_second=rate)})


def _latency(aim: Aim) -> Made:
    """A ring of two nodes crosses the link a few times per all-reduce: measured, not derived."""
    trips = float(aim.given.get("trips", 4.0))
    return Made(links={1: Link(delay_s=aim.stall_ms / 1000 / trips)})


def _loss(aim: Aim) -> Made:
    """What a lost frame costs depends on the kernel: measured, not derived."""
    ratio = 0.0025 * aim.share / (1.0 - aim.share)
    return Made(links={1: Link(delay_s=0.0005, loss_ratio=min(0.02, ratio))})


def _background(aim: Aim) -> Made:
    """The job gets about half of a link that others fill."""
    rate = round(_model_mb(aim) * (1 << 20) * 8 * 2 / (aim.stall_ms / 1000))
    link = Link(rate_bits_per_second=rate)
    return Made(links={1: link}, flow_mbit=1.5 * rate / 1e6)


def _one_way(aim: Aim) -> Made:
    rate = round(_model_mb(aim) * (1 << 20) * 8 / (aim.stall_ms / 1000))
    return Made(one_way={1: rate})


def _big(aim: Aim) -> Made:
    """A healthy link, and more to send than a step can hide."""
    rate = 800_000_000
    size = aim.stall_ms / 1000 * rate / 8 / (1 << 20)
    links = {node: Link(rate_bits_per_second=rate) for node in (0, 1)}
    return Made([f"--model-mb={size:.2f}"], links=links)


def _stop(name: str) -> Callable[[Aim], Made]:
    def make(aim: Aim) -> Made:
        steps = int(aim.given.get("script", {}).get("steps", 40))
        words = aim.of(name, int(aim.random.integers(steps // 3, steps // 2)))
        return Made(words, restarts=int(name == "fail-at"), ends_badly=name == "hang-at")

    return make


AIMS: Mapping[str, Callable[[Aim], Made]] = {
    "none": lambda aim: Made(),
    "heavy-transform": _script(("decode-ms", lambda aim: aim.step_ms + aim.stall_ms)),
    "no-workers": _script(
        ("workers", lambda aim: 0), ("decode-ms", lambda aim: aim.step_ms + aim.stall_ms)
    ),
    "prefetch-one": _script(
        ("workers", lambda aim: 2),
        ("prefetch", lambda aim: 1),
        ("uneven-every", lambda aim: 5),
        ("uneven-ms", lambda aim: 4 * aim.step_ms + 5 * aim.stall_ms),
    ),
    # A sixth of a step is under way on the device when it begins.
    "gil-hog": _script(("gil-ms", lambda aim: aim.stall_ms + aim.step_ms / 6)),
    "gc": _every("gc"),
    "logging": _stall("log-ms"),
    "checkpoint": _every("checkpoint"),
    "evaluation": _every("eval"),
    "slow-start": lambda aim: Made([f"--start-ms={4000 + 8000 * aim.share:.0f}"]),
    "pageable-copies": _script(("copy-mb", lambda aim: aim.stall_ms * _PAGEABLE_MB_PER_MS)),
    "oversized-copies": _script(
        ("copy-mb", lambda aim: aim.stall_ms * _PINNED_MB_PER_MS), ("pinned", lambda aim: 1)
    ),
    "item-syncs": _script(
        ("item-syncs", lambda aim: 1), ("host-ms", lambda aim: aim.stall_ms / _LAUNCHES)
    ),
    "tiny-kernels": _tiny,
    "allocator-churn": _stall("alloc-ms"),
    "recompiles": _script(
        ("recompile-every", lambda aim: max(1, round(_RECOMPILE_MS / aim.stall_ms))),
        ("recompile-operations", lambda aim: max(30, round(30 * aim.stall_ms / _RECOMPILE_MS))),
    ),
    "slow-rank": _compute,
    "uneven-shards": _compute,
    "throttle": _throttle,
    "skew": _skew,
    "wandering-loader": _wandering,
    "two-culprits": _two_culprits,
    "heavy-last-stage": _heavy_stage,
    "jitter": lambda aim: Made(["--jitter=0.1", f"--seed={int(aim.random.integers(1 << 30))}"]),
    "rate-cap": _rate_cap,
    "latency": _latency,
    "loss": _loss,
    "background-flow": _background,
    "one-way": _one_way,
    "big-all-reduce": _big,
    "restart": _stop("fail-at"),
    "hang": _stop("hang-at"),
}
