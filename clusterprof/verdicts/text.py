"""A verdict as plain text, and in one line for a job's comment."""

from __future__ import annotations

from clusterprof.findings import Report
from clusterprof.gate import Verdict
from clusterprof.renderers.text_safety import columns, safe_text, wrap

ONE_LINE = 200
"""Characters at most: Slurm keeps comments of more, `squeue` shows hardly any."""
_WORDS = {"pass": "PASSED", "fail": "FAILED", "cannot tell": "CANNOT TELL"}
_MOST_NAMED = 2
_GOES_ON = " " * 8  # behind the outcome of a rule


def plain(verdict: Verdict, width: int = 0) -> str:
    """Return the lines of a verdict, the outcome first; longer ones than `width` go on indented.

    0 = every line as long as it is, so that a log can be searched for it.
    """
    lines = [safe_text(line, 1000) for line in verdict.lines]
    if width <= len(_GOES_ON):
        return "".join(f"{line}\n" for line in lines)
    return "".join(f"{part}\n" for line in lines for part in _broken(line, width))


def _broken(line: str, width: int) -> list[str]:
    if columns(line) <= width:
        return [line]
    start = line[: len(line) - len(line.lstrip())]
    first, *rest = wrap(line, width - len(_GOES_ON))
    return [start + first, *(_GOES_ON + part for part in rest)]


def one_line(verdict: Verdict, report: Report) -> str:
    """Return outcome, what failed, how busy devices were and what they waited for; only ASCII, at
    most `ONE_LINE` characters, without a line end."""
    total = len(verdict.results)
    text = f"clusterprof: {_WORDS[verdict.outcome]}, {total} {'rule' if total == 1 else 'rules'}"
    bad = [one for one in verdict.results if one.outcome == verdict.outcome != "pass"]
    if bad:
        named = ", ".join(one.metric for one in bad[:_MOST_NAMED])
        more = f" and {len(bad) - _MOST_NAMED} more" if len(bad) > _MOST_NAMED else ""
        text += f" ({named}{more})"
    busy = next((one.value for one in report.metrics if one.name == "gpu.busy_ratio"), None)
    if busy is not None:
        text += f"; busy {100 * busy:.0f}%"
    if report.in_step_ns:
        text += f"; lost {100 * report.lost_ns / report.in_step_ns:.0f}%"
        chief = next((one for one in report.findings if not one.outside_steps), None)
        if chief is not None:
            text += f", most {chief.cause.id} {100 * chief.share_ratio:.0f}%"
            if chief.culprits:
                first = chief.culprits[0]
                text += f" ({' '.join(word for word in (first.node, first.resource) if word)})"
    if verdict.emulated:
        text += "; EMULATED"
    safe = safe_text(text, 4 * ONE_LINE).encode("ascii", "replace").decode()
    # What shells and Slurm's own lists read in a comment is none of a name's business.
    safe = "".join("'" if letter in '"`\\' else letter for letter in safe).replace("$", "S")
    return safe if len(safe) <= ONE_LINE else safe[: ONE_LINE - 3] + "..."
