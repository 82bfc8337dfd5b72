"""Share the lost time of the job out among lines of code.

    finding: 9 s of cpu-preprocess, caused by rank 3   x   samples of rank 3 in cpu-preprocess
    augment 60 %, collate 40 %                         ->  augment 5.4 s, collate 3.6 s

The lines of a finding are those of its culprits: the ranks whose own time made the others wait.
A culprit that lost nothing itself, because it only worked longer, is compared with its peers:
its lines are those in which it spends more time per step. Transfers have no culprit: their lines
are where the ranks waited.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE, round_by_largest_remainder
from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.lines.lost_time_by_stack import PEERS, StackSums, list_stacks
from clusterprof.analysis.attribution.rank.claims import JITTER, PEERS_UNKNOWN
from clusterprof.analysis.cross_rank.wait_totals import CulpritTotals, choose_reported_ids
from clusterprof.analysis.findings.impact import collect_leaves
from clusterprof.analysis.timeline.code_locations import LocatedStack, is_library_file, locate_stack
from clusterprof.analysis.timeline.stacks import MAX_DEPTH, StackTree
from clusterprof.report.code import CodeLine, CodeLocation, CodeProfile, StackTime, WorkLine
from clusterprof.report.model import UNATTRIBUTED, Finding

MAX_LINES = 20
"""Most lines of a finding."""
MAX_WORK_LINES = 5
"""Most lines of work, and of time without a known cause."""
MAX_STACKS = 5000
"""Most stacks of a report; the smallest are merged into the functions that called them."""
MIN_SAMPLES = 8
"""Fewer samples of a culprit's own loss do not stand for what other ranks lost waiting for it."""
MAX_PEERS = 64
"""Most ranks with which a culprit is compared."""
_MIN_SIGMAS, _MAX_SIGMAS = 2.0, 3.0
_Z95 = 1.96
UNKNOWN_STACK = 0


@dataclass(frozen=True, slots=True)
class _Weight:
    """Time of one stack in one rank, with its number of samples and their sum of squares."""

    ns: float
    samples: int
    squares: float


Weights = dict[int, _Weight]
"""By stack number of the job."""


@dataclass
class JobStacks:
    """The stacks of all nodes under common numbers, as far as they are used."""

    locations: list[CodeLocation] = field(default_factory=list)
    chains: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    """By stack number: indices of its locations, outermost first. Stack 0 is not known."""
    _location_numbers: dict[CodeLocation, int] = field(default_factory=dict)
    _numbers: dict[tuple[int, ...], int] = field(default_factory=lambda: {(): UNKNOWN_STACK})
    _stack_numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    _located: dict[int, LocatedStack | None] = field(default_factory=dict)

    def find_number(self, table: StackTree, stack: int) -> int:
        """Return the number of a node's stack in the job."""
        number = self._stack_numbers.get((id(table), stack))
        if number is None:
            inside = 0 < stack < table.parent.size
            indices = table.list_locations(stack) if inside else []
            chain = tuple(self._number_location(table.locations[index]) for index in indices)
            number = self._stack_numbers[id(table), stack] = self.number_chain(chain)
        return number

    def number_chain(self, chain: tuple[int, ...]) -> int:
        """Return the number of the stack with these locations."""
        number = self._numbers.setdefault(chain, len(self.chains))
        if number == len(self.chains):
            self.chains.append(chain)
        return number

    def locate(self, stack: int) -> LocatedStack | None:
        """Locate a stack for its user; None if it is not known."""
        if stack not in self._located:
            locations = [self.locations[index] for index in self.chains[stack]]
            self._located[stack] = locate_stack(locations)
        return self._located[stack]

    def find_user_line(self, chain: tuple[int, ...]) -> int:
        """Return the index of the line that the user can change; -1 if it is not known."""
        located = self.locate(self.number_chain(chain))
        return -1 if located is None else self._number_location(located.user_line)

    def _number_location(self, code_location: CodeLocation) -> int:
        number = self._location_numbers.setdefault(code_location, len(self.locations))
        if number == len(self.locations):
            self.locations.append(code_location)
        return number


