"""Sum the ledger of a cluster: by cause, node, switch, mount, owner and week; find lemon nodes.

All sums of time are exact integers. SQLite adds within 63 bits, 2.5 million GPU-hours, and refuses
sums beyond: seconds and the rest below a second are then summed apart, which takes longer.

A node is a *lemon* when it is a culprit (`fleet.job_entry`) in more jobs than chance explains. Only
jobs count in which some nodes are culprits and others are not. In each of them the chance of a node
is the part of the nodes that are culprits, so that a user whose jobs are always uneven makes no
lemon. The nodes with the first and the last rank, which often have more to do, have at least the
chance that such nodes have in all jobs: resource managers sort the nodes of a job, and so give
these ranks to the same nodes. The p-value is the binomial tail at the mean chance, an upper bound
(`compute_binomial_tail`), and is adjusted for the number of nodes (`adjust_p_values`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from clusterprof.errors import UsageError
from clusterprof.fleet.database import Ledger, convert_errors
from clusterprof.fleet.job_entry import FIRST, LAST
from clusterprof.report.model import UNATTRIBUTED
from clusterprof.units import SECOND_NS
from clusterprof.util.statistics import adjust_p_values, compute_binomial_tail

MAX_LEMON_P = 0.01
"""Largest p-value of a lemon, adjusted for the number of nodes."""
MIN_LEMON_JOBS = 3
"""Least jobs in which a lemon was a culprit."""
HOUR_NS = 3600 * SECOND_NS
UNKNOWN = ""
"""Name of what is not known: a user, an account, a week, a switch."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which jobs count; None = all of them."""

    since_ns: int | None = None
    """They started then or later, ns since 1970; jobs whose start is not known do not count."""
    until_ns: int | None = None
    """They started before."""
    user: str | None = None
    account: str | None = None


EVERY_JOB = Choice()


@dataclass(frozen=True, slots=True)
class Sums:
    """Device time of some jobs, ns."""

    jobs: int
    window_ns: int
    """Time for which they held devices."""
    outside_ns: int
    """Held before the first and after the last step."""
    in_step_ns: int
    lost_ns: int
    lost_cost: float | None
    """Cost of the lost time; None where a job has no price, or currencies differ."""


@dataclass(frozen=True, slots=True)
class OwnerSums:
    """Sums of the jobs of one account and user."""

    account: str
    user: str
    sums: Sums


@dataclass(frozen=True, slots=True)
class WeekSums:
    """Sums of the jobs that started in one week, and their lost time by cause."""

    week: str
    sums: Sums
    causes: tuple[tuple[str, int], ...]
    """(cause, lost ns), largest first."""


@dataclass(frozen=True, slots=True)
class CauseSums:
    """What all jobs lost to one cause, ns."""

    cause: str
    family: str
    title: str
    tone: int
    jobs: int
    lost_ns: int
    outside_ns: int


@dataclass(frozen=True, slots=True)
class NodeSums:
    """What one node did in all jobs, ns."""

    node: str
    switch: str
    jobs: int
    window_ns: int
    lost_ns: int
    caused_ns: int
    tested: int
    """Jobs in which some nodes were culprits and others not."""
    culprit: int
    """Those of them in which it was one."""
    expected: float
    """In how many it would be one by chance."""
    p: float
    """Probability of at least so many by chance."""
    adjusted_p: float
    """`p` adjusted for the number of nodes."""

    @property
    def is_lemon(self) -> bool:
        """Return whether chance does not explain how often it is a culprit."""
        return self.adjusted_p <= MAX_LEMON_P and self.culprit >= MIN_LEMON_JOBS


@dataclass(frozen=True, slots=True)
class LemonFacts:
    """What a lemon node was a culprit of."""

    node: str
    causes: tuple[tuple[str, int], ...]
    """(cause, ns caused), largest first."""
    devices: tuple[tuple[str, int], ...]
    """(device, ns caused), largest first; empty where none was named."""


@dataclass(frozen=True, slots=True)
class SwitchSums:
    """What the nodes of one leaf switch did, ns."""

    switch: str
    nodes: int
    window_ns: int
    lost_ns: int
    caused_ns: int


