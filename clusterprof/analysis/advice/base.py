"""What a recommendation is: text for its page, rules that exclude it, and values of a run.

A recommendation is considered for the causes it names. Any of its rules that holds excludes it, and
the page of the cause prints the rules in their own words, so that the documentation states exactly
what is done.

Marks in the text of a change for the parts that a reader pastes unchanged.

    f"{run('lctl get_param osc.*.rpc_stats')} (root)"

gives the text without marks and, separately, the command, which outputs keep in one piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from clusterprof.analysis.advice.context import AdviceContext
from clusterprof.report.code import CodeLocation
from clusterprof.report.model import Advice, Evidence
from clusterprof.units import format_quantity
from clusterprof.util.ranges import format_number_list

_BEGIN, _END = "\x02", "\x03"
_MARKED = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}")
_MARKS = str.maketrans("", "", _BEGIN + _END)


def mark_command(command: str) -> str:
    """Mark a command or an edit inside the text of a change."""
    return f"{_BEGIN}{command.translate(_MARKS)}{_END}"


def strip_command_marks(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a text without its marks, and the commands that were marked in it."""
    commands = tuple(match[1] for match in _MARKED.finditer(text))
    return text.translate(_MARKS), commands


Effort = Literal["look", "setting", "code", "site", "data"]
_DIAGNOSIS_GAIN = "nothing by itself: it shows what to fix"


@dataclass(frozen=True, slots=True)
class ExclusionRule:
    """A condition under which a recommendation would be wrong."""

    name: str
    condition: str
    """The condition in words, printed after "Left out when"."""
    holds: Callable[[AdviceContext], bool]
    why: Callable[[AdviceContext], str] | None = None
    """Explains with the values of a run why the rule holds; None if a reader need not know."""


@dataclass(frozen=True, slots=True)
class FilledRecommendation:
    """A recommendation with the values of one run."""

    change: str
    """Text in which commands to paste are marked by `mark_command`."""
    because: tuple[str, ...] = ()
    """Further reasons besides the evidence that the recommendation names."""
    what: str = ""
    """Replaces the recommendation's own instruction, with numbers in it; "" keeps it."""