@dataclass
class _CauseCode:
    """Lost time of one cause by rank and stack: integer ns that add up to its share."""

    ns: dict[tuple[int, int], int] = field(default_factory=dict)
    """(rank, stack) -> ns."""
    weights: dict[int, list[_Weight]] = field(default_factory=dict)
    """By stack: the samples behind it, one item per rank, scaled to the lost time."""
    compared_ns: int = 0
    """Part that was shared out by comparing the culprit with its peers."""

    def add(self, rank: int, weights: Weights, total_ns: int, is_compared: bool) -> None:
        """Share the time of one rank out among its stacks."""
        sum_ns = sum(weight.ns for weight in weights.values())
        if sum_ns <= 0:
            weights, sum_ns = {UNKNOWN_STACK: _Weight(1.0, 0, 0.0)}, 1.0
        self.compared_ns += total_ns if is_compared else 0
        scale = total_ns / sum_ns
        for stack, ns in _allocate_exactly(weights, total_ns).items():
            self.ns[rank, stack] = self.ns.get((rank, stack), 0) + ns
            weight = weights[stack]
            scaled = _Weight(weight.ns * scale, weight.samples, weight.squares * scale * scale)
            self.weights.setdefault(stack, []).append(scaled)


def _allocate_exactly(weights: Weights, total_ns: int) -> dict[int, int]:
    """Divide time in proportion to weights: whole ns that add up to it."""
    units = total_ns * SHARE_SCALE
    stacks = sorted(weights, key=lambda stack: (weights[stack].ns, stack))
    sum_ns = math.fsum(weight.ns for weight in weights.values())
    parts = {("", str(s)): math.floor(weights[s].ns / sum_ns * units) for s in stacks}
    largest = ("", str(stacks[-1]))
    parts[largest] += units - sum(parts.values())
    rounded = round_by_largest_remainder(parts, total_ns)
    return {int(stack): ns for (_, stack), ns in rounded.items()}


def build_code(
    findings: Sequence[Finding],
    ranks: Sequence[RankResult],
    tables: Sequence[StackTree],
    totals: Sequence[CulpritTotals],
    without_culprit: Sequence[tuple[str, int]],
) -> tuple[tuple[Finding, ...], CodeProfile | None]:
    """Return the findings with their lines, and the stacks of the job; None without samples.

    tables: by rank, the stacks of its node. totals: by rank, the time that it caused to be lost.
    without_culprit: (cause id, ns) caused by no rank.
    """
    if not any(rank.code is not None for rank in ranks):
        return tuple(findings), None
    stacks = JobStacks()
    reader = _RankReader(ranks, tables, stacks)
    leaves = collect_leaves(ranks)
    by_cause: dict[str, _CauseCode] = {}
    for index, total in enumerate(totals):
        for id_, ns in total.total.items():
            if ns <= 0:
                continue
            weights = reader.read_cause(index, leaves.get(id_, (id_,)))
            is_mostly_waits = total.others_ns.get(id_, 0) > total.own_ns.get(id_, 0)
            is_compared = is_mostly_waits and _count_samples(weights) < MIN_SAMPLES
            if is_compared:
                weights = reader.compare_with_peers(index)
            code = by_cause.setdefault(id_, _CauseCode())
            unseen_ns = (
                0 if is_compared else _estimate_unseen_ns(weights, total.own_ns.get(id_, 0), ns)
            )
            code.add(index, weights, ns - unseen_ns, is_compared and bool(weights))
            if unseen_ns:
                code.add(index, {}, unseen_ns, False)
    names = choose_reported_ids(ranks)
    for id_, ns in without_culprit:
        for index, part_ns in _divide_among_victims(ranks, id_, names, ns).items():
            weights = reader.read_cause(index, (PEERS,))
            by_cause.setdefault(id_, _CauseCode()).add(index, weights, part_ns, False)
    with_lines = tuple(
        finding
        if finding.outside_steps or finding.cause.id not in by_cause
        else _with_lines(finding, by_cause[finding.cause.id], stacks)
        for finding in findings
    )
    samples = sum(rank.code.samples for rank in ranks if rank.code is not None)
    profile = _build_profile(by_cause, stacks, samples)
    unknown = by_cause.get(UNATTRIBUTED, _CauseCode())
    return with_lines, replace(
        profile,
        busiest_lines=_list_work_lines(ranks, reader, stacks),
        unattributed=tuple(_list_lines(unknown, stacks)[:MAX_WORK_LINES]),
    )


