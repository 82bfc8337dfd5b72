"""Less to see moves time up the tree or to "unattributed", never to another cause.

The parent of what is waited for other ranks and of data on their way is one: without marks, who was
late and what was slow are derived from the same sleep.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.probe import layout
from clusterprof.report.model import Report
from tests.support.recordings import Script
from tests.support.reduced_recordings import (
    POWER,
    SM,
    Step,
    make_cluster,
    record_and_analyze,
    remove_signals,
)

N = 20
PLAIN, MIXED, SLOW = Step(), Step(read=0.1, decode=0.1), Step(compute=0.4)
SAVES = Step(save=0.5)
PEERS = ("network", "synchronization")


def job(on_device: bool) -> list[Script]:
    """Rank 1 reads and decodes, rank 2 computes longer; every fifth step all save instead."""

    def steps(usual: Step) -> list[Step]:
        return [SAVES if number % 5 == 4 else usual for number in range(N)]

    scripts = make_cluster(steps(PLAIN), steps(MIXED), steps(SLOW), on_device=on_device)
    for script in scripts:
        script.network = {
            ("network.receive_bytes_total", "eth0"): 5e6,
            ("network.transmit_bytes_total", "eth0"): 5e6,
            ("disk.read_bytes_total", "vda"): 50e6,
            ("disk.reads_total", "vda"): 500.0,
            ("pressure.io_some_ns_total", ""): 2e8,
            ("pressure.cpu_some_ns_total", ""): 5e7,
            ("cgroup.throttled_ns_total", ""): 0.0,
        }
    return scripts


def without_kind(scripts: list[Script], kind: int) -> list[Script]:
    for script in scripts:
        script.main_spans = [span for span in script.main_spans if span[0] != kind]
        script.worker_spans = [span for span in script.worker_spans if span[0] != kind]
    return scripts


def without_signal(scripts: list[Script], word: str) -> list[Script]:
    for script in scripts:
        script.network = {key: v for key, v in script.network.items() if word not in key[0]}
    return scripts


KINDS = {
    "collectives": layout.COLLECTIVE,
    "fetches": layout.FETCH,
    "waits": layout.DATA_WAIT,
    "steps": layout.STEP,
    "saves": layout.CHECKPOINT,
}
SIGNALS = ("disk.", "pressure.", "cgroup.", "network.")
GROUPS = ("threads", "spans", SM, POWER)


def parent(cause: str) -> str:
    family = CAUSES[cause].family if cause in CAUSES else cause
    return "peers" if family in PEERS else family


def check(before: Report, after: Report) -> None:
    """Nothing has more than it and those of its family that it may stand for had before."""
    for full, less in zip(before.ranks, after.ranks, strict=True):
        had, has = dict(full.buckets), dict(less.buckets)
        # Samples are ten a second, marks are exact: three points of the time in steps.
        slack = 0.03 * full.in_step_ns
        for id_ in set(has) - {"unattributed"}:
            general = id_ == parent(id_) or parent(id_) == "peers"
            allowed = sum(
                ns
                for value, ns in had.items()
                if value == id_ or (general and parent(value) == parent(id_))
            )
            assert has[id_] <= allowed + slack, (full.rank, id_, has[id_], had)


@pytest.fixture(scope="module", params=[False, True], ids=["on the host", "on the device"])
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    return request.param, record_and_analyze(job(request.param), tmp_path_factory.mktemp("full"))


@pytest.mark.parametrize("missing", [*KINDS, *SIGNALS, *GROUPS])
def test_a_missing_signal_never_moves_time_to_another_cause(
    full: tuple, missing: str, tmp_path: Path
) -> None:
    on_device, before = full
    scripts = job(on_device)
    if missing in KINDS:
        scripts = without_kind(scripts, KINDS[missing])
    elif missing in SIGNALS:
        scripts = without_signal(scripts, missing)
    else:
        scripts = remove_signals(scripts, missing)
    check(before, record_and_analyze(scripts, tmp_path))
