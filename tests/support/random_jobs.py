"""Random scripts of one rank, and the ledger that their analysis must give."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.node.analyze import analyze_node
from clusterprof.probe import layout
from tests.support.recordings import Script, make_training, write_recording

LIMITS = build_limits({})
SLOW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
# Mostly steps of less than a second, now and then one that spans several chunks.
SHORT = st.one_of(st.integers(0, 700), st.integers(0, 700), st.integers(2_000, 7_000)).map(
    lambda ms: ms / 1000
)


@st.composite
def draw_scripts(draw: st.DrawFn) -> Script:
    """Draw jobs with saves, collections and copies anywhere, devices that stop without a reason,
    gaps."""
    steps = draw(st.lists(st.tuples(SHORT, SHORT.map(lambda s: s + 0.05)), min_size=1, max_size=25))
    script = make_training(
        steps, begin=draw(st.sampled_from([0.3, 1.0, 2.25])), hidden=draw(st.booleans())
    )
    for kind in draw(st.lists(st.sampled_from([4, 5, 6, 12, 13]), max_size=6)):
        start = draw(st.floats(0.5, script.end - 0.6).map(lambda s: round(s, 3)))
        end = round(start + draw(st.floats(0.001, 0.5)), 4)
        script.main_spans.append((kind, start, end))
    if draw(st.booleans()):
        script.main_spans += [
            (layout.EXPOSED, start, end, 0, round(draw(st.floats(0, 1)) * (end - start) * 1e9))
            for kind, start, end, *_ in script.main_spans
            if kind == layout.DATA_WAIT and end > start
        ]
    device = draw(st.sampled_from(["as scripted", "holes", "none"]))
    if device == "none":
        script.busy = None
    elif device == "holes":
        script.unread = draw(st.lists(st.integers(0, int(script.end * 10)), max_size=40))
    return script


def analyze_script(script: Script, chunk_ns: int) -> list[RankResult]:
    with tempfile.TemporaryDirectory() as folder:
        node = write_recording(script, Path(folder) / "node-1")
        return list(analyze_node(node, LIMITS, chunk_ns).ranks)


def check_conservation(result: RankResult) -> None:
    ledger = result.ledger
    assert ledger.window_ns == ledger.unmeasured_ns + ledger.outside_ns + ledger.in_step_ns
    assert ledger.in_step_ns == ledger.productive_ns + ledger.lost_ns
    assert ledger.lost_ns == sum(ns for _, ns in ledger.buckets)
    assert ledger.outside_ns == sum(ns for _, ns in ledger.outside_buckets)
    amounts = [ledger.unmeasured_ns, ledger.outside_ns, ledger.productive_ns]
    assert min(amounts + [ns for _, ns in (*ledger.buckets, *ledger.outside_buckets)]) >= 0
