"""The report's answer set beside the injected truth, rank by rank, in points of step time."""

from __future__ import annotations

from clusterprof.demo.run import DemoResult, RankTruth
from clusterprof.findings import RankLedger
from clusterprof.units import human

WORTH_A_LINE_RATIO = 0.005  # smaller shares of step time in both columns are left out


def beside_truth(result: DemoResult) -> str:
    """Return a table: cause, what the report says, what was injected, difference in points."""
    lines = [
        f"The truth about this run ({result.scenario.name}: {result.scenario.what})",
        "from the job's own stopwatches and the device's own log, not from the recording:",
        "",
        f"  {'rank':<5}{'cause':<20}{'report':>18}{'truth':>18}{'error':>14}",
    ]
    ledgers = {ledger.rank: ledger for ledger in result.report.ranks}
    for truth in result.truth:
        ledger = ledgers.get(truth.rank)
        if ledger is None:
            lines.append(f"  {truth.rank:<5}not in the report")
        else:
            lines.extend(_rank_lines(ledger, truth))
    return "\n".join(lines) + "\n"


def _rank_lines(ledger: RankLedger, truth: RankTruth) -> list[str]:
    said = {cause: ns for cause, ns in ledger.buckets if cause != "unattributed"}
    true = {cause: ns for cause, ns in truth.causes.items() if cause != "other"}
    lines = []
    for cause in sorted(set(said) | set(true), key=lambda c: -max(said.get(c, 0), true.get(c, 0))):
        pair = (said.get(cause, 0), true.get(cause, 0))
        if max(pair) >= WORTH_A_LINE_RATIO * truth.in_step_ns:
            lines.append(_line(truth.rank, cause, pair, ledger.in_step_ns, truth.in_step_ns))
    totals = (ledger.lost_ns, truth.idle_ns)
    lines.append(_line(truth.rank, "all lost time", totals, ledger.in_step_ns, truth.in_step_ns))
    return lines


def _line(rank: int, cause: str, pair: tuple[int, int], said_of_ns: int, true_of_ns: int) -> str:
    said = pair[0] / said_of_ns if said_of_ns > 0 else 0.0
    true = pair[1] / true_of_ns if true_of_ns > 0 else 0.0
    error = f"{100 * (said - true):+.1f} points"
    return f"  {rank:<5}{cause:<20}{_cell(pair[0], said):>18}{_cell(pair[1], true):>18}{error:>14}"


def _cell(ns: int, ratio: float) -> str:
    return f"{human(ns, 'ns')} {human(ratio, 'ratio'):>7}"
