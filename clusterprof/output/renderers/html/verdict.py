"""The top of the page: the first screen of a terminal, with tiles and the bar of all causes.

The recommendations for a finding, or a note that none fits.

Every finding in full: amount, culprits, time, evidence, confidence, advice.
"""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.output.renderers.html.code import render_lines
from clusterprof.output.renderers.html.markup import (
    BAR_WIDTH,
    Markup,
    build_element,
    get_css_classes,
    join_markup,
    make_slug,
    render_bar,
    render_swatch,
)
from clusterprof.output.renderers.text import (
    advice,
    code,
    culprits,
    first_screen,
    summary,
    trend,
    wording,
)
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.output.renderers.text.tables import format_cell
from clusterprof.report.aggregate import MAX_LISTED_CULPRITS
from clusterprof.report.model import EFFORTS, UNATTRIBUTED, Advice, Culprit, Finding, Report
from clusterprof.units import format_quantity

_FIELDS = (
    ("because", "Because"),
    ("gain", "What it saves"),
    ("verify", "How to see that it worked"),
    ("worse", "What it may make worse"),
)


def list_advice(finding: Finding) -> tuple[Advice, ...]:
    """List the advice for a finding, or where to read more if none fits."""
    if finding.advice:
        return finding.advice
    command = f"clusterprof explain {escape_text(finding.cause.id, 60)}"
    return (Advice("No recommendation fits the measurements.", "", command, "", "", ""),)


def render_advice(finding: Finding) -> Markup:
    """Render all advice for a finding as a list, best first."""
    return build_element(
        "ol",
        *(
            build_element("li", *_render_advice_item(suggestion))
            for suggestion in list_advice(finding)
        ),
        class_="advice",
    )


def _render_advice_item(suggestion: Advice) -> list[Markup | None]:
    parts: list[Markup | None] = [build_element("p", suggestion.what, class_="do")]
    parts += render_change(suggestion)
    rows = []
    asks = EFFORTS.get(suggestion.effort, "")
    if asks:
        rows.append(build_element("div", build_element("dt", "Effort"), build_element("dd", asks)))
    for field, label in _FIELDS:
        text = getattr(suggestion, field)
        if text:
            rows.append(build_element("div", build_element("dt", label), build_element("dd", text)))
    return [*parts, build_element("dl", *rows, class_="facts")] if rows else parts


def render_change(suggestion: Advice) -> list[Markup | None]:
    """Render the change as a sentence, and below it the commands to paste."""
    if not suggestion.commands:
        if advice.is_sentence(suggestion.change):
            sentence = advice.escape_change(advice.capitalize_change(suggestion))
            return [build_element("p", sentence)]
        return [render_code_block(suggestion.change)]
    parts = [
        build_element("code", text) if is_command else text
        for is_command, text in advice.split_change(suggestion)
    ]
    alone = list(suggestion.commands) == [suggestion.change]
    return [
        None if alone else build_element("p", *parts),
        render_code_block("\n".join(suggestion.commands)),
    ]


def render_code_block(command: str) -> Markup | None:
    """Render a command or an edit as a block that can be copied, line by line as given."""
    if not command:
        return None
    # `escape_text` would escape line breaks, so each line is passed to it separately
    lines = [escape_text(line, 400) for line in command.splitlines()[:40]]
    code: list[Markup | str] = []
    for index, line in enumerate(lines):
        code += [Markup("\n"), line] if index else [line]
    return build_element("pre", build_element("code", *code), class_="copy")


_KEY_LABELS = ("Lost", "Main cause", "Try next")
_MAX_BAR_CAUSES = 12  # causes named below the bar


def render_verdict(report: Report, price: float | None, currency: str) -> Markup:
    """Render the verdict: the first screen of a terminal, with tiles and the bar of all causes."""
    paragraphs = [
        build_element("p", line, class_="warning") for line in wording.list_warnings(report)
    ]
    lines = [wording.describe_main_cause(report), wording.describe_time_outside_steps(report)]
    if report.impact is None:
        lines.append(wording.describe_cost(report, price, currency))
    paragraphs += [build_element("p", line) for line in lines if line]
    return build_element(
        "section",
        render_masthead(report),
        *(
            build_element("p", answer, class_="answer")
            for answer in summary.select_answers(report, len(report.answers))
        ),
        build_element("h1", wording.describe_verdict(report)),
        *paragraphs,
        _render_tiles(report),
        _render_loss_bar(report),
        _render_rows(report, price, currency),
        id="verdict",
        class_="card",
    )


def get_bound_prefix(report: Report) -> str:
    if wording.is_lower_bound(report):
        return "≥ "
    return "≤ " if wording.is_upper_bound(report) else ""