@dataclass(frozen=True, slots=True)
class PlaceSums:
    """What a mount, disk or NIC caused, ns; one path on several nodes is one mount."""

    name: str
    cause: str
    """Cause of most of it."""
    jobs: int
    nodes: int
    """Most nodes of one job on which it was to blame."""
    caused_ns: int


@dataclass(frozen=True, slots=True)
class IdleJob:
    """A job that held devices and used them little, ns."""

    title: str
    name: str
    user: str
    account: str
    week: str
    gpus: int
    steps: int
    window_ns: int
    outside_ns: int


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """All tables over the jobs of a ledger."""

    title: str
    sums: Sums
    currency: str
    """"" without a price."""
    first_ns: int | None
    """Start of the first job; None when it is not known."""
    last_ns: int | None
    gpus: int
    """Most devices of a job."""
    no_price: int
    """Jobs without a price."""
    upper_bound: int
    """Jobs whose loss is known only as "at most"."""
    emulated: int
    """Jobs with emulated devices."""
    too_little_seen: int
    """Jobs of which too little was seen to judge them."""
    no_steps: int
    """Jobs without time inside steps."""
    no_steps_ns: int
    """Time for which these held devices."""
    problems: tuple[tuple[str, str], ...]
    """(path, why it could not be read)."""
    causes: tuple[CauseSums, ...]
    """Largest loss first, like all tables."""
    nodes: tuple[NodeSums, ...]
    """By what they caused."""
    lemons: tuple[LemonFacts, ...]
    """The most certain first."""
    switches: tuple[SwitchSums, ...]
    places: tuple[PlaceSums, ...]
    owners: tuple[OwnerSums, ...]
    weeks: tuple[WeekSums, ...]
    """In order of time; unknown weeks last."""
    idle_jobs: tuple[IdleJob, ...]

    @property
    def unattributed_ns(self) -> int:
        """Return the lost time without a known cause."""
        return sum(cause.lost_ns for cause in self.causes if cause.cause == UNATTRIBUTED)


def summarize_ledger(ledger: Ledger, choice: Choice = EVERY_JOB, top: int = 20) -> FleetSummary:
    """Sum the chosen jobs of a ledger.

    top: idle jobs and lemons to describe. Raises: as `open_ledger`, when it cannot be read.
    """
    with convert_errors(ledger.path):
        # One transaction, so that all tables show the same jobs while others are added.
        ledger.connection.execute("BEGIN")
        try:
            try:
                return _summarize(ledger, _Query(ledger, choice, is_wide=False), top)
            except sqlite3.OperationalError as error:
                if "overflow" not in str(error):
                    raise
                return _summarize(ledger, _Query(ledger, choice, is_wide=True), top)
        finally:
            ledger.connection.execute("COMMIT")


def _summarize(ledger: Ledger, query: _Query, top: int) -> FleetSummary:
    facts = query.run(
        "SELECT min(started_ns), max(started_ns), max(gpus), sum(price_per_gpu_hour IS NULL),"
        " sum(is_upper_bound), sum(is_emulated), sum(too_little_seen != ''), sum(in_step_ns = 0),"
        f" count(DISTINCT currency), max(currency), {query.sum(_WITHOUT_STEPS)},"
        " avg(is_first_culprit), avg(is_last_culprit) FROM jobs"
    )[0]
    first, last, gpus, no_price, upper, emulated, little, no_steps, currencies = facts[:9]
    currency = facts[9] if currencies == 1 else ""
    owners = _sum_owners(query, bool(currency))
    causes, by_week = _sum_causes(query)
    nodes = _sum_nodes(query, facts[12] or 0.0, facts[13] or 0.0)
    problems = ledger.connection.execute(
        "SELECT path, problem FROM sources WHERE problem != '' ORDER BY path"
    ).fetchall()
    return FleetSummary(
        title=str(ledger.path),
        sums=_add_sums([owner.sums for owner in owners], bool(currency)),
        currency=currency,
        first_ns=first,
        last_ns=last,
        gpus=gpus or 0,
        no_price=no_price or 0,
        upper_bound=upper or 0,
        emulated=emulated or 0,
        too_little_seen=little or 0,
        no_steps=no_steps or 0,
        no_steps_ns=_join_sum(facts[10], facts[11]),
        problems=tuple(problems),
        causes=causes,
        nodes=nodes,
        lemons=_describe_lemons(query, nodes, top),
        switches=_sum_switches(nodes),
        places=_sum_places(query),
        owners=owners,
        weeks=_sum_weeks(query, by_week, bool(currency)),
        idle_jobs=_list_idle_jobs(query, top),
    )