def _count_samples(weights: Weights) -> int:
    return sum(weight.samples for weight in weights.values())


def _estimate_unseen_ns(weights: Weights, own_ns: int, total_ns: int) -> int:
    """Estimate the part of a rank's time that no sampled stack represents, ns.

    The samples of a cause should add up to what the rank itself lost to it. What exceeds their sum
    by more than three standard errors was lost where nothing was sampled.
    """
    seen_ns = math.fsum(weight.ns for weight in weights.values())
    error_ns = math.sqrt(math.fsum(weight.squares for weight in weights.values()))
    if not weights or own_ns <= seen_ns + _MAX_SIGMAS * error_ns:
        return 0
    return int(total_ns * (1 - (seen_ns + _MAX_SIGMAS * error_ns) / own_ns))


class _RankReader:
    """Reads the sampled stacks of ranks under the numbers of the job."""

    def __init__(
        self, ranks: Sequence[RankResult], tables: Sequence[StackTree], stacks: JobStacks
    ) -> None:
        self._ranks, self._tables, self._stacks = ranks, tables, stacks
        self._per_step: dict[int, Weights] = {}

    def read_cause(self, rank: int, leaves: Iterable[str]) -> Weights:
        """Return the stacks in which a rank lost time to some causes; empty without samples."""
        code = self._ranks[rank].code
        weights: Weights = {}
        if code is None:
            return weights
        for leaf in leaves:
            if leaf in code.lost:
                self._merge(weights, rank, code.lost[leaf])
        return weights

    def read_work(self, rank: int) -> Weights:
        """Return the stacks in which a rank without a device worked; empty without samples."""
        code = self._ranks[rank].code
        weights: Weights = {}
        if code is not None:
            self._merge(weights, rank, code.worked)
        return weights

    def _merge(self, weights: Weights, rank: int, sums: StackSums) -> None:
        for stack, ns, samples, squares in list_stacks(sums):
            number = self._stacks.find_number(self._tables[rank], stack)
            before = weights.get(number, _Weight(0.0, 0, 0.0))
            weights[number] = _Weight(
                before.ns + ns, before.samples + samples, before.squares + squares
            )

    def compare_with_peers(self, rank: int) -> Weights:
        """Return the stacks in which a rank spends more time per step than its peers.

        Only lines whose difference exceeds twice its sampling error; empty if there are none.
        """
        own_weights = self._read_per_step(rank)
        peers = [
            self._read_per_step(index)
            for index, peer in enumerate(self._ranks)
            if index != rank and peer.code is not None and peer.job == self._ranks[rank].job
        ][:MAX_PEERS]
        if not own_weights or not peers:
            return {}
        own_lines = self._sum_by_line(own_weights)
        peer_lines = [self._sum_by_line(weights) for weights in peers]
        out: Weights = {}
        for line, (weight, members) in own_lines.items():
            peer_times_ns = sorted(
                lines[line][0].ns if line in lines else 0.0 for lines in peer_lines
            )
            usual_ns = peer_times_ns[len(peer_times_ns) // 2]
            excess_ns = weight.ns - usual_ns
            error_ns = math.sqrt(weight.squares * (1 + usual_ns / max(weight.ns, 1e-9)))
            if excess_ns <= _MIN_SIGMAS * error_ns:
                continue
            part = excess_ns / weight.ns
            for stack in members:
                w = own_weights[stack]
                out[stack] = _Weight(w.ns * part, w.samples, w.squares)
        return out

    def _read_per_step(self, rank: int) -> Weights:
        """Return the time per step of the training thread's stacks, ns."""
        if rank not in self._per_step:
            weights: Weights = {}
            result = self._ranks[rank]
            steps = max(result.ledger.steps, 1)
            if result.code is not None:
                self._merge(weights, rank, result.code.in_steps)
            self._per_step[rank] = {
                stack: _Weight(w.ns / steps, w.samples, w.squares / steps**2)
                for stack, w in weights.items()
            }
        return self._per_step[rank]

    def _sum_by_line(self, weights: Weights) -> dict[object, tuple[_Weight, list[int]]]:
        out: dict[object, tuple[_Weight, list[int]]] = {}
        for stack, weight in weights.items():
            located = self._stacks.locate(stack)
            key = None if located is None else located.user_line
            if key is None:
                continue
            before, members = out.get(key, (_Weight(0.0, 0, 0.0), []))
            total = _Weight(
                before.ns + weight.ns,
                before.samples + weight.samples,
                before.squares + weight.squares,
            )
            out[key] = total, [*members, stack]
        return out


def _divide_among_victims(
    ranks: Sequence[RankResult], id_: str, names: Mapping[str, str], total_ns: int
) -> dict[int, int]:
    """Divide time without a culprit among the ranks that waited: ns by index of the rank."""
    waited = {
        index: _Weight(float(ns), 0, 0.0)
        for index, rank in enumerate(ranks)
        if (ns := _sum_waited(rank, id_, names)) > 0
    }
    if total_ns <= 0:
        return {}
    if not waited:
        waited = {index: _Weight(1.0, 0, 0.0) for index in range(len(ranks))}
    return _allocate_exactly(waited, total_ns)


def _sum_waited(rank: RankResult, id_: str, names: Mapping[str, str]) -> int:
    """Sum the time a rank waited in operations for the causes reported under an id, ns."""
    waited_ns = sum(
        ns for leaf, ns in rank.victim_ns.items() if names.get(leaf, UNATTRIBUTED) == id_
    )
    if id_ == UNATTRIBUTED:
        waited_ns += sum(ns for reason, ns in rank.reasons if reason in (PEERS_UNKNOWN, JITTER))
    return waited_ns


def _with_lines(finding: Finding, code: _CauseCode, stacks: JobStacks) -> Finding:
    """Return a finding with the lines in which its time was lost."""
    is_compared = 2 * code.compared_ns > sum(code.ns.values())
    lines = tuple(_list_lines(code, stacks)[:MAX_LINES])
    return replace(finding, lines=lines, lines_compared=is_compared)


def _list_lines(code: _CauseCode, stacks: JobStacks) -> list[CodeLine]:
    """List the code lines that account for some time, with their shares, largest first."""
    total_ns = sum(code.ns.values())
    ns_by_line: dict[LocatedStack, int] = {}
    stacks_by_line: dict[LocatedStack, set[int]] = {}
    for (_, stack), ns in code.ns.items():
        located = stacks.locate(stack)
        if located is not None:
            key = replace(located, library=None)
            ns_by_line[key] = ns_by_line.get(key, 0) + ns
            stacks_by_line.setdefault(key, set()).add(stack)
    all_squares = sum(w.squares for weights in code.weights.values() for w in weights)
    lines = []
    for key, ns in sorted(ns_by_line.items(), key=lambda item: (-item[1], str(item[0]))):
        members = stacks_by_line[key]
        samples = sum(w.samples for stack in members for w in code.weights[stack])
        share = ns / total_ns if total_ns else 0.0
        error = _estimate_error(share, total_ns, all_squares)
        library, library_ratio = _choose_library(members, code, stacks)
        lines.append(
            CodeLine(
                key.user_line,
                library,
                ns,
                share,
                error,
                samples,
                key.stage,
                key.transform,
                library_ratio,
            )
        )
    return lines


def _choose_library(
    members: set[int], code: _CauseCode, stacks: JobStacks
) -> tuple[CodeLocation | None, float]:
    """Choose the library line that carries most of a user's line, and its part of that line."""
    sums: dict[CodeLocation | None, float] = {}
    for stack in sorted(members):
        located = stacks.locate(stack)
        library = located.library if located is not None else None
        ns = sum(weight.ns for weight in code.weights[stack])
        sums[library] = sums.get(library, 0.0) + ns
    library = max(sums, key=lambda location: (sums[location], str(location)))
    total_ns = sum(sums.values())
    return library, min(sums[library] / total_ns, 1.0) if total_ns > 0 else 1.0


def _estimate_error(share: float, total_ns: float, squares: float) -> float:
    """Estimate the half width of the 95 % interval of a share (Wilson), from weighted samples."""
    if total_ns <= 0 or squares <= 0:
        return 1.0
    n = total_ns**2 / squares
    z2 = _Z95**2
    spread = math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return min(_Z95 * spread / (1 + z2 / n), 1.0)


def _list_work_lines(
    ranks: Sequence[RankResult], reader: _RankReader, stacks: JobStacks
) -> tuple[WorkLine, ...]:
    """List the lines in which ranks without a measured device worked longest."""
    sums = _CauseCode()
    step_ns = worked_ns = 0
    for index, rank in enumerate(ranks):
        if weights := reader.read_work(index):
            step_ns += rank.ledger.in_step_ns
            worked_ns += rank.ledger.productive_ns
            sums.add(index, weights, rank.ledger.productive_ns, False)
    lines = [
        WorkLine(
            line.place,
            line.library,
            line.lost_ns,
            line.lost_ns / step_ns,
            line.error_ratio * worked_ns / step_ns,
            line.samples,
            line.library_ratio,
        )
        for line in _list_lines(sums, stacks)
        if line.lost_ns > 0
    ]
    return tuple(lines[:MAX_WORK_LINES])


def _build_profile(
    by_cause: Mapping[str, _CauseCode], stacks: JobStacks, samples: int
) -> CodeProfile:
    """Build the stacks of the report, at most MAX_STACKS."""
    rows: dict[tuple[str, int, tuple[int, ...]], tuple[int, int]] = {}
    for id_, code in by_cause.items():
        samples_of_stack = {stack: sum(w.samples for w in ws) for stack, ws in code.weights.items()}
        for (rank, stack), ns in code.ns.items():
            rows[id_, rank, stacks.chains[stack]] = ns, samples_of_stack.get(stack, 0)
    for _ in range(MAX_DEPTH if len(rows) > MAX_STACKS else 0):
        rows = _merge_smallest(rows)
        if len(rows) <= MAX_STACKS:
            break
    own_lines = {chain: stacks.find_user_line(chain) for _, _, chain in rows}
    used = sorted(
        {index for chain in own_lines for index in (*chain, own_lines[chain]) if index >= 0}
    )
    renumbered = {index: number for number, index in enumerate(used)}
    times = [
        StackTime(
            id_,
            rank,
            tuple(renumbered[index] for index in chain),
            ns,
            count,
            renumbered.get(own_lines[chain], -1),
        )
        for (id_, rank, chain), (ns, count) in rows.items()
        if ns > 0
    ]
    times.sort(key=lambda time: (-time.lost_ns, time.cause, time.rank, time.places))
    locations = tuple(stacks.locations[index] for index in used)
    return CodeProfile(
        locations,
        tuple(is_library_file(code_location.file) for code_location in locations),
        tuple(times),
        samples,
    )


def _merge_smallest(
    rows: Mapping[tuple[str, int, tuple[int, ...]], tuple[int, int]],
) -> dict[tuple[str, int, tuple[int, ...]], tuple[int, int]]:
    """Merge the smaller half of the stacks that are too many into their callers."""
    order = sorted(rows, key=lambda key: (-rows[key][0], key))
    kept_count = MAX_STACKS // 2
    out = {key: rows[key] for key in order[:kept_count]}
    for id_, rank, chain in order[kept_count:]:
        key = id_, rank, chain[:-1]
        ns, count = rows[id_, rank, chain]
        before = out.get(key, (0, 0))
        out[key] = before[0] + ns, before[1] + count
    return out
