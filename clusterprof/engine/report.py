"""From the books of all ranks to one report: sums, findings, header, blinds and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.partial import merge
from clusterprof.engine.advised import with_advice
from clusterprof.engine.besides import with_besides
from clusterprof.engine.blinds import blinds_of
from clusterprof.engine.caused import doings_of, nobodys
from clusterprof.engine.culprits import findings_of
from clusterprof.engine.driver_errors import notes_of
from clusterprof.engine.host_notes import of_nodes
from clusterprof.engine.job import job_facts
from clusterprof.engine.likeness import likeness_of
from clusterprof.engine.metrics import metrics_of
from clusterprof.engine.peers import Across
from clusterprof.engine.reads import with_reads
from clusterprof.engine.step_stats import step_stats
from clusterprof.engine.underfill import underfill_of
from clusterprof.engine.wins import with_wins
from clusterprof.engine.worked import with_work
from clusterprof.engine.worth import metrics_of as worth_metrics
from clusterprof.engine.worth import worth_of
from clusterprof.findings import Blind, Finding, Report, Tail
from clusterprof.trace.sources import LeftOut

_SUMMED = ("window_ns", "unmeasured_ns", "outside_ns", "in_step_ns", "productive_ns", "lost_ns")
"""What a report has of all ranks together."""


def build_report(
    title: str,
    across: Across,
    left_out: Sequence[LeftOut] = (),
    site: Mapping[str, Any] | None = None,
) -> Report:
    """Merge the results of all nodes, in the order given; `left_out` was not analysed, `site` are
    its facts (profile)."""
    nodes, witness = across.nodes, across.witness
    facts = tuple(node.facts for node in nodes)
    books = tuple(one for node in nodes for one in node.books)
    doings = doings_of(books)
    ledgers = tuple(one.ledger for one in books)
    if witness is not None:
        pairs = zip(ledgers, doings)
        ledgers = tuple(replace(one, caused=tuple(doing.both.items())) for one, doing in pairs)
    sums = {name: sum(getattr(one, name) for one in ledgers) for name in _SUMMED}
    reasons = _added(one.reasons for one in books)
    outside = _added(one.outside_buckets for one in ledgers)
    found = findings_of(books, doings, witness, sums["in_step_ns"], sums["window_ns"])
    found = with_besides(with_work(_with_hangs(across, found), ledgers, books), books)
    found = tuple(with_reads(found, books))
    underfill = underfill_of(books)
    job = job_facts(nodes, across.clock_bound_ns, across.clock_reason)
    worth = worth_of(books, across, found, site or {})
    report = Report(
        title=title,
        emulated=any(one.emulated for one in books),
        nodes=facts,
        ranks=ledgers,
        **sums,
        findings=with_wins(found, worth),
        unattributed_ns=sum(reasons.values()),
        unattributed_reasons=_largest_first(reasons),
        outside_buckets=_largest_first(outside),
        metrics=(*metrics_of(books, facts, underfill), *worth_metrics(worth)),
        blinds=(
            *_not_compared(across),
            *blinds_of(nodes, books, across.unmatched, left_out),
            *across.blinds,
        ),
        notes=(
            *_notes(books),
            *notes_of(nodes),
            *of_nodes([(node.facts.name, node.notes) for node in nodes]),
            *across.notes,
            *_copies(left_out),
        ),
        job=job,
        tail=_tail(across, books),
        nobody=() if witness is None else _largest_first(nobodys(books)),
        underfill=underfill,
        steps=step_stats(books),
        likeness=likeness_of(nodes, job),
        worth=worth,
    )
    return with_advice(report, nodes)


def _with_hangs(across: Across, found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Put what the network's counters say into findings, and hangs before others outside steps."""
    found = across.network.worded(found)
    inside = [one for one in found if not one.outside_steps]
    return (*inside, *across.findings, *(one for one in found if one.outside_steps))


def _not_compared(across: Across) -> tuple[Blind, ...]:
    if not across.not_compared:
        return ()
    message = f"operations could not be laid side by side: {across.not_compared}"
    remedy = (
        "set TMPDIR to a folder with room for a quarter of the recordings' size, and analyse again"
    )
    return (Blind("waits between ranks", "failed", message, remedy),)


def _tail(across: Across, books: Sequence[RankBooks]) -> Tail | None:
    if len(books) < 2 or across.witness is None:
        return None
    return across.witness.tail(merge(*(one.partial for one in books)).steps)


def _copies(left_out: Sequence[LeftOut]) -> tuple[str, ...]:
    return tuple(f"{one.path} was left out: {one.why}" for one in left_out if one.copy)


def _added(lines: Iterable[Iterable[tuple[str, int]]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for some in lines:
        for id_, ns in some:
            out[id_] = out.get(id_, 0) + ns
    return out


def _largest_first(amounts: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(((k, ns) for k, ns in amounts.items() if ns), key=lambda p: (-p[1], p[0])))


def _notes(books: Sequence[RankBooks]) -> tuple[str, ...]:
    notes = []
    if any(one.emulated for one in books):
        notes.append("accelerators are emulated: times are real, the devices are not")
    if any(one.ledger.source == "host-spans" for one in books):
        notes.append(
            "lost time is an upper bound: no accelerator was measured, so each wait of the host"
            " counts in full"
        )
    if any(not one.marked and one.ledger.device for one in books):
        notes.append("without the probe causes are told by co-occurrence, at family level only")
    if any(not one.marked and not one.ledger.device for one in books):
        notes.append("neither an accelerator nor the job was observed: that time is unmeasured")
    return tuple(notes)