class Recommender(Protocol):
    """Interface of everything that can advise against some causes."""

    @property
    def id(self) -> str: ...
    @property
    def causes(self) -> tuple[str, ...]: ...
    @property
    def what(self) -> str: ...
    @property
    def how(self) -> str: ...
    @property
    def published(self) -> str: ...
    @property
    def worse(self) -> str: ...
    @property
    def expected_change(self) -> str: ...
    @property
    def unless(self) -> tuple[ExclusionRule, ...]: ...
    @property
    def evidence_names(self) -> tuple[str, ...]: ...
    @property
    def effort(self) -> Effort: ...
    @property
    def withheld_text(self) -> str: ...
    @property
    def needs_workers(self) -> bool: ...

    def advise(self, context: AdviceContext) -> Advice | None:
        """Return the advice for this run; None if a rule excludes it."""
        ...


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommendation that changes the job, its node or its submission."""

    id: str
    causes: tuple[str, ...]
    what: str
    """An instruction, one sentence without a full stop."""
    how: str
    """The change in general, for the page."""
    fill: FilledRecommendation | Callable[[AdviceContext], FilledRecommendation]
    """The change, or a function that fills in the values of a run."""
    evidence_names: tuple[str, ...] = ()
    """Suffixes of the names of evidence that supports it."""
    published: str = ""
    """What others gained by it, with the source."""
    worse: str = ""
    expected_change: str = ""
    """Evidence that changes if it worked, besides the lost time; for the page and the check."""
    unless: tuple[ExclusionRule, ...] = ()
    diagnose: bool = False
    withheld_text: str = ""
    """Text shown if a rule excludes this advice: "More workers are not advised"."""
    needs_workers: bool = False
    """True if nobody expects it of a job without workers: that text is not shown then."""
    addressee: Literal["rank", "node", "job"] = "rank"
    """Whom it addresses: the culprit ranks, the operator of their node, or the whole job."""
    effort: Effort = field(kw_only=True)
    """The effort it takes: a word of `advice.EFFORTS`."""

    def advise(self, context: AdviceContext) -> Advice | None:
        """Return the advice for this run; None if a rule excludes it."""
        if any(rule.holds(context) for rule in self.unless):
            return None
        fill = self.fill
        filled = fill if isinstance(fill, FilledRecommendation) else fill(context)
        change, commands = strip_command_marks(filled.change)
        return Advice(
            what=_with_location(filled.what or self.what, context, self.addressee),
            because=_build_reason(context, self.evidence_names, filled.because),
            change=change,
            gain=_describe_gain(context, self.published) if not self.diagnose else _DIAGNOSIS_GAIN,
            verify=describe_check(context, self.expected_change),
            worse=self.worse,
            id=self.id,
            diagnose=self.diagnose,
            effort=self.effort,
            commands=commands,
        )


def format_evidence(item: Evidence) -> str:
    """Format one piece of evidence: name, value with unit, and note."""
    note = f" ({item.note})" if item.note else ""
    return f"{item.name} {format_quantity(item.value, item.unit)}{note}"


def describe_location(context: AdviceContext, with_ranks: bool = True) -> str:
    """Describe node and rank if the cause is theirs and not the whole job's; "" otherwise.

    with_ranks: name the ranks of the node, where there are several nodes.
    """
    culprits = context.finding.culprits
    if not culprits or (context.ranks < 2 and context.nodes < 2):
        return ""
    chief = [culprit for culprit in culprits if culprit.caused_ns * 10 >= culprits[0].caused_ns]
    names = list(dict.fromkeys(culprit.node for culprit in chief))
    if context.nodes > 1 and len(names) >= context.nodes:
        return ""
    if context.nodes < 2 and any(culprit.rank is None for culprit in chief):
        return ""
    if len(chief) >= context.ranks:
        return ""
    if len(names) > 1:
        return f"on {len(names)} nodes, mainly {names[0]}"
    ranks = [culprit.rank for culprit in chief if culprit.rank is not None]
    rank_names = ""
    if ranks and len(ranks) == len(chief):
        rank_names = f"rank{'' if len(ranks) == 1 else 's'} {format_number_list(ranks)}"
    if context.nodes < 2:
        return f"on {rank_names or names[0]}"
    return f"on {names[0]}, {rank_names}" if rank_names and with_ranks else f"on {names[0]}"


def describe_loss_share(context: AdviceContext) -> str:
    """Describe how much time was lost to the cause."""
    finding = context.finding
    period = "the recorded time" if finding.outside_steps else "the time in steps"
    at_most = "at most " if finding.upper_bound else ""
    part = format_quantity(finding.share_ratio, "ratio")
    return (
        f"{at_most}{format_quantity(finding.lost_ns, 'ns')} of GPU time ({part} of {period})"
        f" was lost to it"
    )


def _with_location(what: str, context: AdviceContext, addressee: str) -> str:
    location = (
        ""
        if addressee == "job" or (addressee == "node" and context.nodes < 2)
        else describe_location(context, with_ranks=addressee != "node")
    )
    if not location:
        return what
    return f"{location[:1].upper()}{location[1:]}: {what[:1].lower()}{what[1:]}"


def _build_reason(
    context: AdviceContext, endings: tuple[str, ...], reasons: tuple[str, ...]
) -> str:
    numbers = [item for ending in endings if (item := context.find_evidence(ending)) is not None]
    return "; ".join(
        dict.fromkeys(
            [describe_loss_share(context), *(format_evidence(item) for item in numbers), *reasons]
        )
    )


def _describe_gain(context: AdviceContext, published: str) -> str:
    finding = context.finding
    if finding.recoverable_ns is None:
        text = "what it saves in this run is not known"
    else:
        text = (
            f"{format_quantity(finding.recoverable_ns, 'ns')} of GPU time here if it fixes"
            " all of it"
        )
    if finding.upper_bound:
        text += (
            "; an upper bound: no accelerator was measured, so waits hidden by its queue count too"
        )
    return f"{text}; published: {published}" if published else text


def get_metric_name(context: AdviceContext) -> str:
    """Get the name of the metric that holds the cause's share; "" if there is none."""
    finding = context.finding
    if finding.outside_steps:
        return ""
    if finding.cause.family == "synchronization":
        return ""  # only the sum of the family has a metric
    return f"stall.{finding.cause.id}_ratio"


def describe_check(context: AdviceContext, moves: str) -> str:
    share = format_quantity(context.finding.share_ratio, "ratio")
    metric = get_metric_name(context)
    if metric:
        half = f"{50 * context.finding.share_ratio:.1f}%"
        text = (
            f"record again, then clusterprof gate RUN --assert '{metric} <= {half}' (now {share})"
        )
    else:
        whole_time = "the recorded time" if context.finding.outside_steps else "the time in steps"
        text = (
            f"record again, then clusterprof analyze RUN: {context.cause} is below {share} of"
            f" {whole_time}"
        )
    return f"{text}; {moves}" if moves else text


def format_share(share: float) -> str:
    """Format a share of a finding without decimals: "71 %"."""
    return f"{min(100 * share, 100.0):.0f} %"


def format_line_in_function(location: CodeLocation) -> str:
    """Format a line for a sentence: "train.py:42 in augment"."""
    if location.file.startswith("<"):
        return location.function
    name = location.file.rpartition("/")[2]
    if not location.line:
        return f"{location.function} in {name}"
    return f"{name}:{location.line} in {location.function}"
