"""From the books of all ranks to one report: sums, findings, blinds and notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from clusterprof.attribution.confidence import main_grade
from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.gain import recoverable_ns
from clusterprof.attribution.ledger import STARTUP, Bucket, RankBooks
from clusterprof.attribution.local import evidence_of
from clusterprof.attribution.partial import Partial, merge
from clusterprof.detectors.registry import DETECTORS
from clusterprof.engine.metrics import metrics_of
from clusterprof.engine.node import NodeResult
from clusterprof.engine.peers import Across
from clusterprof.findings import Blind, Culprit, Evidence, Finding, RankLedger, Report

# Less than this part of the time inside steps is in the ledger and no finding.
FINDING_AT_LEAST_RATIO = 0.01
_MOST_EVIDENCE = 3
_STARTUP_CONFIDENCE = 0.95  # seen from the probe's first mark; from the device's first work less
_STARTUP_CONFIDENCE_UNMARKED = 0.75


def build_report(title: str, across: Across) -> Report:
    """Merge the results of all nodes, in the order given."""
    nodes = across.nodes
    books = tuple(one for node in nodes for one in node.books)
    ledgers = tuple(one.ledger for one in books)
    in_step_ns = sum(one.in_step_ns for one in ledgers)
    window_ns = sum(one.window_ns for one in ledgers)
    reasons = _added(one.reasons for one in books)
    outside = _added(one.outside_buckets for one in ledgers)
    return Report(
        title=title,
        emulated=any(one.emulated for one in books),
        nodes=tuple(node.facts for node in nodes),
        ranks=ledgers,
        window_ns=window_ns,
        unmeasured_ns=sum(one.unmeasured_ns for one in ledgers),
        outside_ns=sum(one.outside_ns for one in ledgers),
        in_step_ns=in_step_ns,
        productive_ns=sum(one.productive_ns for one in ledgers),
        lost_ns=sum(one.lost_ns for one in ledgers),
        findings=(
            *across.network.worded(_findings(books, in_step_ns)),
            *across.findings,
            *_outside_findings(books, window_ns),
        ),
        unattributed_ns=sum(reasons.values()),
        unattributed_reasons=_largest_first(reasons),
        outside_buckets=_largest_first(outside),
        metrics=metrics_of(books, [node.facts for node in nodes]),
        blinds=(*_not_compared(across), *_blinds(nodes, books), *across.blinds),
        notes=(*_notes(books), *across.notes),
    )


def _added(lines: Iterable[Iterable[tuple[str, int]]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for some in lines:
        for id_, ns in some:
            out[id_] = out.get(id_, 0) + ns
    return out


def _largest_first(amounts: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(((k, ns) for k, ns in amounts.items() if ns), key=lambda p: (-p[1], p[0])))


def _findings(books: Sequence[RankBooks], in_step_ns: int) -> list[Finding]:
    by_id: dict[str, list[tuple[RankBooks, Bucket]]] = {}
    for one in books:
        for bucket in one.buckets:
            by_id.setdefault(bucket.id, []).append((one, bucket))
    found = [_finding(id_, lines, books, in_step_ns) for id_, lines in by_id.items()]
    large = [one for one in found if one.lost_ns > 0 and one.share_ratio >= FINDING_AT_LEAST_RATIO]
    return sorted(large, key=lambda one: (-one.lost_ns, one.cause.id))


def _finding(
    id_: str, lines: list[tuple[RankBooks, Bucket]], books: Sequence[RankBooks], in_step_ns: int
) -> Finding:
    lost_ns = sum(bucket.lost_ns for _, bucket in lines)
    grades: dict[str, int] = _added(bucket.by_grade.items() for _, bucket in lines)
    sure = sum(bucket.confidence_ratio * bucket.lost_ns for _, bucket in lines)
    bounded = sum(bucket.lost_ns for _, bucket in lines if bucket.upper_bound)
    upper_bound = 2 * bounded > lost_ns
    peers = any(one.has_peers for one, _ in lines)
    leaves = sorted({leaf for _, bucket in lines for leaf in bucket.leaves})
    told = [one.partial for one, _ in lines]
    whole = merge(*(Partial(evidence=one.evidence, weights=one.weights) for one in told))
    return Finding(
        cause=CAUSES[id_],
        lost_ns=lost_ns,
        share_ratio=lost_ns / in_step_ns if in_step_ns else 0.0,
        recoverable_ns=recoverable_ns(lost_ns, upper_bound, peers),
        confidence_ratio=sure / lost_ns if lost_ns else 0.0,
        grade=main_grade(grades),
        upper_bound=upper_bound,
        outside_steps=False,
        culprits=_culprits(id_, leaves, books),
        evidence=_evidence(whole, leaves),
    )


def _culprits(id_: str, leaves: Sequence[str], books: Sequence[RankBooks]) -> tuple[Culprit, ...]:
    """Whose cause it was, largest first: a rank's own loss, and that of those who waited for it.

    What a rank lost waiting for others is not its own doing. A transfer is nobody's.
    """
    found = []
    for one in books:
        own_ns = dict(one.ledger.buckets).get(id_, 0)
        others_ns = sum(one.caused.get(leaf, 0) - one.felt.get(leaf, 0) for leaf in leaves)
        if own_ns + others_ns > 0:
            found.append((own_ns + others_ns, one))
    found.sort(key=lambda pair: (-pair[0], _identity(pair[1].ledger)))
    return tuple(_culprit(one, tuple(leaves)) for _, one in found)


def _identity(ledger: RankLedger) -> tuple[str, int, int]:
    return ledger.node, -1 if ledger.rank is None else ledger.rank, ledger.pid


def _culprit(books: RankBooks, leaves: tuple[str, ...]) -> Culprit:
    ledger = books.ledger
    units = {
        resource: amount
        for (cause, resource), amount in books.partial.resources.items()
        if cause in leaves
    }
    resource = max(sorted(units), key=lambda name: units[name], default="")
    return Culprit(ledger.node, ledger.rank, ledger.device, resource)


def _evidence(whole: Partial, leaves: list[str]) -> tuple[Evidence, ...]:
    found = [item for leaf in leaves for item in evidence_of(whole, leaf)]
    return tuple(found[:_MOST_EVIDENCE])


def _outside_findings(books: Sequence[RankBooks], window_ns: int) -> list[Finding]:
    """Start-up is the one cause known outside the steps."""
    lines = [(one, dict(one.ledger.outside_buckets).get(STARTUP, 0)) for one in books]
    lines = sorted(
        (line for line in lines if line[1]), key=lambda p: (-p[1], _identity(p[0].ledger))
    )
    startup_ns = sum(ns for _, ns in lines)
    if not startup_ns:
        return []
    marked = all(one.marked for one, _ in lines)
    finding = Finding(
        cause=CAUSES[STARTUP],
        lost_ns=startup_ns,
        share_ratio=startup_ns / window_ns if window_ns else 0.0,
        recoverable_ns=None,
        confidence_ratio=_STARTUP_CONFIDENCE if marked else _STARTUP_CONFIDENCE_UNMARKED,
        grade="A" if marked else "C",
        upper_bound=False,
        outside_steps=True,
        culprits=tuple(_culprit(one, ()) for one, _ in lines),
        evidence=(
            Evidence(
                "startup.longest_ns",
                float(lines[0][1]),
                "ns",
                "from the process's first record to its first step, in the slowest rank",
            ),
        ),
    )
    return [finding]


def _blinds(nodes: Sequence[NodeResult], books: Sequence[RankBooks]) -> tuple[Blind, ...]:
    """What was not seen: lost records, sources that failed, causes that could not be asked."""
    found: dict[tuple[str, str], Blind] = {}
    for node in nodes:
        for blind in _lost_records(node):
            found[(blind.what, blind.message)] = blind
        for gap in node.loaded.gaps:
            what = gap.signal or gap.collector
            found.setdefault((what, gap.message), Blind(what, gap.kind, gap.message, gap.remedy))
    blinds = sorted(found.values(), key=lambda b: (b.kind != "lost", b.what, b.message))
    return (*blinds, *_abstained(books))


def _not_compared(across: Across) -> tuple[Blind, ...]:
    if not across.not_compared:
        return ()
    message = f"operations could not be laid side by side: {across.not_compared}"
    remedy = (
        "set TMPDIR to a folder with room for a quarter of the recordings' size, and analyse again"
    )
    return (Blind("waits between ranks", "failed", message, remedy),)


def _lost_records(node: NodeResult) -> list[Blind]:
    """What was recorded and cannot be read, and what was produced and not recorded."""
    damage, name = node.loaded.damage, node.facts.name
    what = f"recording of {name}"
    out = []
    if damage.damaged_places:
        message = f"{damage.damaged_bytes:,} bytes in {damage.damaged_places} places are damaged"
        out.append(Blind(what, "lost", message, "check the file system it was kept on"))
    if damage.torn_tail_bytes:
        message = f"the last {damage.torn_tail_bytes:,} bytes are of a frame that was cut off"
        out.append(Blind(what, "lost", message, ""))
    if damage.unknown_frames:
        message = f"{damage.unknown_frames:,} frames are not understood"
        out.append(Blind(what, "lost", message, "analyse with a newer clusterprof"))
    if node.loaded.dropped_spans:
        message = f"{node.loaded.dropped_spans:,} spans were dropped before they could be stored"
        out.append(Blind("spans", "lost", message, "give the recorder more CPU time"))
    return out


def _abstained(books: Sequence[RankBooks]) -> list[Blind]:
    """Causes that no rank's recording could speak about."""
    whole = merge(*(one.partial for one in books))
    out = []
    unmarked = [one for one in books if not one.marked]
    if unmarked:
        message = f"{len(unmarked)} of {len(books)} training processes carried no probe"
        remedy = "record with --inject auto; `clusterprof doctor` says whether it can be loaded"
        out.append(Blind("causes below family level", "absent", message, remedy))
    for detector in DETECTORS:
        id_ = detector.cause.id
        needs = sorted(need for cause, need in whole.missing if cause == id_)
        if id_ not in whole.asked and needs:
            lacking = ", ".join(need for need in needs if need) or "a measure of it"
            message = f"cannot tell {id_}: the recording has no {lacking}"
            out.append(Blind(id_, "absent", message, f"clusterprof explain {id_}"))
    return out


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