def _render_tiles(report: Report) -> Markup | None:
    if not report.in_step_ns:
        return None
    tiles = [
        _render_tile(
            get_bound_prefix(report) + wording.format_share(report.lost_ns, report.in_step_ns),
            "of device time in steps lost"
            if wording.is_device_measured(report)
            else "of step time lost",
        ),
        _render_tile(
            get_bound_prefix(report)
            + wording.name_time_unit(wording.format_gpu_time(report.lost_ns), report),
            "lost in total",
        ),
    ]
    job_impact = report.impact
    if job_impact is not None and job_impact.lost_cost is not None and not report.emulated:
        unit = job_impact.currency
        rate = job_impact.price_per_gpu_hour
        per = "" if rate is None else f" at {rate:,.2f} {unit} per GPU-hour"
        tiles.append(
            _render_tile(
                f"{get_bound_prefix(report)}{job_impact.lost_cost:,.2f} {unit}", f"lost{per}"
            )
        )
    largest = (
        None if job_impact is None else next((c for c in job_impact.causes if c.saved_ns), None)
    )
    if largest is not None and largest.saved_ns is not None:
        span = ""
        if largest.saved_low_ns is not None and largest.saved_high_ns is not None:
            span = (
                f" ({format_quantity(largest.saved_low_ns, 'ns')} to"
                f" {format_quantity(largest.saved_high_ns, 'ns')})"
            )
        ends = "less of this window" if report.is_window_only else "sooner finished"
        tiles.append(
            _render_tile(
                format_quantity(largest.saved_ns, "ns"), f"{ends} with {largest.cause} fixed{span}"
            )
        )
    tail = report.slow_step_summary
    if tail is not None and tail.p50_ns is not None and tail.p99_ns is not None:
        tiles.append(
            _render_tile(
                format_quantity(tail.p50_ns, "ns"),
                f"median step; 99 of 100 in {format_quantity(tail.p99_ns, 'ns')}",
            )
        )
    if job_impact is not None and job_impact.tokens_per_second is not None:
        fixed = job_impact.tokens_per_second_if_fixed
        fixed_text = "" if fixed is None else f"; {fixed:,.0f} if all were fixed"
        tiles.append(
            _render_tile(f"{job_impact.tokens_per_second:,.0f}", f"tokens per second{fixed_text}")
        )
    return build_element("div", *tiles, class_="tiles")


def _render_tile(number: str, about: str) -> Markup:
    return build_element(
        "div", build_element("strong", number), build_element("span", about), class_="tile"
    )


def _render_loss_bar(report: Report) -> Markup | None:
    """Render time in steps as one bar, productive time first, then each cause; with legend."""
    if not report.in_step_ns:
        return None
    sums = sorted(
        wording.sum_buckets(report).items(), key=lambda b: (b[0] == UNATTRIBUTED, -b[1], b[0])
    )
    parts = [(c, get_css_classes(c, report), ns) for c, ns in sums if ns]
    legend = [_render_legend_item("productive", "k-productive", report.productive_ns, report)]
    legend += [
        _render_legend_item(cause, color, ns, report)
        for cause, color, ns in parts[:_MAX_BAR_CAUSES]
    ]
    small_parts = parts[_MAX_BAR_CAUSES:]
    if small_parts:
        legend.append(build_element("li", f"{len(small_parts):,} smaller causes, in the ledger"))
    label = (
        f"{wording.format_share(report.lost_ns, report.in_step_ns)} of the time in steps was lost"
    )
    segments = [("k-productive", report.productive_ns), *((c, ns) for _, c, ns in parts)]
    return build_element(
        "figure",
        render_bar(segments, report.in_step_ns, label, BAR_WIDTH),
        build_element("figcaption", build_element("ul", *legend, class_="legend")),
        class_="whole",
    )


def _render_legend_item(name: str, color: str, ns: int, report: Report) -> Markup:
    part = wording.format_share(ns, report.in_step_ns)
    return build_element("li", render_swatch(color), f" {name} ", build_element("b", part))


