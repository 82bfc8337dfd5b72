"""First screens as a whole, 80 columns wide: what somebody reads who has never seen the tool."""

from __future__ import annotations

import html
import re
from dataclasses import replace

from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.output.renderers.html.page import Html
from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.report.history import WAITING_FOR_RANKS, History, RankHistory
from clusterprof.report.impact import CauseImpact, Impact
from clusterprof.report.model import (
    Advice,
    Culprit,
    Evidence,
    Finding,
    Onset,
    PeerComparison,
    Report,
)
from tests.support.reports import S, make_storage_report

MS = 1_000_000
LOOK = Advice(
    "On rank 1: compare its device with that of another rank",
    "because",
    "dcgmi diag -r 2",
    "gain",
    "verify",
    "worse",
    "compare-devices",
    effort="look",
    commands=("dcgmi diag -r 2",),
)
NO_WORKERS = "More workers are not advised: 2 ranks share 2 CPUs, and 1 worker fills its share"


def base(finding: Finding, history: History, waits_ns: int) -> Report:
    """Two ranks, 100 s in steps each; rank 0 lost so much, all of it to the finding."""
    report = make_storage_report()
    bucket = ((finding.cause.id, waits_ns),)
    first, second = (
        replace(
            rank,
            window_ns=100 * S,
            outside_ns=0,
            in_step_ns=100 * S,
            steps=100,
            lost_ns=lost,
            productive_ns=100 * S - lost,
            buckets=lines,
            outside_buckets=(),
        )
        for rank, lost, lines in zip(report.ranks, (waits_ns, 0), (bucket, ()))
    )
    return replace(
        report,
        title="runs/a",
        ranks=(first, second),
        window_ns=200 * S,
        outside_ns=0,
        in_step_ns=200 * S,
        productive_ns=200 * S - waits_ns,
        lost_ns=waits_ns,
        findings=(finding,),
        unattributed_ns=0,
        unattributed_reasons=(),
        outside_buckets=(),
        coverage_gaps=(),
        notes=(),
        history=history,
    )


