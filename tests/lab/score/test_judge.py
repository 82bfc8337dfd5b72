"""One answer beside one truth: every field of the verdict, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterprof_lab.answer import Answer, NamedCause
from clusterprof_lab.families import FAMILIES
from clusterprof_lab.scenario import ExpectedVerdict
from clusterprof_lab.score.dominant_cause import explain_weak_fault
from clusterprof_lab.score.judge import Judgment, judge_answer
from clusterprof_lab.truth import OTHER, Injected, Lost, Place, Truth

# Two ranks of 1,000 ns each. Rank 1's disk cost itself 300 and rank 0 260 of waiting; 40 are
# of no cause: 28 points storage, 2 points that nobody injected.
TRUTH = Truth(
    "storage-io-cap",
    "synth",
    "dev",
    "medium",
    0,
    {},
    (Place(0, "a", 1000, 10), Place(1, "b", 1000, 10)),
    (Lost("storage-local", 1, 1, 300), Lost("storage-local", 1, 0, 260), Lost(OTHER, 0, 0, 40)),
    (Injected("storage-local", (1,)),),
    step_ns=100.0,
    clean_step_ns=75.0,
)
WANTED = ExpectedVerdict("storage", ("storage-local",), "node")
ZERO = dict.fromkeys(FAMILIES, 0.0)
ANSWER = Answer(
    "us 1",
    (
        NamedCause("storage", "storage-local", 0.25, 0.9, (1,)),
        NamedCause("cpu", "cpu-preprocess", 0.03, 0.7, (0,)),
        NamedCause("network", None, 0.005, 0.9, ()),
        NamedCause("startup", "startup", 0.5, 0.95, (0, 1), outside_steps=True),
    ),
    family_ratio={**ZERO, "storage": 0.25, "cpu": 0.03, "network": 0.005, "unattributed": 0.015},
    culprits=(1,),
    residual_ns=0,
    lost_ratio=0.3,
    gain_ratio=0.2,
)


def test_a_right_answer_with_small_errors_is_judged_right() -> None:
    errors = {**ZERO, "storage": 3.0, "cpu": 3.0, "network": 0.5, "unattributed": 0.5}
    judged = judge_answer(ANSWER, TRUTH, WANTED)
    assert {k: round(v, 9) for k, v in (judged.errors or {}).items()} == errors
    assert judged.unattributed_ratio == 0.0 and judged.gain_error is not None  # 1.5 of 2 true
    assert round(judged.gain_error, 9) == -5.0  # 20 said; 1 - 75 / 100 = 25 true
    assert replace(judged, errors=None, unattributed_ratio=None, gain_error=None) == Judgment(
        wanted="storage",
        named_family="storage",
        named_leaf="storage-local",
        active=("storage", "cpu", "network", "unattributed"),
        family_right=True,
        leaf_top1=True,
        leaf_top2=True,
        abstained=False,
        # 25 said, 28 true; 3 said, 0 true; start-up is in every run and in few truths
        emitted=(("storage-local", 0.9, True), ("cpu-preprocess", 0.7, False)),
        culprit_right=True,
        inverted=False,
        false_causes=("cpu",),
        wrong_first_sure=False,
        residual_ns=0,
        first_blamed=1,
    )


@pytest.mark.parametrize(
    ("cause", "wrong"),
    [
        (NamedCause("storage", "storage-local", 0.25, 0.95), False),
        (NamedCause("cpu", "cpu-gc", 0.25, 0.8), True),
        (NamedCause("cpu", "cpu-gc", 0.25, 0.79), False),  # wrong, and not sure
        (NamedCause("cpu", "cpu-gc", 0.25, None), None),
    ],
)
def test_a_confident_wrong_first_cause_is_counted(cause: NamedCause, wrong: bool | None) -> None:
    answer = replace(ANSWER, causes=(cause,), family_ratio=None)
    assert judge_answer(answer, TRUTH, WANTED).wrong_first_sure is wrong
    assert judge_answer(replace(answer, causes=()), TRUTH, WANTED).wrong_first_sure is False


def test_causes_above_the_truth_of_healthy_jobs_are_wrong() -> None:
    healthy = replace(TRUTH, injected=())
    nothing = ExpectedVerdict("", (), "nobody")
    # Storage has 28 points by truth: 30 said are no false cause, 32 are.
    for share, wrong in ((0.30, False), (0.32, True)):
        answer = replace(
            ANSWER,
            causes=(NamedCause("storage", None, share, 0.9),),
            family_ratio={"storage": share},
        )
        assert judge_answer(answer, healthy, nothing).wrong_first_sure is wrong


def test_a_named_group_is_judged_as_a_separate_claim() -> None:
    causes = (
        NamedCause("storage", None, 0.25, 0.9),  # 28 true
        NamedCause("cpu", None, 0.03, 0.7),  # none true
        NamedCause("network", None, 0.005, 0.9),  # too small to be judged
        NamedCause("fail", None, 0.5, 0.9, outside_steps=True),
    )
    judged = judge_answer(replace(ANSWER, causes=causes), TRUTH, WANTED)
    assert judged.emitted == ()
    assert judged.emitted_groups == (("storage", 0.9, True), ("cpu", 0.7, False))


def test_unattributed_time_above_the_truth_is_counted() -> None:
    reported = {**ZERO, "storage": 0.25, "unattributed": 0.035}
    judged = judge_answer(replace(ANSWER, family_ratio=reported), TRUTH, WANTED)
    assert round(judged.unattributed_ratio or 0.0, 9) == 0.05  # 3.5 said less 2 true, of 30 lost


def test_the_larger_of_two_faults_leads_and_equal_faults_tie() -> None:
    both = replace(WANTED, also=(("cpu", "cpu-preprocess"),))
    causes = (
        NamedCause("cpu", "cpu-preprocess", 0.26),
        NamedCause("storage", "storage-local", 0.25),
    )
    cpu_first = replace(ANSWER, causes=causes, family_ratio={**ZERO, "cpu": 0.26, "storage": 0.25})

    def judged_with_cpu(cpu_ns: int) -> tuple[object, ...]:
        truth = replace(TRUTH, lost=(*TRUTH.lost, Lost("cpu-preprocess", 0, 0, cpu_ns)))
        judged = judge_answer(cpu_first, truth, both)
        return judged.wanted, judged.family_right, judged.leaf_top1

    assert judged_with_cpu(500) == ("storage", False, False)  # 25 points, storage has 28
    assert judged_with_cpu(545) == ("cpu", True, True)  # 27.25: as large, and said first
    assert judged_with_cpu(600) == ("cpu", True, True)
    # what else the group lost is not the fault's: 25 points of cpu-preprocess, 10 of contention
    more = (Lost("cpu-preprocess", 0, 0, 500), Lost("cpu-contention", 0, 0, 200))
    assert judge_answer(ANSWER, replace(TRUTH, lost=(*TRUTH.lost, *more)), both).leaf_top1 is True
    truth = replace(TRUTH, lost=(*TRUTH.lost, Lost("cpu-preprocess", 0, 0, 600)))
    assert judge_answer(ANSWER, truth, both).family_right is False


def test_groups_are_ranked_by_sum_and_leaves_individually() -> None:
    causes = (
        NamedCause("network", "net-transfer", 0.12),
        NamedCause("cpu", "cpu-preprocess", 0.08),
        NamedCause("cpu", "cpu-throttled", 0.05),
    )
    wanted = ExpectedVerdict("cpu", ("cpu-throttled",), "node")
    split = Answer("us 1", causes, leaves=True)  # 13 points of CPU, 12 of network
    truth = replace(TRUTH, lost=(Lost("cpu-throttled", 1, 1, 300), Lost("net-transfer", 1, 1, 90)))
    judged = judge_answer(split, truth, wanted)
    assert (judged.named_family, judged.family_right, judged.leaf_top1) == ("cpu", True, False)
    whole = replace(split, family_ratio={**ZERO, "network": 0.12, "cpu": 0.115})
    assert (
        judge_answer(whole, truth, wanted).named_family == "network"
    )  # the table of groups goes first
    unsized = replace(split, causes=tuple(replace(cause, share_ratio=None) for cause in causes))
    assert (
        judge_answer(unsized, truth, wanted).named_family == "network"
    )  # no amounts: the order counts


def test_leaves_of_two_faults_are_ranked_by_their_own_cost() -> None:
    # 28 points of storage; of CPU 26 of the fault's leaf, 4 of another: CPU leads by group alone
    both = replace(WANTED, also=(("cpu", "cpu-preprocess"),))
    lost = (Lost("cpu-preprocess", 0, 0, 520), Lost("cpu-contention", 0, 0, 80))
    judged = judge_answer(ANSWER, replace(TRUTH, lost=(*TRUTH.lost, *lost)), both)
    assert (judged.wanted, judged.family_right, judged.leaf_top1) == ("cpu", False, True)


def test_the_costliest_cause_is_expected_over_a_mild_fault() -> None:
    lost = (Lost("storage-local", 1, 1, 60), Lost("net-transfer", None, 0, 90))  # 3 points, 4.5
    truth = replace(TRUTH, lost=lost)
    judged = judge_answer(ANSWER, truth, WANTED)
    assert (judged.wanted, judged.family_right, judged.leaf_top1) == ("network", False, False)
    network = Answer("us 1", (NamedCause("network", "net-transfer", 0.04),), culprits=(1,))
    judged = judge_answer(network, truth, WANTED)
    assert (judged.family_right, judged.leaf_top1, judged.culprit_right) == (True, True, True)
    equal = replace(truth, lost=(Lost("storage-local", 1, 1, 71), lost[1]))  # 0.95 points apart
    assert judge_answer(ANSWER, equal, WANTED).leaf_top1 is True
    assert judge_answer(network, equal, WANTED).leaf_top1 is True


def test_a_fault_below_half_of_its_aim_is_reported() -> None:
    printed = "the fault did not hit: it should cost 60 points and cost 28"
    assert [explain_weak_fault(TRUTH, WANTED, aimed) for aimed in (None, 0.25, 0.55, 0.6)] == [
        "",
        "",
        "",
        printed,
    ]
    assert explain_weak_fault(TRUTH, replace(WANTED, family=""), 0.6) == ""


def test_a_blamed_victim_is_an_inversion() -> None:
    judged = judge_answer(replace(ANSWER, culprits=(0, 1)), TRUTH, WANTED)
    assert judged.culprit_right is False
    assert judged.inverted is False  # rank 0 caused 2 points itself
    only = replace(TRUTH, lost=TRUTH.lost[:2])
    assert judge_answer(replace(ANSWER, culprits=(0, 1)), only, WANTED).inverted is True
    assert judge_answer(replace(ANSWER, culprits=()), only, WANTED).inverted is False
    small = replace(only, lost=(Lost("storage-local", 1, 0, 50),))  # 2.5 points: not much
    assert judge_answer(replace(ANSWER, culprits=(0,)), small, WANTED).inverted is False


def test_missing_claims_are_neither_right_nor_wrong() -> None:
    judged = judge_answer(Answer("mute", None), TRUTH, WANTED)
    assert judged == Judgment(wanted="storage", named_family=None)
    counts = judge_answer(
        Answer("groups", (NamedCause("cpu", None, None),), leaves=False), TRUTH, WANTED
    )
    assert counts == Judgment(
        wanted="storage", named_family="cpu", family_right=False, false_causes=("cpu",)
    )  # a cause without an amount is a cause


def test_a_cause_covering_several_groups_is_right_for_each_group() -> None:
    loader = NamedCause("cpu", None, 0.28, covers=("storage",))  # "input-bound"
    word = Answer("words", (loader,), culprits=(1,), leaves=False)
    judged = judge_answer(word, TRUTH, WANTED)
    assert (judged.named_family, judged.family_right, judged.false_causes) == ("storage", True, ())
    slow = replace(TRUTH, lost=(Lost("net-transfer", None, 0, 300),))
    other = judge_answer(word, slow, replace(WANTED, family="network", leaves=()))
    assert (other.named_family, other.family_right) == ("cpu", False)
    amount = replace(word, family_ratio={"cpu": 0.28})
    assert judge_answer(amount, TRUTH, WANTED).errors is None  # not of the one group nor the other
    apart = Answer("words", (replace(loader, covers=("eval",)),), leaves=False)
    judged = judge_answer(apart, TRUTH, WANTED)
    assert (judged.family_right, judged.false_causes) == (False, ("cpu",))


def test_a_group_without_a_leaf_counts_as_an_abstention() -> None:
    coarse = replace(ANSWER, causes=(NamedCause("storage", None, 0.28, 0.9, (1,)),))
    judged = judge_answer(coarse, TRUTH, WANTED)
    assert (judged.family_right, judged.leaf_top1, judged.leaf_top2) == (True, False, False)
    assert judged.abstained is True and judged.emitted == ()


def test_any_leaf_of_a_scenario_is_accepted() -> None:
    either = ExpectedVerdict("storage", ("storage-cold-cache", "storage-local"), "node")
    cold = replace(ANSWER, causes=(NamedCause("storage", "storage-cold-cache", 0.28, 0.9, (1,)),))
    judged = judge_answer(cold, TRUTH, either)
    assert judged.leaf_top1 is True and judged.emitted == (("storage-cold-cache", 0.9, True),)
    assert judge_answer(cold, TRUTH, WANTED).emitted == (("storage-cold-cache", 0.9, False),)


def test_a_leaf_is_right_if_half_its_amount_is_true() -> None:
    for share, right in ((0.55, True), (0.57, False)):  # 28 points are true
        printed = replace(
            ANSWER, causes=(NamedCause("storage", "storage-local", share, 0.9, (1,)),)
        )
        assert judge_answer(printed, TRUTH, WANTED).emitted == (("storage-local", 0.9, right),)


def test_faults_outside_steps_are_judged_by_causes_outside_steps() -> None:
    wanted = ExpectedVerdict("fail", ("fail-hang",), "rank", outside_steps=True)
    truth = replace(
        TRUTH,
        lost=(),
        injected=(Injected("fail-hang", (1,)),),
        outside=(Lost("fail-hang", 1, 0, 9000),),
    )
    hang = NamedCause("fail", "fail-hang", 0.6, 0.9, (1,), outside_steps=True)
    judged = judge_answer(replace(ANSWER, causes=(*ANSWER.causes[:1], hang)), truth, wanted)  # type: ignore[index]
    assert (judged.named_family, judged.leaf_top1, judged.culprit_right) == ("fail", True, True)
    assert judged.emitted == (("storage-local", 0.9, False), ("fail-hang", 0.9, True))
    assert judged.gain_error is None


def test_causes_above_the_truth_of_a_null_run_are_false() -> None:
    null = replace(TRUTH, lost=(Lost("storage-local", 1, 1, 30),), injected=())  # 1.5 points
    nothing = ExpectedVerdict("", (), "nobody")
    reported = {**ZERO, "storage": 0.04, "cpu": 0.035, "unattributed": 0.2}
    judged = judge_answer(replace(ANSWER, family_ratio=reported, culprits=()), null, nothing)
    assert judged.false_causes == ("cpu",)  # storage is 2.5 above
    little = replace(null, lost=(Lost("storage-local", 1, 1, 6),))  # 0.3 points
    low = {**ZERO, "storage": 0.032}  # 2.9 above
    assert judge_answer(replace(ANSWER, family_ratio=low), little, nothing).false_causes == ()
    assert judge_answer(replace(ANSWER, family_ratio=low), little, WANTED).false_causes == (
        "storage",
    )
    assert (judged.wanted, judged.family_right, judged.leaf_top1) == ("nothing", None, None)
    assert judged.unattributed_ratio is None
    assert judge_answer(replace(ANSWER, culprits=()), little, nothing).nobody_right is True
    assert judge_answer(ANSWER, little, nothing).nobody_right is False
    # Of 1.5 points that rank 1 did cause it may be blamed, or not.
    assert judge_answer(ANSWER, null, nothing).nobody_right is None


def test_a_fault_of_all_ranks_is_not_judged_by_culprit() -> None:
    judged = judge_answer(ANSWER, TRUTH, replace(WANTED, culprit="everybody"))
    assert judged.culprit_right is None and judged.nobody_right is None


def test_two_culprits_count_only_with_their_own_causes() -> None:
    wanted = ExpectedVerdict(
        "storage", ("storage-local",), "several", also=(("cpu", "cpu-preprocess"),)
    )
    truth = replace(
        TRUTH, injected=(Injected("storage-local", (1,)), Injected("cpu-preprocess", (0,)))
    )
    assert judge_answer(ANSWER, truth, wanted).both_found is True
    swapped = tuple(replace(value, culprits=(1,)) for value in ANSWER.causes or ())
    assert judge_answer(replace(ANSWER, causes=swapped), truth, wanted).both_found is False
    # a tool that blames ranks and names no causes: the first two of them
    ranks = Answer("ranks", None, culprits=(1, 0, 5))
    assert judge_answer(ranks, truth, wanted).both_found is True
    assert judge_answer(replace(ranks, culprits=(1, 5, 0)), truth, wanted).both_found is False


def test_a_truth_that_contradicts_its_scenario_is_reported() -> None:
    judged = judge_answer(ANSWER, TRUTH, ExpectedVerdict("network", ("net-link",), "nobody"))
    assert judged.notes == ("truth has most storage, the scenario wants network",)