class _Query:
    """Runs queries on the chosen jobs of a ledger."""

    def __init__(self, ledger: Ledger, choice: Choice, is_wide: bool) -> None:
        """is_wide: sums may exceed 63 bits."""
        self._is_wide = is_wide
        self._connection = ledger.connection
        conditions = [
            ("started_ns >= ?", choice.since_ns),
            ("started_ns < ?", choice.until_ns),
            ("user = ?", choice.user),
            ("account = ?", choice.account),
        ]
        self._values = [value for _, value in conditions if value is not None]
        self._where = " AND ".join(text for text, value in conditions if value is not None)

    def run(self, sql: str, end: str = "", job: str = "id") -> list[tuple[Any, ...]]:
        """Run a query with the condition on jobs between its two parts.

        job: expression with the number of the job.
        """
        where = ""
        if self._where:
            chosen = (
                self._where
                if job == "id"
                else f"{job} IN (SELECT id FROM jobs WHERE {self._where})"
            )
            where = f" {'AND' if ' WHERE ' in sql else 'WHERE'} {chosen}"
        return self._connection.execute(f"{sql}{where} {end}", self._values).fetchall()

    def sum(self, expression: str) -> str:
        """Return SQL for a sum in two columns, seconds and the rest in ns, for `_join_sum`."""
        if not self._is_wide:
            return f"0, sum({expression})"
        return f"sum(({expression}) / {SECOND_NS}), sum(({expression}) % {SECOND_NS})"

    def list_sums(self) -> str:
        """Return SQL for the columns of `_build_sums`."""
        names = ("window_ns", "outside_ns", "in_step_ns", "lost_ns")
        cost = f"total(lost_ns * price_per_gpu_hour / {HOUR_NS}.0)"
        return ", ".join(
            ("count(*)", *map(self.sum, names), cost, "sum(price_per_gpu_hour IS NULL)")
        )

    def list_names(self, table: str) -> dict[int, tuple[Any, ...]]:
        """List the name and the facts behind each number of a table of names."""
        rows = self._connection.execute(f"SELECT * FROM {table}")
        return {row[0]: row[1:] for row in rows}

    def run_on_nodes(self, sql: str, names: Sequence[str], end: str) -> list[tuple[Any, ...]]:
        """Run a query whose first part ends with a list of names."""
        marks = ", ".join("?" * len(names))
        chosen = f" AND job IN (SELECT id FROM jobs WHERE {self._where})" if self._where else ""
        return self._connection.execute(
            f"{sql} ({marks}){chosen} {end}", [*names, *self._values]
        ).fetchall()


def _join_sum(seconds: int | None, rest_ns: int | None) -> int:
    return (seconds or 0) * SECOND_NS + (rest_ns or 0)


_WITHOUT_STEPS = "CASE WHEN in_step_ns = 0 THEN window_ns ELSE 0 END"


def _build_sums(row: Sequence[Any], has_currency: bool) -> Sums:
    """Build sums from the columns of `_Query.list_sums`."""
    window, outside, in_step, lost = (
        _join_sum(row[column], row[column + 1]) for column in (1, 3, 5, 7)
    )
    cost = row[9] if has_currency and not row[10] else None
    return Sums(row[0], window, outside, in_step, lost, cost)


