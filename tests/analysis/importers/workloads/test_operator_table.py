"""Operator tables: steps placed one after the other, exchanges, teams; broken and missing files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from clusterprof.analysis.importers.core.base import CannotImportError
from clusterprof.analysis.importers.core.node_tables import compute_group_number
from clusterprof.analysis.importers.workloads.operator_table import OperatorTable
from clusterprof.probe import layout
from tests.support.importing_traces import MS, SEEDS, imported, ranks_of, readings_of, spans_of

TIMELINE = SEEDS / "operator-table" / "timeline.json"
FORWARD, BACKWARD = compute_group_number("0:0,1"), compute_group_number("1:0,1")
CLIP = compute_group_number("optimizer-clip-main-grad:0,1")
TO_0, TO_1 = (peer + 1 << layout.PEER_SHIFT for peer in (0, 1))
ISSUED, WAITED = (form << layout.FORM_SHIFT for form in (layout.ISSUE, layout.WAIT))


def test_both_stages_of_a_pipeline() -> None:
    (node,), (account,) = imported([TIMELINE])
    assert ranks_of(node) == [(1, 0, 2, "gpu0"), (2, 1, 2, "gpu1")]
    first, last = (spans_of(node, pid) for pid in (1, 2))
    # Steps 7 and 9 are 750 ms long; in the file they begin at 0 and at 1000.
    assert first["step"] == last["step"] == [(0, 750, 7, 2, -1, -1), (750, 1500, 9, 2, -1, -1)]
    assert [span[:2] for span in first["forward"]] == [(0, 100), (750, 850)]
    assert [span[:2] for span in last["backward"]] == [(300, 499), (1050, 1249)]
    assert first["collective"][:3] == [
        (100, 101, FORWARD, 0, -1, layout.SEND | TO_1),
        # A timeline shows the transfer; the first stage came when its send was over.
        (101, 500, BACKWARD, 0, -1, layout.RECV | TO_1),
        (700, 710, CLIP, 0, -1, layout.ALL_REDUCE),
    ]
    assert last["collective"][:3] == [
        (100, 101, FORWARD, 0, -1, layout.RECV | TO_0),  # nothing before it in this step
        (499, 500, BACKWARD, 0, -1, layout.SEND | TO_0),
        (500, 710, CLIP, 0, -1, layout.ALL_REDUCE),
    ]
    assert [span[:4] for span in first["collective"][3:]] == [
        (850, 851, FORWARD, 1),
        (851, 1250, BACKWARD, 1),
        (1450, 1460, CLIP, 1),
    ]
    busy = readings_of(node, "gpu.busy_ns_total", "gpu0")
    assert (busy[710], busy[850]) == (300 * MS, 440 * MS)
    assert account.read == {"operations": 26, "ranks": 2, "steps": 2}
    assert account.notes == [
        "each step is timed from its own beginning: steps are placed one after the other"
    ]


def test_what_is_sent_together_with_a_receive_is_issued_and_waited_for(tmp_path: Path) -> None:
    events = json.loads(TIMELINE.read_text())
    sends = [event for event in events if event["name"] == "forward-send"]
    for send in sends:  # begins with the receive, at 499
        send["ts"] += 399_000
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(events))
    (node,), _ = imported([path])
    assert spans_of(node, 1)["collective"][:3] == [
        (100, 100, FORWARD, 0, -1, layout.SEND | ISSUED | TO_1),
        (100, 500, BACKWARD, 0, -1, layout.RECV | TO_1),
        (500, 500, FORWARD, 0, -1, layout.SEND | WAITED | TO_1),
    ]


def test_broken_timelines_are_read_to_the_last_whole_event(tmp_path: Path) -> None:
    text = TIMELINE.read_text()
    path = tmp_path / "timeline.json"
    path.write_text(text[: text.rindex('{"name":"backward-compute"') + 30])
    _, (account,) = imported([path])
    assert account.cut == "broken, or cut off; what came before was read"
    events = json.loads(text)
    work = [event for event in events if event["name"] == "forward-compute"]
    for item, (key, value) in zip(work, (("ts", -1), ("dur", 1e300), ("ts", "x"), ("tid", 99))):
        item[key] = value
    path.write_text(json.dumps(events)[:-1] + ', 7, {"ph": "X"}]')
    _, (account,) = imported([path])
    assert account.skipped == {
        "operations with an invalid time": 1,
        "operations without a time, a step or a rank": 2,
        "operations of a thread without a stage": 1,
        "entries that are not JSON objects": 1,
        "events without a process": 1,
    }


def test_of_two_tables_of_one_job_what_is_ideal_is_left_out(tmp_path: Path) -> None:
    for name in ("ideal-timeline.json", "timeline.json"):
        (tmp_path / name).write_bytes(TIMELINE.read_bytes())
    (_,), (ideal, measured) = imported(sorted(tmp_path.iterdir()))
    assert (ideal.read["operations"], measured.read["operations"]) == (0, 26)
    assert "not used: another table of the same job was read" in ideal.notes


def test_parquet_is_recognized_by_its_columns_and_needs_pyarrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.parquet"
    path.write_bytes(b"PAR1 dp_rank stage step optype start_ts duration seq_id PAR1")
    assert OperatorTable().recognizes(path.read_bytes(), path)
    path.write_bytes(b"PAR1 rank step start end PAR1")
    assert not OperatorTable().recognizes(path.read_bytes(), path)
    path.write_bytes(b"PAR1 dp_rank stage step optype start_ts duration seq_id PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CannotImportError, match="needs the package pyarrow") as caught:
        imported([path])
    assert "pip install pyarrow" in caught.value.remedy