def _render_rows(report: Report, price: float | None, currency: str) -> Markup | None:
    """Render the rows of the first screen, as in a terminal, and how the loss went over time."""
    finding = report.main_cause
    rows: list[tuple[str, list[Markup | None]]] = []
    for row in first_screen.build_first_screen(report, price, currency).rows:
        if row.change is not None:
            rows[-1][1].extend(render_change(row.change))
        elif row.label:
            is_cause = row.label == "Main cause" and finding is not None
            code_id = build_element("code", finding.cause.id) if finding and is_cause else None
            rows.append(
                (row.label, [build_element("p", row.text, " " if code_id else None, code_id)])
            )
        else:
            rows[-1][1].append(build_element("p", row.text))
    course = trend.detect_trend(report)
    if course is not None and finding is not None:
        rows.append(("Over time", [build_element("p", f"{trend.describe_trend(course)}.")]))
    elements = [
        build_element(
            "div",
            build_element("dt", label),
            build_element("dd", *texts, class_="key" if label in _KEY_LABELS else None),
        )
        for label, texts in rows
    ]
    answers = build_element("dl", *elements, class_="answers")
    return answers if finding is not None else join_markup(answers, _render_no_answer(report))


def _render_no_answer(report: Report) -> Markup | None:
    if not report.ranks:
        return build_element(
            "p", "See ", build_element("a", "what could not be seen", href="#unknown"), "."
        )
    if not report.in_step_ns:
        return None
    coverage_gaps = wording.count_coverage_gaps(report)
    unseen_ = f" and {coverage_gaps:,} not seen" if coverage_gaps else ""
    link = build_element("a", f"what is unattributed{unseen_}", href="#unknown")
    return build_element("p", "See ", link, ".")


def describe_certainty(finding: Finding) -> str:
    """Describe the confidence in a cause and the evidence it rests on."""
    return (
        f"{wording.format_confidence(finding)} sure:"
        f" {wording.describe_evidence_grade(finding.grade)}"
    )


def describe_finding_cost(finding: Finding, report: Report) -> str:
    """Describe what the lost time of a finding cost and how much sooner the job would end."""
    job_impact = report.impact
    impact = None
    if job_impact is not None:
        impact = next((w for w in job_impact.causes if w.cause == finding.cause.id), None)
    if job_impact is None or impact is None or finding.outside_steps:
        return ""
    parts = []
    if impact.lost_cost is not None and not report.emulated:
        bound = "at most " if finding.upper_bound else ""
        parts.append(f"{bound}{impact.lost_cost:,.2f} {job_impact.currency}")
    if impact.saved_ns is not None:
        ends = ""
        if impact.saved_low_ns is not None and impact.saved_high_ns is not None:
            ends = (
                f" ({format_quantity(impact.saved_low_ns, 'ns')} to"
                f" {format_quantity(impact.saved_high_ns, 'ns')}, 95 %)"
            )
        saved = format_quantity(impact.saved_ns, "ns")
        parts.append(
            f"the window would be {saved} shorter{ends}"
            if report.is_window_only
            else f"the job would end {saved} sooner{ends}"
        )
    elif impact.why_missing:
        noun = (
            "what fixing it saves" if report.is_window_only else "how much sooner the job would end"
        )
        parts.append(f"{noun} is not known: {impact.why_missing}")
    return "; ".join(parts)


def render_masthead(report: Report) -> Markup:
    """Render what was recorded, in two lines."""
    nodes = summary.describe_nodes(report)
    return build_element(
        "div",
        build_element("p", report.title, class_="title"),
        build_element(
            "p", summary.describe_scope(report) + (f" · {nodes}" if nodes else ""), class_="scope"
        ),
        class_="masthead",
    )


_OPEN_FINDINGS = 1  # findings whose details are open at first
_MAX_CULPRITS = 8
_MAX_CULPRIT_GROUPS = 3
_CARD_BAR_WIDTH = 240
_AMOUNT_COLUMNS = (("its own", "own_ns"), ("of others", "others_ns"), ("saves", "recoverable_ns"))


def render_causes(report: Report) -> Markup:
    """Render the section of all findings, largest first."""
    cards = []
    anchors: set[str] = set()
    names = code.build_file_names(report)
    for number, finding in enumerate(report.findings, 1):
        name = f"cause-{make_slug(finding.cause.id)}"
        name = f"{name}-{number}" if name in anchors else name
        anchors.add(name)
        cards.append(_render_finding_card(number, finding, report, name, names))
    small = [
        f"{cause} {format_quantity(ns, 'ns')}" for cause, ns in wording.list_small_causes(report)
    ]
    if small:
        cards.append(
            build_element("p", f"Too small for a finding: {', '.join(small)}.", class_="note")
        )
    if not report.findings:
        cards.append(build_element("p", "No cause took enough time for a finding.", class_="note"))
    return build_element(
        "section", build_element("h2", "Causes, the largest first"), *cards, id="causes"
    )