def _add_sums(parts: Sequence[Sums], has_currency: bool) -> Sums:
    costs = [part.lost_cost for part in parts if part.lost_cost is not None]
    return Sums(
        sum(part.jobs for part in parts),
        sum(part.window_ns for part in parts),
        sum(part.outside_ns for part in parts),
        sum(part.in_step_ns for part in parts),
        sum(part.lost_ns for part in parts),
        sum(costs) if has_currency and parts and len(costs) == len(parts) else None,
    )


def _sum_owners(query: _Query, has_currency: bool) -> tuple[OwnerSums, ...]:
    rows = query.run(
        f"SELECT account, user, {query.list_sums()} FROM jobs", "GROUP BY account, user"
    )
    owners = [OwnerSums(row[0], row[1], _build_sums(row[2:], has_currency)) for row in rows]
    return tuple(sorted(owners, key=lambda owner: (-owner.sums.lost_ns, owner.account, owner.user)))


_ByWeek = dict[str, list[tuple[str, int]]]


def _sum_causes(query: _Query) -> tuple[tuple[CauseSums, ...], _ByWeek]:
    """Sum lost time by cause, and by week and cause."""
    names = query.list_names("causes")
    times = f"{query.sum('lost_ns')}, {query.sum('outside_ns')}"
    rows = query.run(
        f"SELECT week, cause, count(*), {times} FROM job_causes", "GROUP BY week, cause", "job"
    )
    sums: dict[int, tuple[int, int, int]] = {}
    by_week: _ByWeek = {}
    for week, cause, jobs, *parts in rows:
        lost_ns, outside_ns = _join_sum(*parts[:2]), _join_sum(*parts[2:])
        before = sums.get(cause, (0, 0, 0))
        sums[cause] = (before[0] + jobs, before[1] + lost_ns, before[2] + outside_ns)
        if lost_ns:
            by_week.setdefault(week, []).append((names[cause][0], lost_ns))
    causes = [CauseSums(*(*names[cause], *numbers)) for cause, numbers in sums.items()]
    causes.sort(key=lambda cause: (-cause.lost_ns, -cause.outside_ns, cause.cause))
    return tuple(causes), by_week


def _sum_weeks(query: _Query, by_week: _ByWeek, has_currency: bool) -> tuple[WeekSums, ...]:
    rows = query.run(f"SELECT week, {query.list_sums()} FROM jobs", "GROUP BY week")
    weeks = [
        WeekSums(
            row[0],
            _build_sums(row[1:], has_currency),
            tuple(sorted(by_week.get(row[0], []), key=lambda part: (-part[1], part[0]))),
        )
        for row in rows
    ]
    return tuple(sorted(weeks, key=lambda week: (week.week == UNKNOWN, week.week)))


def _sum_nodes(query: _Query, first_ratio: float, last_ratio: float) -> tuple[NodeSums, ...]:
    """Sum by node, and test each.

    first_ratio, last_ratio: how often nodes with the first and the last rank are culprits, 0 to 1.
    """
    names = query.list_names("nodes")
    least = f"CASE position WHEN {FIRST} THEN {first_ratio!r} WHEN {LAST} THEN {last_ratio!r}"
    sums = ", ".join(map(query.sum, ("window_ns", "lost_ns", "caused_ns")))
    rows = query.run(
        f"SELECT node, count(*), {sums},"
        " sum(is_tested), sum(is_tested AND is_culprit),"
        f" total(is_tested * max(chance_ratio, {least} ELSE 0 END)) FROM job_nodes",
        "GROUP BY node",
        "job",
    )
    ps = [_compute_p(tested, culprit, expected) for *_, tested, culprit, expected in rows]
    nodes = []
    for row, p, adjusted in zip(rows, ps, adjust_p_values(ps)):
        times = [_join_sum(row[column], row[column + 1]) for column in (2, 4, 6)]
        nodes.append(NodeSums(*(*names[row[0]], row[1], *times, *row[8:11], p, adjusted)))
    return tuple(sorted(nodes, key=lambda node: (-node.caused_ns, node.node)))