def straggler() -> Report:
    """From step 41 of 100 on rank 1 takes 1.5 s for a step and rank 0 waits for half of one: 30 s.

    Of 100 s both ranks would be done 30 s sooner: 60 s of device time.
    """
    finding = Finding(
        CAUSES["sync-slow-compute"],
        30 * S,
        0.15,
        60 * S,
        0.93,
        "B",
        False,
        False,
        (Culprit("node-a", 1, "GPU-9a77", "", 0, 30 * S, 1, 60 * S),),
        (Evidence("step.worked_ns", 1500.0 * MS, "ns", "a step of rank 1; waiting ranks: 1 s"),),
        advice=(LOOK,),
        why_savings_exceed_loss="rank 1 also finishes sooner",
        onset=Onset(40 * S, 40, 100),
        peer_comparison=PeerComparison(
            "step.worked_ns", "ns", 1500.0 * MS, 1000.0 * MS, 1, "rank", "of work a step"
        ),
    )
    ends = tuple(S * (at + 1) for at in range(100))
    waits = (0,) * 8 + (5 * S // 2,) * 12
    ranks = (
        RankHistory(0, (5 * S,) * 20, ((WAITING_FOR_RANKS, waits),), ends),
        RankHistory(1, (5 * S,) * 20, (), ends),
    )
    line = CauseImpact("sync-slow-compute", None, 30 * S, None, None)
    job_impact = Impact(None, "", None, 100 * S, (line,), gpus=2)
    return replace(base(finding, History(0, 5 * S, 20, ranks), 30 * S), impact=job_impact)


def preparing() -> Report:
    """Rank 0 lost 40 s of its 100 s to its worker; rank 1 nothing, and ended after 50 s."""
    cause = CAUSES["cpu-preprocess"]
    finding = Finding(
        cause,
        40 * S,
        0.2,
        40 * S,
        0.98,
        "A",
        False,
        False,
        (Culprit("node-a", 0, "GPU-0f3c", "worker pid 9", 40 * S, None, None, 40 * S),),
        (
            Evidence("worker.on_cpu_ratio", 0.9, "ratio", "of the waits"),
            Evidence("loader.workers_count", 1.0, "count", "of the rank; the other rank has 1"),
        ),
        advice=(
            Advice(
                "On rank 0: move transforms to the accelerator",
                "",
                "nvidia.dali",
                "",
                "",
                "",
                "prepare-on-gpu",
                effort="code",
            ),
        ),
        withheld_advice=(NO_WORKERS,),
        peer_comparison=PeerComparison(
            "step.own_lost_ns", "ns", 400.0 * MS, 0.0, 1, "rank", "lost to it in a step"
        ),
    )
    ranks = (
        RankHistory(0, (5 * S,) * 20, ((cause.id, (2 * S,) * 20),), ()),
        RankHistory(1, (5 * S,) * 10 + (0,) * 10, (), ()),
    )
    return base(finding, History(0, 5 * S, 20, ranks, ended=((1, 50 * S),)), 40 * S)


STRAGGLER = """\
 clusterprof  runs/a               1 node, 2 ranks, 100 steps, 5.2 min recorded

 Lost           15.0 % of GPU time inside steps: 0.50 of 3.3 GPU-minutes.
 Main cause     One rank computes longer than the others: 30.00 s, 15.0 %
                (confidence 93 %).
 Ranks          node-a rank 1: 1.50 s of work a step, the other rank 1.00 s;
                which lost 30.00 s waiting for it; from 40.0 s on (step 41 of
                100)
 Try next       On rank 1: compare its device with that of another rank
                Change: dcgmi diag -r 2
 Expected gain  About 60.00 s of GPU time; the job ends 30.00 s sooner
                (30.0 %). That is more than was lost: rank 1 also finishes
                sooner.
"""
PREPARING = """\
 clusterprof  runs/a               1 node, 2 ranks, 100 steps, 5.2 min recorded

 Lost           20.0 % of GPU time inside steps: 0.67 of 3.3 GPU-minutes.
 Main cause     The CPU is busy preparing data: 40.00 s, 20.0 % (confidence
                98 %).
 Ranks          node-a rank 0 (worker pid 9): 400.0 ms lost to it in a step,
                the other rank nothing
 Evidence       worker.on_cpu_ratio 90.0 % (of the waits); loader.workers_count
                1 (of the rank; the other rank has 1)
 Try next       On rank 0: move transforms to the accelerator. More workers are
                not advised: 2 ranks share 2 CPUs, and 1 worker fills its
                share.
                Change: nvidia.dali
 Expected gain  About 40.00 s of GPU time, 20.0 %.

 busy   ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅
 lost   ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄
        0.0 s  rank 1 ended at 50.0 s; other ranks: steady   100.0 s

    CAUSE                                  lost    share confidence         gain
 1  cpu-preprocess                      40.00 s   20.0 %       98 %      40.00 s
 ?  unattributed                           0 ns    0.0 %

 Not seen: no known gaps.  More: clusterprof explain cpu-preprocess
"""


def test_the_straggler_screen_shows_onset_and_gain() -> None:
    assert Terminal(80).render(straggler()).startswith(STRAGGLER)


def test_the_screen_shows_suppressed_remedy_and_ended_ranks() -> None:
    screen = Terminal(80).render(preparing()).partition("\n CAUSES IN FULL")[0]
    assert screen == PREPARING


def test_plain_output_shows_the_same_first_screen() -> None:
    lines = Plain().render(straggler()).splitlines()
    for line in (
        "Next: this saves: about 60.00 s of GPU time; the job ends 30.00 s sooner (30.0 %). That"
        " is more than was lost: rank 1 also finishes sooner.",
        "  Certainty: 93 %: measured by one signal (grade B)",
        "  Fixing only this saves: 1.0 min, more than was lost: rank 1 also finishes sooner",
        "  Since: from 40.0 s on (step 41 of 100)",
    ):
        assert line.replace("1.0 min", "60.00 s") in lines
    lines = Plain().render(preparing()).splitlines()
    assert f"  Not advised: {NO_WORKERS}" in lines
    assert "Over time: rank 1 ended at 50.0 s; other ranks: steady" in lines


def test_markdown_output_shows_the_same_first_screen() -> None:
    text = Markdown().render(straggler())
    assert "\nFixing it saves more than was lost: rank 1 also finishes sooner.\n" in text
    assert "sync-slow-compute, from 40.0 s on (step 41 of 100):" in text
    assert f"\n{NO_WORKERS}.\n" in Markdown().render(preparing())


def test_html_output_shows_the_same_first_screen() -> None:
    def page_text(report: Report) -> str:
        page = re.sub(r"<script.*?</script>", "", Html().render(report), flags=re.S)
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())

    text = page_text(straggler())
    assert "saves 60.00 s, more than was lost: rank 1 also finishes sooner" in text
    assert "from 40.0 s on (step 41 of 100)" in text
    assert f"{NO_WORKERS}." in page_text(preparing())
