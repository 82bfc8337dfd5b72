"""The interface for Python programs and notebooks.

    report = clusterprof.analyze("run/")
    report                              # in a notebook: the first screen
    report.to_pandas("ranks")           # or to_arrow, to_polars
    report.save("report.html")
    verdict = report.gate(["stall.storage_ratio <= 10%"])

Tables and their columns are listed in docs/python.md. pyarrow, pandas and polars are imported only
when a table is made for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterprof.analysis import pipeline
from clusterprof.analysis.node.selection import WHOLE_RUN, PartOfRun, ProgressCallback
from clusterprof.analysis.tasks.base import NO_CLUSTER, Cluster
from clusterprof.errors import UsageError
from clusterprof.gate import Policy, Verdict, judge_runs, parse_any_rule
from clusterprof.output.renderers.base import RENDERERS, load_renderer
from clusterprof.report.model import Finding, Report
from clusterprof.util.atomic_file import write_file

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

Columns = dict[str, list[Any]]
Rules = Sequence[str]
_FORMAT_BY_SUFFIX = {".txt": "plain", ".md": "markdown", ".html": "html", ".json": "json"}


class RunReport(Report):
    """The report of a run, with tables, files, a gate, and a view for notebooks."""

    __slots__ = ()

    @classmethod
    def from_report(cls, report: Report) -> RunReport:
        """Return the same report with these methods."""
        return cls(**{field.name: getattr(report, field.name) for field in fields(Report)})

    def list_columns(self, table: str = "findings") -> Columns:
        """Return the columns of a table as lists of equal length.

        table: findings, lines, evidence, ranks, ledger or metrics.
        Raises: UsageError for any other name.
        """
        if table not in _TABLES:
            raise UsageError(f"unknown table {table!r}", f"choose from {', '.join(_TABLES)}")
        names, rows = _TABLES[table]
        listed = rows(self)
        return {name: [row[column] for row in listed] for column, name in enumerate(names)}

    def to_arrow(self, table: str = "findings") -> pyarrow.Table:
        """Return a table as `pyarrow.Table` (see `list_columns`). Needs pyarrow."""
        import pyarrow

        return pyarrow.table(self.list_columns(table))

    def to_pandas(self, table: str = "findings") -> pandas.DataFrame:
        """Return a table as `pandas.DataFrame` (see `list_columns`). Needs pandas."""
        import pandas

        return pandas.DataFrame(self.list_columns(table))

    def to_polars(self, table: str = "findings") -> polars.DataFrame:
        """Return a table as `polars.DataFrame` (see `list_columns`). Needs polars."""
        import polars

        return polars.DataFrame(self.list_columns(table), strict=False)

    def render(self, form: str = "terminal") -> str:
        """Return the report as text: terminal, plain, brief, markdown, html, json or openmetrics.

        Raises: UsageError for any other form.
        """
        if form == "terminal":
            return self._render_screen()
        try:
            return load_renderer(form)().render(self)
        except KeyError:
            names = ", ".join(renderer.name for renderer in RENDERERS)
            raise UsageError(f"unknown form {form!r}", f"choose from {names}") from None

    def save(self, path: Path | str) -> Path:
        """Write the report into a file; its suffix names the form: .html, .md, .json or .txt.

        Raises: UsageError for another suffix; OutputFailed when it cannot be written.
        """
        file = Path(path)
        form = _FORMAT_BY_SUFFIX.get(file.suffix)
        if form is None:
            suffixes = ", ".join(_FORMAT_BY_SUFFIX)
            raise UsageError(f"{file}: unknown suffix {file.suffix!r}", f"choose from {suffixes}")
        write_file(file, self.render(form).encode("utf-8"))
        return file

    def gate(
        self, rules: Rules, *, baselines: Sequence[Report] = (), policy: Policy | None = None
    ) -> Verdict:
        """Judge the run by rules as `clusterprof gate --assert` does (docs/gate.md).

        Raises: UsageError for a rule that cannot be read, or no rule.
        """
        parsed = [parse_any_rule(rule) for rule in rules]
        return judge_runs(self, parsed, policy or Policy(), (), tuple(baselines))

    def _render_screen(self) -> str:
        from clusterprof.output.renderers.terminal import Terminal

        return Terminal(full=False).render(self)

    def __repr__(self) -> str:
        return self._render_screen()

    def _repr_html_(self) -> str:
        from clusterprof.output.renderers.html.fragment import render_fragment

        return render_fragment(self)


def analyze(
    paths: Path | str | Sequence[Path | str],
    *,
    jobs: int = 1,
    limits: Mapping[str, Mapping[str, Any]] | None = None,
    facts: Mapping[str, Any] | None = None,
    history: bool = True,
    on_progress: ProgressCallback | None = None,
    part: PartOfRun = WHOLE_RUN,
    leave_unknown: bool = False,
    cluster: Cluster = NO_CLUSTER,
    queued_at_ns: int | None = None,
) -> RunReport:
    """Analyze a recording, or traces of other tools, as `clusterprof analyze` does.

    paths: one recording, or several folders or files that belong to one run. jobs: number of
    processes that share the nodes. limits: limits of causes by cause id, as in a profile. facts:
    facts of the site, as in a profile. history: report also what happened when. on_progress: called
    with the progress. part: everything outside this part of the run counts as outside the steps.
    leave_unknown: leave files of no known format out, and name them in a note. cluster: the Dask
    cluster whose workers analyze the nodes (docs/scale.md). queued_at_ns: when the job was
    submitted, ns since 1970; None = as its recordings state.
    Raises: UsageError for no path at all, fewer than one process, or unknown limits; NoRecording
    when nothing can be read.
    """
    if not isinstance(jobs, int) or jobs < 1:
        raise UsageError(f"jobs={jobs!r}: at least one process is needed")
    if not isinstance(part, PartOfRun):
        raise UsageError(f"part={part!r} is no PartOfRun", "PartOfRun(first_step=20, end_step=500)")
    report = pipeline.analyze(
        paths,
        jobs=jobs,
        limits=limits or {},
        facts=facts or {},
        history=history,
        on_progress=on_progress,
        part=part,
        leave_unknown=leave_unknown,
        cluster=cluster,
        queued_at_ns=queued_at_ns,
    )
    return RunReport.from_report(report)


def gate(
    paths: Path | str | Sequence[Path | str],
    rules: Rules,
    *,
    baselines: Sequence[Report] = (),
    policy: Policy | None = None,
    jobs: int = 1,
) -> Verdict:
    """Analyze a run and judge it by rules; see `RunReport.gate`."""
    return analyze(paths, jobs=jobs).gate(rules, baselines=baselines, policy=policy)


def record(
    out: Path | str | None = None, *, hz: float | None = None, stacks: bool = True
) -> AbstractContextManager[Path | None]:
    """Record this process and those that it starts, for notebooks and scripts without a prefix.

        with clusterprof.record("run/"):
            train()
        report = clusterprof.analyze("run/")

    Gives the folder of the recording. A process can be recorded once. When it cannot be recorded,
    or `clusterprof record` records it already, there is a warning, and it runs without: None.
    out: default clusterprof-out/<job>. hz: samples per second. stacks: sample Python stacks.
    Raises: UsageError for a rate out of range.
    """
    from clusterprof.agent.launch.launcher import LaunchRequest
    from clusterprof.agent.launch.record_in_process import record_own_process
    from clusterprof.agent.options import Plan, with_hz

    plan = Plan() if hz is None else with_hz(Plan(), hz)
    request = LaunchRequest(
        (), None if out is None else Path(out), lambda: plan, stacks="full" if stacks else None
    )
    return record_own_process(request)


def _list_findings(report: Report) -> list[tuple[Any, ...]]:
    return [_describe_finding(finding) for finding in report.findings]


def _describe_finding(finding: Finding) -> tuple[Any, ...]:
    culprit = finding.culprits[0] if finding.culprits else None
    location = finding.lines[0].place if finding.lines else None
    return (
        *(finding.cause.id, finding.cause.family, finding.cause.title),
        *(finding.lost_ns, finding.share_ratio, finding.upper_bound, finding.outside_steps),
        *(finding.recoverable_ns, finding.confidence_ratio, finding.grade),
        *(
            (culprit.node, culprit.rank, culprit.device, culprit.resource)
            if culprit
            else (None,) * 4
        ),
        *((location.file, location.line, location.function) if location else (None,) * 3),
        finding.advice[0].what if finding.advice else None,
    )


def _list_lines(report: Report) -> list[tuple[Any, ...]]:
    return [
        (
            *(finding.cause.id, line.place.file, line.place.line, line.place.function),
            line.library.function if line.library else None,
            *(line.lost_ns, line.share_ratio, line.error_ratio, line.samples, line.stage or None),
        )
        for finding in report.findings
        for line in finding.lines
    ]


def _list_evidence(report: Report) -> list[tuple[Any, ...]]:
    return [
        (finding.cause.id, item.name, item.value, item.unit, item.note)
        for finding in report.findings
        for item in finding.evidence
    ]


def _list_ranks(report: Report) -> list[tuple[Any, ...]]:
    return [tuple(getattr(rank, name) for name in _RANK_COLUMNS) for rank in report.ranks]


def _list_ledger(report: Report) -> list[tuple[Any, ...]]:
    return [
        (rank.node, rank.rank, rank.pid, is_inside, name, ns)
        for rank in report.ranks
        for is_inside, buckets in ((True, rank.buckets), (False, rank.outside_buckets))
        for name, ns in buckets
    ]


def _list_metrics(report: Report) -> list[tuple[Any, ...]]:
    return [
        (item.name, item.value, item.unit, item.bound, item.why_missing or None)
        for item in report.metrics
    ]


_RANK_COLUMNS = (
    *("node", "rank", "pid", "device", "source", "steps", "coverage_ratio"),
    *("window_ns", "unmeasured_ns", "outside_ns", "in_step_ns", "productive_ns", "lost_ns"),
)
_TABLES = {
    "findings": (
        (
            *("cause", "family", "title", "lost_ns", "share_ratio", "upper_bound", "outside_steps"),
            *("recoverable_ns", "confidence_ratio", "grade", "node", "rank", "device", "resource"),
            *("file", "line", "function", "advice"),
        ),
        _list_findings,
    ),
    "lines": (
        (
            *("cause", "file", "line", "function", "library_function", "lost_ns", "share_ratio"),
            *("error_ratio", "samples", "loader_stage"),
        ),
        _list_lines,
    ),
    "evidence": (("cause", "name", "value", "unit", "note"), _list_evidence),
    "ranks": (_RANK_COLUMNS, _list_ranks),
    "ledger": (("node", "rank", "pid", "in_steps", "cause", "lost_ns"), _list_ledger),
    "metrics": (("name", "value", "unit", "bound", "why_missing"), _list_metrics),
}
"""Table name -> names of its columns, and the function that lists its rows."""