def _compute_p(tested: int, culprit: int, expected: float) -> float:
    """Compute the probability of so many jobs as a culprit by chance, or an upper bound of it."""
    if not tested or culprit < expected + 1:
        return 1.0  # the bound does not hold there, and nothing is remarkable
    return compute_binomial_tail(tested, culprit, expected / tested)


def _describe_lemons(query: _Query, nodes: Sequence[NodeSums], top: int) -> tuple[LemonFacts, ...]:
    """Describe every lemon, the causes and devices of the most certain ones only."""
    lemons = sorted((node for node in nodes if node.is_lemon), key=lambda node: node.adjusted_p)
    names = [lemon.node for lemon in lemons]
    if not names:
        return ()
    rows = query.run_on_nodes(
        f"SELECT nodes.name, causes.name, device, {query.sum('caused_ns')} FROM culprits"
        " JOIN nodes ON nodes.id = culprits.node JOIN causes ON causes.id = culprits.cause"
        " WHERE nodes.name IN",
        names[:top],
        "GROUP BY nodes.name, causes.name, device",
    )
    causes: dict[str, dict[str, int]] = {name: {} for name in names}
    devices: dict[str, dict[str, int]] = {name: {} for name in names}
    for node, cause, device, *parts in rows:
        ns = _join_sum(*parts)
        causes[node][cause] = causes[node].get(cause, 0) + ns
        if device:
            devices[node][device] = devices[node].get(device, 0) + ns
    return tuple(
        LemonFacts(name, _sort_amounts(causes[name]), _sort_amounts(devices[name]))
        for name in names
    )


def _sort_amounts(amounts: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(amounts.items(), key=lambda part: (-part[1], part[0])))


def _sum_switches(nodes: Sequence[NodeSums]) -> tuple[SwitchSums, ...]:
    """Sum nodes by switch; empty when none is known."""
    if not any(node.switch for node in nodes):
        return ()
    by_switch: dict[str, list[NodeSums]] = {}
    for node in nodes:
        by_switch.setdefault(node.switch, []).append(node)
    sums = [
        SwitchSums(
            switch,
            len(members),
            sum(node.window_ns for node in members),
            sum(node.lost_ns for node in members),
            sum(node.caused_ns for node in members),
        )
        for switch, members in by_switch.items()
    ]
    return tuple(sorted(sums, key=lambda switch: (-switch.caused_ns, switch.switch)))


def _sum_places(query: _Query) -> tuple[PlaceSums, ...]:
    """Sum by mount, disk and NIC."""
    rows = query.run(
        f"SELECT place, cause, count(*), max(nodes), {query.sum('caused_ns')} FROM job_places",
        "GROUP BY place, cause",
        "job",
    )
    names, causes = query.list_names("places"), query.list_names("causes")
    parts: dict[int, list[tuple[int, str, int, int]]] = {}
    for place, cause, jobs, nodes, *times in rows:
        parts.setdefault(place, []).append((_join_sum(*times), causes[cause][0], jobs, nodes))
    places = [
        PlaceSums(
            names[place][0],
            max(of_place)[1],
            sum(jobs for _, _, jobs, _ in of_place),
            max(nodes for *_, nodes in of_place),
            sum(ns for ns, *_ in of_place),
        )
        for place, of_place in parts.items()
    ]
    return tuple(sorted(places, key=lambda place: (-place.caused_ns, place.name)))


def _list_idle_jobs(query: _Query, top: int) -> tuple[IdleJob, ...]:
    rows = query.run(
        "SELECT title, name, user, account, week, gpus, steps, window_ns, outside_ns FROM jobs",
        f"ORDER BY outside_ns DESC, id LIMIT {top:d}",
    )
    return tuple(IdleJob(*row) for row in rows if row[-1])


def parse_date(text: str, option: str) -> int:
    """Parse a date or a time (ISO 8601; UTC where it names no zone), ns since 1970.

    Raises: UsageError for anything else.
    """
    try:
        when = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        when = when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc)
        return round(when.timestamp()) * SECOND_NS
    except (ValueError, OverflowError):
        raise UsageError(
            f"{option} {text!r} is not a date", "write 2026-11-28 or 2026-11-28T12:00"
        ) from None
