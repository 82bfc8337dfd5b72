"""The scenarios of the demo: what is wrong, on which rank, and the cause a report should name."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank does for each step."""

    device_ns: int
    """Device time of the step's kernels."""
    reads: int
    """Uncached reads of `READ_BYTES` per batch, at least."""
    burn_ns: int
    """CPU time of Python decoding per batch."""
    read_ns: int = 0
    """How long reading takes per batch, at least: a fast disk gives more records for it."""
    checkpoint_every: int = 0
    """Steps between blocking checkpoints; 0 = never."""
    prefetch: int = 2
    """Batches the loader may run ahead."""
    slower_ns: int = 0
    """What the same kernels take longer from step `slower_from` on."""
    slower_from: int = 0

    def device_ns_of(self, step: int) -> int:
        """Return the device time of one step's kernels."""
        return self.device_ns + (self.slower_ns if step >= self.slower_from else 0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A small job with a known fault."""

    name: str
    what: str
    """One line: what is wrong with the job."""
    ranks: tuple[Work, ...]
    steps: int = 120
    cause: str = ""
    """Cause the fault should be reported as; "" = nothing is wrong."""
    gradient_bytes: int = 0
    """What the ranks reduce together in each step; 0 = each trains on its own."""
    link_bytes_per_second: int = 0
    """What the link of each rank carries; 0 = as much as the machine can."""


READ_BYTES = 64 * 1024  # one sample of a dataset of small records
CHECKPOINT_BYTES = 24 << 20

_MS = 1_000_000
_HEALTHY = Work(device_ns=60 * _MS, reads=8, burn_ns=4 * _MS)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "storage",
        "rank 1 reads its samples from a cold disk, one small record at a time",
        (_HEALTHY, Work(device_ns=60 * _MS, reads=8, burn_ns=3 * _MS, read_ns=100 * _MS)),
        cause="storage-local",
    ),
    Scenario(
        "cpu",
        "rank 1 decodes every batch in Python, on a single worker",
        (_HEALTHY, Work(device_ns=60 * _MS, reads=8, burn_ns=100 * _MS)),
        cause="cpu-preprocess",
    ),
    Scenario(
        "mixed",
        "rank 0 reads from a cold disk, rank 1 decodes in Python",
        (
            Work(device_ns=60 * _MS, reads=8, burn_ns=2 * _MS, read_ns=80 * _MS),
            Work(device_ns=60 * _MS, reads=8, burn_ns=110 * _MS),
        ),
    ),
    Scenario(
        "checkpoint",
        "both ranks write a blocking checkpoint every 15 steps",
        (
            Work(device_ns=60 * _MS, reads=8, burn_ns=4 * _MS, checkpoint_every=15),
            Work(device_ns=60 * _MS, reads=8, burn_ns=4 * _MS, checkpoint_every=15),
        ),
        cause="checkpoint",
    ),
    Scenario(
        "network",
        "the gradients of 4 ranks go over links of 45 MB/s",
        (_HEALTHY,) * 4,
        steps=100,
        cause="net-transfer",
        gradient_bytes=2 << 20,
        link_bytes_per_second=45_000_000,
    ),
    Scenario(
        "straggler",
        "from step 40 of 120 on rank 2's device takes 50 ms longer for the same kernels",
        (
            _HEALTHY,
            _HEALTHY,
            Work(device_ns=60 * _MS, reads=8, burn_ns=4 * _MS, slower_ns=50 * _MS, slower_from=40),
            _HEALTHY,
        ),
        cause="sync-slow-compute",
        gradient_bytes=256 << 10,
    ),
    Scenario("clean", "nothing: loading is hidden behind the device", (_HEALTHY, _HEALTHY)),
)


def scenario_named(name: str, steps: int = 0) -> Scenario:
    """Return the scenario, with so many steps if given; KeyError names those there are."""
    for scenario in SCENARIOS:
        if scenario.name == name:
            return replace(scenario, steps=steps) if steps else scenario
    raise KeyError(f"no scenario {name!r}; there are {', '.join(s.name for s in SCENARIOS)}")