def _render_finding_card(
    number: int, finding: Finding, report: Report, name: str, names: code.FileNames
) -> Markup:
    color = get_css_classes(finding.cause.id, report)
    part = format_quantity(finding.share_ratio, "ratio")
    total_ns = report.window_ns if finding.outside_steps else report.in_step_ns
    head = build_element(
        "summary",
        build_element("span", str(number), class_="number"),
        render_swatch(color),
        build_element(
            "span",
            build_element("b", finding.cause.id),
            build_element("span", wording.format_title(finding)),
            class_="what",
        ),
        build_element(
            "span",
            build_element("b", part),
            build_element("span", wording.format_lost_time(finding)),
            class_="much",
        ),
        render_bar(
            [(color, finding.lost_ns)], total_ns or 1, f"{part} of the time", _CARD_BAR_WIDTH
        ),
        build_element(
            "span",
            f"{wording.format_confidence(finding)} sure",
            class_="sure",
            title=f"how certain the cause is: {describe_certainty(finding)}",
        ),
    )
    body = build_element(
        "div",
        build_element(
            "div", build_element("h3", "What to do"), render_advice(finding), class_="do-side"
        ),
        build_element("div", *_render_details(finding, report, names), class_="why-side"),
        class_="body",
    )
    return build_element(
        "details",
        head,
        body,
        id=name,
        class_="card finding",
        data_finding=str(number - 1),
        open=number <= _OPEN_FINDINGS,
    )


def _render_details(finding: Finding, report: Report, names: code.FileNames) -> list[Markup | None]:
    period = "recorded time, outside steps" if finding.outside_steps else "time in steps"
    facts = [
        (
            "Lost",
            f"{wording.format_lost_time(finding)},"
            f" {format_quantity(finding.share_ratio, 'ratio')} of the {period}",
        ),
        ("Fixing only this saves", wording.describe_savings(finding)),
        ("Impact", describe_finding_cost(finding, report)),
        ("Confidence", describe_certainty(finding)),
        (
            "Where",
            culprits.format_culprits(finding, _MAX_CULPRIT_GROUPS) or "not caused by a single rank",
        ),
        ("Peers", culprits.describe_peer_comparison(finding)),
        ("Since", culprits.describe_onset(finding)),
        ("Waits", culprits.describe_persistence(finding)),
    ]
    rows = [
        build_element("div", build_element("dt", name), build_element("dd", text))
        for name, text in facts
        if text
    ]
    return [
        build_element("dl", *rows, class_="facts"),
        _render_evidence(finding),
        render_lines(finding, names),
        _render_culprits(finding),
    ]


def _render_evidence(finding: Finding) -> Markup:
    if not finding.evidence:
        return build_element("p", "No single number was kept as evidence.", class_="note")
    rows = [
        build_element(
            "tr",
            build_element("th", item.name, scope="row"),
            build_element("td", wording.format_evidence_value(item), class_="n"),
            build_element("td", item.note),
        )
        for item in finding.evidence
    ]
    return build_element(
        "table",
        build_element("caption", "Evidence"),
        build_element("tbody", *rows),
        class_="evidence",
    )


def _render_culprits(finding: Finding) -> Markup | None:
    """Render what each of the main culprits caused; None if that is not known."""
    chiefs = culprits.select_main_culprits(finding)
    if not chiefs or chiefs[0].own_ns is None:
        return None
    shown = chiefs[:_MAX_CULPRITS]
    amounts = [
        (word, field) for word, field in _AMOUNT_COLUMNS if any(getattr(c, field) for c in shown)
    ]
    head = [build_element("th", word, scope="col") for word in ("node", "rank", "resource")]
    head += [build_element("th", word, scope="col", class_="n") for word, _ in amounts]
    rows = [_render_culprit_row(culprit, [field for _, field in amounts]) for culprit in shown]
    hidden_count = len(finding.culprits) - len(rows)
    options = "--json --full" if len(finding.culprits) > MAX_LISTED_CULPRITS else "--json"
    note = f"{hidden_count:,} more: see {options}"
    note_element = build_element("p", note, class_="note") if hidden_count else None
    table = build_element(
        "table", build_element("thead", build_element("tr", *head)), build_element("tbody", *rows)
    )
    about = "Culprits: what each lost itself, and what others lost waiting for it"
    return join_markup(
        build_element("p", about, class_="note"),
        build_element("div", table, class_="scroll"),
        note_element,
    )


def _render_culprit_row(culprit: Culprit, fields: Sequence[str]) -> Markup:
    cells = [
        build_element("th", culprit.node, scope="row", data_node=culprit.node),
        build_element("td", "" if culprit.rank is None else str(culprit.rank)),
        build_element("td", culprit.resource),
        *(
            build_element("td", "" if ns is None else format_cell(ns), class_="n")
            for ns in (getattr(culprit, field) for field in fields)
        ),
    ]
    return build_element("tr", *cells)
