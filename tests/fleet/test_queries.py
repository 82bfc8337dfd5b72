"""Tables over all jobs keep the sums; lemons are named only beyond chance."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.errors import UsageError
from clusterprof.fleet.database import Ledger, Price, RecordedInput, open_ledger
from clusterprof.fleet.job_entry import JobEntry, PlaceTime
from clusterprof.fleet.queries import Choice, FleetSummary, parse_date, summarize_ledger
from tests.support.fleet_jobs import MONDAY_NS, WEEK_NS, S, find_node, make_entry

NODES = [f"n{number:02d}" for number in range(20)]


@contextmanager
def ledger_of(folder: Path, *entries: JobEntry, price: Price | None = None) -> Iterator[Ledger]:
    with open_ledger(folder / "fleet.db") as ledger:
        ledger.connection.execute("PRAGMA synchronous = OFF")
        for entry in entries:
            ledger.put(entry, RecordedInput(entry.title, "1", 1), price)
        yield ledger


def summarize(folder: Path, *entries: JobEntry, **options: object) -> FleetSummary:
    with ledger_of(folder, *entries) as ledger:
        return summarize_ledger(ledger, **options)  # type: ignore[arg-type]


def test_every_table_has_the_same_total(tmp_path: Path) -> None:
    entries = [
        make_entry(1, ["a", "b"], ["b"]),
        make_entry(2, ["b", "c", "d"], user="ben", started_ns=MONDAY_NS + WEEK_NS),
        make_entry(3, ["a"], account="", user="", started_ns=None),
    ]
    summary = summarize(tmp_path, *entries)
    # 2, 3 and 1 nodes that lose 30 s each, and one culprit 40 s more
    lost_ns = (6 * 30 + 40) * S
    assert summary.sums.lost_ns == lost_ns and summary.sums.jobs == 3
    assert summary.sums.window_ns == 12 * 100 * S and summary.sums.outside_ns == 12 * 10 * S
    for parts in (summary.causes, summary.nodes, summary.switches):
        assert sum(part.lost_ns for part in parts) == lost_ns
    for groups in (summary.owners, summary.weeks):
        assert sum(group.sums.lost_ns for group in groups) == lost_ns
        assert sum(group.sums.window_ns for group in groups) == summary.sums.window_ns
    assert sum(ns for week in summary.weeks for _, ns in week.causes) == lost_ns
    assert [week.week for week in summary.weeks] == ["2026-W02", "2026-W03", ""]
    assert [(owner.account, owner.user) for owner in summary.owners] == [
        ("vision", "ada"),  # 100 s
        ("vision", "ben"),  # 90 s
        ("", ""),
    ]
    assert summary.unattributed_ns == 12 * 5 * S


def test_mounts_are_summed_over_jobs(tmp_path: Path) -> None:
    """Of /data the cause of the larger part counts: 40 s against 20."""
    disk = (PlaceTime("a: vda", "storage-local", 1, 7 * S),)
    other = (PlaceTime("/data", "storage-metadata", 1, 20 * S),)
    entries = [
        make_entry(1, ["a", "b"]),
        make_entry(2, ["a"], places=disk),
        make_entry(3, ["a"], places=other),
    ]
    summary = summarize(tmp_path, *entries)
    assert [(p.name, p.cause, p.jobs, p.nodes, p.caused_ns) for p in summary.places] == [
        ("/data", "storage-remote", 2, 2, 60 * S),
        ("a: vda", "storage-local", 1, 1, 7 * S),
    ]


def test_sums_beyond_63_bits_are_exact(tmp_path: Path) -> None:
    """Three jobs of almost 2.5 million GPU-hours each, which SQLite alone cannot add."""
    huge = (1 << 63) - 1
    entries = [
        replace(
            make_entry(number, ["a"]),
            **dict.fromkeys(("window_ns", "outside_ns"), huge),
            node_times=tuple(
                replace(node, window_ns=huge) for node in make_entry(number, ["a"]).node_times
            ),
        )
        for number in range(3)
    ]
    summary = summarize(tmp_path, *entries)
    assert summary.sums.window_ns == 3 * huge == summary.nodes[0].window_ns
    assert summary.weeks[0].sums.outside_ns == 3 * huge


def test_cost_uses_the_price_of_each_job(tmp_path: Path) -> None:
    """A job on one node loses 30 s: 30 / 3600 h times 120 an hour is 1."""
    with ledger_of(tmp_path, make_entry(1, ["a"]), price=Price(120, "EUR")) as ledger:
        ledger.put(make_entry(2, ["a"]), RecordedInput("2", "1", 1), Price(240, "EUR"))
        summary = summarize_ledger(ledger)
        assert summary.sums.lost_cost == pytest.approx(3) and summary.currency == "EUR"
        ledger.put(make_entry(3, ["a"], user="ben"), RecordedInput("3", "1", 1))
        summary = summarize_ledger(ledger)
        assert summary.sums.lost_cost is None and summary.no_price == 1  # not: 3
        assert [owner.sums.lost_cost for owner in summary.owners] == [pytest.approx(3), None]
        ledger.set_missing_prices(Price(120, "USD"))
        assert summarize_ledger(ledger).sums.lost_cost is None  # dollars and euros do not add up


def test_filters_select_jobs_and_keep_the_sums(tmp_path: Path) -> None:
    entries = [
        make_entry(1, ["a", "b"], ["b"]),
        make_entry(2, ["b", "c"], user="ben", started_ns=MONDAY_NS + WEEK_NS),
        make_entry(3, ["d"], account="bio", started_ns=None),
    ]
    with ledger_of(tmp_path, *entries) as ledger:
        for choice, jobs, nodes in (
            (Choice(), 3, "abcd"),
            (Choice(since_ns=MONDAY_NS + WEEK_NS), 1, "bc"),
            (Choice(until_ns=MONDAY_NS + WEEK_NS), 1, "ab"),
            (Choice(user="ben"), 1, "bc"),
            (Choice(account="vision"), 2, "abc"),
            (Choice(account="vision", user="ada"), 1, "ab"),
            (Choice(user="nobody"), 0, ""),
        ):
            summary = summarize_ledger(ledger, choice)
            assert summary.sums.jobs == jobs, choice
            assert sorted(node.node for node in summary.nodes) == list(nodes), choice
            lost_ns = sum(cause.lost_ns for cause in summary.causes)
            assert lost_ns == summary.sums.lost_ns == sum(n.lost_ns for n in summary.nodes)


def test_a_lemon_has_the_p_value_of_its_jobs(tmp_path: Path) -> None:
    """In 8 jobs the third of 4 nodes is the culprit: chance 1/4 each, so p = 4^-8 = 1.5e-5.

    12 nodes are seen: 3 others 4 times in turn. Corrected: 10 nodes times p.
    """
    others = [["a", "b", "d"], ["e", "f", "h"], ["i", "j", "l"]]
    entries = [
        make_entry(number, [*team[:2], "lemon", team[2]], ["lemon"])
        for number, team in enumerate(others * 3)
    ][:8]
    summary = summarize(tmp_path, *entries)
    lemon = find_node(summary, "lemon")
    assert (lemon.tested, lemon.culprit, lemon.expected) == (8, 8, pytest.approx(2))
    assert lemon.p == pytest.approx(4**-8)
    assert len(summary.nodes) == 10 and lemon.adjusted_p == pytest.approx(10 * 4**-8)
    assert [facts.node for facts in summary.lemons] == ["lemon"] and lemon.is_lemon
    (facts,) = summary.lemons
    assert facts.causes == (("sync-slow-compute", 8 * 40 * S), ("storage-remote", 8 * 20 * S))
    assert facts.devices == (("GPU-1", 8 * 40 * S), ("GPU-0", 8 * 20 * S))


def test_a_node_is_not_a_lemon_after_a_few_jobs(tmp_path: Path) -> None:
    """Two of two jobs: p = 1/16, times 4 nodes."""
    entries = [make_entry(number, ["a", "b", "c", "d"], ["b"]) for number in range(2)]
    summary = summarize(tmp_path, *entries)
    assert find_node(summary, "b").adjusted_p == pytest.approx(4 / 16)
    assert summary.lemons == ()


def draw_jobs(seed: int, jobs: int, draw_culprit: object) -> list[JobEntry]:
    chance = random.Random(seed)
    entries = []
    for number in range(jobs):
        members = sorted(chance.sample(NODES, chance.choice([2, 3, 4, 8])))
        culprit = draw_culprit(chance, members)  # type: ignore[operator]
        entries.append(make_entry(number, members, [culprit] if culprit else []))
    return entries


def test_random_culprits_are_not_reported_as_lemons(tmp_path: Path) -> None:
    """20 fleets whose nodes are culprits equally often: at 1 % there may be one false lemon."""

    def draw(chance: random.Random, members: list[str]) -> str | None:
        return chance.choice(members) if chance.random() < 0.5 else None

    false = 0
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        false += len(summarize(folder, *draw_jobs(seed, 100, draw)).lemons)
    assert false <= 1


def test_a_node_always_holding_rank_0_is_not_a_lemon(tmp_path: Path) -> None:
    """Names are sorted, so n00 always comes first; rank 0 saves, and is slow in most jobs."""

    def draw(chance: random.Random, members: list[str]) -> str | None:
        return members[0] if chance.random() < 0.8 else None

    summary = summarize(tmp_path, *draw_jobs(1, 200, draw))
    first = find_node(summary, "n00")
    assert first.culprit > 0.9 * first.tested > 20
    assert summary.lemons == ()


def test_lemons_are_found_among_many_jobs(tmp_path: Path) -> None:
    def draw(chance: random.Random, members: list[str]) -> str | None:
        if "n07" in members and chance.random() < 0.7:
            return "n07"
        return chance.choice(members) if chance.random() < 0.1 else None

    summary = summarize(tmp_path, *draw_jobs(2, 300, draw))
    assert [lemon.node for lemon in summary.lemons] == ["n07"]


def test_jobs_without_steps_are_listed_first(tmp_path: Path) -> None:
    empty = replace(
        make_entry(2, ["a"], user="ben"),
        **dict.fromkeys(("in_step_ns", "productive_ns", "lost_ns", "steps"), 0),
        outside_ns=200 * S,
        causes=(),
        node_times=(),
    )
    summary = summarize(tmp_path, make_entry(1, ["a"]), empty, top=1)
    assert (summary.no_steps, summary.no_steps_ns) == (1, 200 * S)
    assert [(job.user, job.steps, job.outside_ns) for job in summary.idle_jobs] == [
        ("ben", 0, 200 * S)
    ]


def test_an_empty_ledger_has_empty_tables(tmp_path: Path) -> None:
    summary = summarize(tmp_path)
    assert summary.sums.jobs == 0 and summary.sums.lost_cost is None
    assert summary.first_ns is None and summary.nodes == () and summary.weeks == ()


def test_dates_are_parsed_and_invalid_dates_refused() -> None:
    assert parse_date("2026-01-05", "--since") == MONDAY_NS
    assert parse_date("2026-01-05T01:00+01:00", "--since") == MONDAY_NS
    for text in ("", "yesterday", "2026-13-01", "99999-01-01"):
        with pytest.raises(UsageError, match="--since"):
            parse_date(text, "--since")
