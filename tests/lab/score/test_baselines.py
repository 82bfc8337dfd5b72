"""What each baseline says of a slow disk, a slow rank and a clean run: worked out by hand.

Two nodes with a rank each, twelve steps: wait for data (half of it reading, half decoding),
compute, then an all-reduce until the slower one has come. Rank 0's clock is three seconds ahead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterprof.probe.layout import ALL_REDUCE, COLLECTIVE, DATA_WAIT, PEER_SHIFT, RECV, SEND, STEP
from clusterprof_lab.answer import Answer, NamedCause
from clusterprof_lab.truth import Truth
from tests.support.builders import ns
from tests.support.recordings import Script, make_training, write_recording

BENCH = Path(__file__).resolve().parents[3] / "bench"
GROUP, STEPS, AHEAD_S = 7, 12, 3.0
CLOCKS = {"node-0": (ns(AHEAD_S), 0.0)}
Ask = Callable[[str], Answer]


@pytest.fixture(scope="module")
def registry() -> Iterator[Any]:
    sys.path.insert(0, str(BENCH))
    from baselines import registry

    yield registry
    sys.path.remove(str(BENCH))


def truth(clocks: dict[str, tuple[int, float]]) -> Truth:
    return Truth("x", "synth", "dev", "mild", 0, {}, (), (), (), clocks=clocks)


def cpu(iowait_ratio: float) -> dict[tuple[str, str], float]:
    spent = {"user": 0.1, "iowait": iowait_ratio, "idle": 0.9 - iowait_ratio}
    return {(f"cpu.{what}_ns_total", "all"): 1e9 * share for what, share in spent.items()}


def rank_of(rank: int, wait: float, compute: float, stay: float, iowait: float) -> Script:
    """Wait, compute, then stand in the all-reduce; a step is all three."""
    begin = 1.0 + (AHEAD_S if rank == 0 else 0.0)
    script = make_training([(wait, compute + stay)] * STEPS, begin=begin)
    length = wait + compute + stay
    starts = [begin + length * step for step in range(STEPS)]
    script.main_spans += [
        (COLLECTIVE, at + wait + compute, at + length, GROUP, step, 8, ALL_REDUCE)
        for step, at in enumerate(starts)
    ]
    script.busy = [(at + wait, at + wait + compute) for at in starts]
    script.variables = {"RANK": str(rank), "LOCAL_RANK": "0"}
    script.network = cpu(iowait)
    return script


def two(folder: Path, waits: tuple, computes: tuple, iowaits: tuple = (0.0, 0.0)) -> Path:
    whole = max(wait + compute for wait, compute in zip(waits, computes))
    for rank, (wait, compute) in enumerate(zip(waits, computes)):
        stay = whole - wait - compute
        script = rank_of(rank, wait, compute, stay, iowaits[rank])
        write_recording(script, folder / f"node-{rank}")
    return folder


def asking(registry: Any, recording: Path, clocks: Any = CLOCKS) -> Ask:
    return lambda name: registry.RULES[name](recording, truth(clocks))


@pytest.fixture(scope="module")
def slow_disk(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Rank 1 waits 0.5 s of each second for data, rank 0 0.05 s; both compute 0.5 s."""
    folder = tmp_path_factory.mktemp("disk")
    return asking(registry, two(folder, (0.05, 0.5), (0.5, 0.5), (0.02, 0.6)))


