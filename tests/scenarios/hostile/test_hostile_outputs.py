"""436 hostile strings as every name there is, through every output there is."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator

import pytest

from clusterprof.agent.doctor.sources import CoverageGap, SourceCheck
from clusterprof.cli import common
from clusterprof.cli.doctor import convert_source_checks, format_source_checks
from clusterprof.gate import Policy, Verdict, judge_runs, parse_rule
from clusterprof.output.renderers.base import RENDERERS
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.output.renderers.text.safety import count_columns, escape_text
from clusterprof.output.renderers.top_screen import View, describe_screen, draw_screen
from clusterprof.report.live import LiveView, NodeStatus, RankStatus
from clusterprof.report.model import Metric, Report
from tests.scenarios.hostile import checks
from tests.scenarios.hostile.strings import HOSTILE
from tests.scenarios.hostile.wide import AT_ONCE, batches, clean_like, reports, wide

S = 1_000_000_000


@pytest.fixture(scope="module")
def hostile() -> list[Report]:
    return list(reports())


def test_the_corpus_is_large_and_reaches_every_role() -> None:
    assert len(HOSTILE) >= 300
    assert {value for batch in batches() for value in batch} == set(HOSTILE)
    report = wide(batches()[0])
    first = batches()[0][7]
    assert report.nodes[7].name == report.ranks[7].device == report.metrics[7].name == first
    assert report.findings[1].culprits[3].resource == report.coverage_gaps[7].what == first


@pytest.mark.parametrize("kind", RENDERERS, ids=lambda kind: kind.name)
def test_every_renderer_escapes_hostile_strings(kind: type, hostile: list[Report]) -> None:
    renderers = [kind(width=72, color=True)] if kind is Terminal else [kind()]
    check = checks.BY_NAME.get(kind.name)
    for report, renderer in itertools.product(hostile, renderers):
        text = renderer.render(report)
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        checks.nothing_that_controls(text)
        if kind.name == "html":
            checks.html(text, renderer.render(clean_like(report)))
        elif check is not None:
            check(text)
        if kind is Terminal:
            bare = checks._OWN_SGR.sub("", text)
            assert max(map(count_columns, bare.splitlines())) <= 72


def verdicts() -> Iterator[tuple[Verdict, Report]]:
    """A gate whose rules are on metrics that are missing for hostile reasons."""
    for batch in batches():
        report = wide(batch)
        names = [f"metric{at}_ratio" for at in range(AT_ONCE)]
        metrics = tuple(Metric(n, None, "ratio", why) for n, why in zip(names, batch))
        report = Report(
            **{field: getattr(report, field) for field in report.__dataclass_fields__}
            | {"metrics": metrics}
        )
        yield judge_runs(report, [parse_rule(f"{name} >= 1%") for name in names], Policy()), report


def forms(verdict: Verdict, report: Report) -> dict[str, str]:
    """Return a verdict in every form the gate has."""
    try:
        from clusterprof.cli import gate
        from clusterprof.output.renderers.verdicts.ci import format_workflow_commands
    except ImportError:
        from clusterprof.cli import gate

        return {"plain": gate._plain(verdict), "json": gate._json(verdict)}
    made = {
        form: gate.render_verdict(form, verdict, report)
        for form in ("plain", "json", "junit", "markdown", "gitlab-metrics", "one-line")
    }
    return made | {"github": format_workflow_commands(verdict)}


def test_every_verdict_format_escapes_hostile_strings() -> None:
    for verdict, report in verdicts():
        for form, text in forms(verdict, report).items():
            if form == "github":
                lines = text.splitlines()
                assert len(lines) <= 11
                checks.nothing_that_controls(text, own_commands=len(lines))
                continue
            if form != "junit":
                checks.nothing_that_controls(text)
            if form in checks.BY_NAME:
                checks.BY_NAME[form](text)


def test_doctor_escapes_hostile_strings() -> None:
    for batch in batches():
        looks = [
            SourceCheck(
                f"collector{at}",
                ("available", "denied", "failed")[at % 3],
                value,
                value,
                value,
                "you",
                (value,),
                (CoverageGap((value, value), (value,), "denied", value, value, "you"),),
            )
            for at, value in enumerate(batch)
        ]
        text = format_source_checks(looks, 80)
        checks.nothing_that_controls(text)
        text = common.format_json({"collectors": convert_source_checks(looks)})
        checks.nothing_that_controls(text)
        checks.json_(text)


def lives() -> Iterator[LiveView]:
    for at, batch in enumerate(batches()):
        states = ("recording", "silent", "ended", "gone")
        nodes = tuple(
            NodeStatus(value, f"{value}{n}", states[(n + at) % 4], n * S, value, n)  # type: ignore[arg-type]
            for n, value in enumerate(batch)
        )
        ranks = {
            (value, 100 + n): RankStatus(f"{value}{n}", 0.5, None, S, S)
            for n, value in enumerate(batch)
        }
        yield LiveView(batch[at % AT_ONCE], 60 * S, S, nodes, wide(batch), ranks, batch[-1])


def test_top_escapes_hostile_strings() -> None:
    for live in lives():
        for view in (View(80, 60, "lost", "rank"), View(50, 24, "name", "node")):
            lines = draw_screen(live, view, True, "foot")
            checks.nothing_that_controls("\n".join(lines))
            assert max(count_columns(checks._OWN_SGR.sub("", line)) for line in lines) <= view.width
        checks.nothing_that_controls(describe_screen(live))


def test_error_messages_escape_hostile_strings() -> None:
    for item in HOSTILE:
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            common.print_error(item, item)
        checks.nothing_that_controls(errors.getvalue())
        assert errors.getvalue().count("\n") == 1 + bool(item)


def test_every_hostile_string_is_escaped_at_every_length() -> None:
    for item in HOSTILE:
        for limit in (1, 2, 20, 200, 4096):
            text = escape_text(item, limit)
            assert len(text) <= limit
            checks.nothing_that_controls(text)
            assert escape_text(text, limit) == text, "what is safe stays as it is"