@pytest.fixture(scope="module")
def slow_rank(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Rank 1 computes 0.8 s, rank 0 0.5 s; both wait 0.05 s for data: a step takes 0.85 s."""
    return asking(registry, two(tmp_path_factory.mktemp("rank"), (0.05, 0.05), (0.5, 0.8)))


@pytest.fixture(scope="module")
def clean(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Both wait 0.01 s and compute 0.5 s."""
    return asking(registry, two(tmp_path_factory.mktemp("clean"), (0.01, 0.01), (0.5, 0.5)))


def test_each_rule_blames_its_ranks_for_a_slow_disk(slow_disk: Ask) -> None:
    names = (
        "slowest total compute",
        "last arriver",
        "longest waiter",
        "per-stage mean",
        "per-stage max",
        "stage frontier",
        "iowait > 5 %",
        "AU < 90 %",
        "HTA",
        "NVRx",
    )
    assert {name: slow_disk(name).culprits for name in names} == {
        "slowest total compute": (0,),  # both compute alike: the first of equals
        "last arriver": (1,),
        "longest waiter": (0,),  # the victim
        "per-stage mean": (1,),
        "per-stage max": (1,),
        "stage frontier": (1,),
        "iowait > 5 %": (1,),
        "AU < 90 %": (0, 1),  # both stand half of the time
        "HTA": (0, 1),  # two, of two
        "NVRx": (1,),  # 0.05 / 0.5 in data_loading
    }


def test_clock_offsets_are_corrected_before_ranks_are_compared(
    registry: Any, tmp_path: Path
) -> None:
    recording = two(tmp_path, (0.05, 0.5), (0.5, 0.5))
    assert asking(registry, recording, {})("last arriver").culprits == (0,)
    assert asking(registry, recording)("last arriver").culprits == (1,)


def test_each_rule_names_its_causes_for_a_slow_disk(slow_disk: Ask) -> None:
    assert slow_disk("iowait > 5 %").causes == (NamedCause("storage", None, None, culprits=(1,)),)
    assert slow_disk("AU < 90 %").causes == (NamedCause("storage", None, None, culprits=(0, 1)),)
    # Half of the datapoints of rank 1 have an idle GPU: a bottleneck needs more than half.
    assert slow_disk("SageMaker Debugger").causes == (NamedCause("unattributed", None, None),)
    hta = slow_disk("HTA")
    assert hta.lost_ratio == pytest.approx(0.5)
    assert hta.family_ratio == pytest.approx({"cpu": 0.5, "launch": 0.0, "unattributed": 0.0})
    # Waiting for input: (0.05 + 0.5) / 2, half reading, half decoding; rank 0 stands 0.45 s.
    causes = slow_disk("xprof").causes
    assert causes is not None
    assert {cause.family: cause.share_ratio for cause in causes} == pytest.approx(
        {"network": 0.225, "storage": 0.1375, "cpu": 0.1375}
    )
    assert {cause.family: cause.leaf for cause in causes} == {
        "network": None,
        "storage": None,
        "cpu": "cpu-preprocess",
    }


def test_each_rule_gives_its_answer_for_a_slow_rank(slow_rank: Ask) -> None:
    blamed = {
        "slowest total compute": (1,),
        "last arriver": (1,),
        "longest waiter": (0,),
        "per-stage mean": (1,),
        "per-stage max": (1,),
        "stage frontier": (1,),
        "iowait > 5 %": (),
        "AU < 90 %": (0,),
        "NVRx": (1,),
    }
    assert {name: slow_rank(name).culprits for name in blamed} == blamed
    assert slow_rank("iowait > 5 %").causes == ()
    # The device idles 0.35 s of 0.85 s on rank 0 and 0.05 s on rank 1, all in waits of the host.
    assert slow_rank("HTA").lost_ratio == pytest.approx(0.4 / 1.7)
    causes = slow_rank("xprof").causes
    assert causes is not None
    assert {cause.family: cause.share_ratio for cause in causes} == pytest.approx(
        {"network": 0.3 / 0.85 / 2, "storage": 0.025 / 0.85, "cpu": 0.025 / 0.85}
    )


def test_each_rule_gives_its_answer_for_a_clean_run(registry: Any, clean: Ask) -> None:
    by_key = {name: clean(name) for name in registry.RULES}
    nothing = {name for name, item in by_key.items() if item.causes == ()}
    assert nothing == {
        "iowait > 5 %",
        "AU < 90 %",
        "xprof",
        "SageMaker Debugger",
        "SageMaker Debugger, framework rules too",
    }
    assert by_key["NVRx"].culprits == ()
    assert all(by_key[name].culprits for name in ("last arriver", "stage frontier", "HTA"))
    # How many CPUs the nodes have is not known: the rule on numbers of workers is silent.
    assert by_key["xprof"].culprits is None  # not claimed


def test_sagemaker_names_storage_and_cpu_above_its_thresholds(
    registry: Any, tmp_path: Path
) -> None:
    """2 s of waiting and 0.5 s of computing: the GPU is idle at 4 of 5 datapoints."""
    reported = {}
    burning = {("cpu.user_ns_total", "all"): 95e7, ("cpu.idle_ns_total", "all"): 5e7}
    for name, usage in (("io", cpu(0.6)), ("cpu", burning)):
        script = make_training([(2.0, 0.5)] * 6)
        script.network = usage
        write_recording(script, tmp_path / name / "node-1")
        reported[name] = asking(registry, tmp_path / name, {})("SageMaker Debugger").causes
    low = NamedCause("unattributed", None, None)  # p5 is 0 %
    assert reported == {
        "io": (NamedCause("storage", None, None), low),
        "cpu": (NamedCause("cpu", None, None), low),
    }


def test_no_rule_fails_where_signals_are_missing(registry: Any, tmp_path: Path) -> None:
    bare = Script(end=3.0, sampled=False)  # a process with a rank, and nothing else
    waits = Script(end=6.0, sampled=False)
    waits.main_spans = [(DATA_WAIT, s, s + 0.5, s, -1, 0, 0) for s in range(1, 6)]
    for name, script in (("bare", bare), ("waits", waits)):
        write_recording(script, tmp_path / name / "node-1")
        by_key = {rule: asking(registry, tmp_path / name, {})(rule) for rule in registry.RULES}
        assert by_key["SageMaker Debugger"].causes is None
        assert by_key["HTA"].causes is None
        assert by_key["iowait > 5 %"].causes is None
    assert by_key["AU < 90 %"].culprits == (0,)  # 4 steps of a second, half of each waited for
    xprof = by_key["xprof"].causes
    assert xprof == (NamedCause("unattributed", None, 0.5),)  # no fetch was seen
    assert asking(registry, tmp_path / "nothing", {})("xprof").causes is None


def test_the_larger_of_two_jobs_on_a_node_is_read(registry: Any, tmp_path: Path) -> None:
    from baselines.recording_tables import read_recording

    for name, steps in (("small", 3), ("large", 5)):
        script = make_training([(0.5, 0.5)] * steps)
        script.variables = {"RANK": "0", "SLURM_JOB_ID": name}
        write_recording(script, tmp_path / name)
    assert [len(rank.steps) for rank in read_recording(tmp_path, {}).ranks.values()] == [5]


def test_steps_of_a_restarted_rank_are_joined(registry: Any, tmp_path: Path) -> None:
    """One second of waiting in two steps, then another life with as much."""
    from baselines.recording_tables import read_recording

    for life, begin in (("first", 1.0), ("second", 11.0)):
        script = make_training([(0.5, 0.5)] * 2, begin=begin)
        write_recording(script, tmp_path / life)
    rank = read_recording(tmp_path, {}).ranks[0]
    assert rank.steps[:, 0].tolist() == [ns(1), ns(2), ns(11), ns(12)]
    assert rank.sum_by_step(rank.of(DATA_WAIT)).tolist() == [ns(0.5)] * 4


def test_messages_are_matched_by_sender_receiver_and_number(registry: Any, tmp_path: Path) -> None:
    """Rank 0 sends after 0.8 s of work; rank 1 stands 0.6 s to receive."""
    for rank, peer, kind, begun in ((0, 1, SEND, 0.8), (1, 0, RECV, 0.2)):
        script = Script(end=6.0, sampled=False, variables={"RANK": str(rank)})
        how = kind | (peer + 1) << PEER_SHIFT
        for step in range(5):
            at = 1.0 + step
            script.main_spans.append((COLLECTIVE, at + begun, at + 0.8, GROUP, step, 8, how))
            script.main_spans.append((STEP, at, at + 1.0, step))
        write_recording(script, tmp_path / f"node-{rank}")
    from baselines.operations import match_operations
    from baselines.recording_tables import read_recording

    met = match_operations(read_recording(tmp_path, {}))
    assert sorted(met) == [(GROUP, step, 0, 1) for step in range(5)]
    assert [item.blocked_ns for _, item in sorted(met[GROUP, 0, 0, 1].items())] == [0, ns(0.6)]
    ask = asking(registry, tmp_path, {})
    assert ask("longest waiter").culprits == (1,)
    assert ask("slowest total compute").culprits == (0,)


def test_xprof_classifies_host_time_and_words_the_verdict(registry: Any, tmp_path: Path) -> None:
    from baselines import xprof
    from baselines.recording_tables import read_recording

    recording = two(tmp_path, (0.05, 0.5), (0.5, 0.5))
    # Twelve fetches of 0.05 and 0.5 s, half of each on a CPU, all while they were waited for.
    parts = xprof.compute_breakdown(read_recording(recording, CLOCKS))
    assert parts == xprof.Breakdown(ns(3.3), 0.0, ns(3.3), 0.0, 0.0)
    words = [xprof.format_verdict(share) for share in (0.049, 0.05, 0.199, 0.2)]
    assert words == ["not input-bound", *["moderately input-bound"] * 2, "highly input-bound"]


def test_sagemaker_rules_judge_framework_time_and_memory(registry: Any) -> None:
    """A rank with 21 minutes before its first step, 11 slow steps of 200, one worker of 8 CPUs."""
    from baselines import sagemaker
    from baselines.tables import NO_SPANS, Node, Rank, RecordingTables, Series

    minutes = ns(60)
    length = np.full(200, ns(1.0))
    length[:11] = ns(9.0)
    ends = 21 * minutes + np.cumsum(length)
    steps = np.stack([ends - length, ends], axis=1)
    wait = np.array([[steps[0, 0], steps[0, 0] + 1, DATA_WAIT, 0, 0, 1, 1]])
    reported = {("x", ""): Series(ends[:1], ends[:1])}
    node = Node("node", 8, reported, span_ns=(0, int(ends[-1])))
    rank = Rank(0, node, "", wait, NO_SPANS, (5,), steps)
    printed = [
        value
        for _, value in sagemaker._list_framework_findings(RecordingTables({0: rank}, [node], {}))
    ]
    assert printed == [
        NamedCause("cpu", "cpu-loader-config", None),  # 12.5 % of the CPUs
        NamedCause("unattributed", None, None),
        NamedCause("startup", "startup", None, outside_steps=True),
    ]
    level = sagemaker.Usage(ends, None, None, np.repeat([20.0, 25.5], 20))
    assert sagemaker.detect_memory_increase(level)
    small = np.repeat([20.0, 24.5], 20)
    assert not sagemaker.detect_memory_increase(sagemaker.Usage(ends, None, None, small))
    low = np.full(40, 30.0)
    assert [
        value
        for _, value in sagemaker._list_system_findings([sagemaker.Usage(low, low, low * 0, small)])
    ] == [
        NamedCause("launch", None, None),  # BatchSize: all three low
        NamedCause("unattributed", None, None),
    ]
    busy = sagemaker.Usage(low + 65, low, low * 0, small)
    balance = NamedCause("synchronization", "sync-imbalance", None)
    selected = [
        value
        for _, value in sagemaker._list_system_findings(
            [busy, sagemaker.Usage(low, low, low * 0, None)]
        )
    ]
    assert selected == [balance, NamedCause("unattributed", None, None)]
