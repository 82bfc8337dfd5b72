"""The Perfetto export in Perfetto's own trace processor, asked in SQL, against numbers by hand.

Any build of it will do: `CLUSTERPROF_TRACE_PROCESSOR=/path/to/trace_processor_shell`, or one on the
PATH. Called as `trace_processor_shell -q QUERY TRACE`, which prints CSV.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from clusterprof.output.exporters.base import Output
from clusterprof.output.exporters.perfetto.trace import Perfetto
from tests.support.small_run import MS, make_report, make_run, make_time_ns, write_recordings

pytestmark = pytest.mark.long

NAMED = os.environ.get("CLUSTERPROF_TRACE_PROCESSOR", "")
SHELL = NAMED or shutil.which("trace_processor_shell") or shutil.which("trace_processor") or ""
RECORDING = Path(__file__).parents[3] / "recordings" / "dlrm-8rank"
A, B = "rank 0 · node-a", "rank 1 · node-b"

TRACK = """
    select t.id as track, p.name as process,
           coalesce(h.name, pt.name, ct.name) as line
    from track t
    left join process_track pt using (id) left join process_counter_track ct using (id)
    left join thread_track tt using (id) left join thread h on tt.utid = h.utid
    join process p on p.upid = coalesce(pt.upid, ct.upid, h.upid)
"""


def ask(trace: Path, query: str) -> list[tuple[str, ...]]:
    if not SHELL:
        pytest.skip("no trace_processor_shell on the PATH, nor in CLUSTERPROF_TRACE_PROCESSOR")
    sql = trace.with_suffix(".sql")
    sql.write_text(query, encoding="utf-8")
    done = subprocess.run(
        [SHELL, "-q", str(sql), str(trace)], capture_output=True, text=True, timeout=120, check=True
    )
    rows = [tuple(row) for row in csv.reader(io.StringIO(done.stdout)) if row]
    return rows[1:]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "run.pftrace"
    result = make_run(write_recordings(tmp_path / "run"), make_report())
    Perfetto().export(result, Output(path, io.BytesIO()))
    return path


def test_the_trace_processor_reports_no_errors_or_data_loss(trace: Path) -> None:
    query = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    assert ask(trace, query) == []


def test_slices_are_on_their_tracks_at_their_times(trace: Path) -> None:
    query = f"""
        with lines as ({TRACK})
        select process, line, s.name, s.ts, s.dur from slice s join lines on s.track_id = track
        where process like 'rank%' and s.dur > 0
    """
    assert Counter(ask(trace, query)) == Counter(
        (process, line, name, str(make_time_ns(start)), str(round((end - start) * 1000) * MS))
        for process, line, name, start, end in [
            (A, "main thread", "data_wait", 1, 1.4),
            (A, "main thread", "forward", 1.4, 1.6),
            (A, "main thread (2)", "tokenise", 1.5, 1.8),
            (A, "steps", "step 0", 1, 2),
            (A, "worker 0", "fetch", 1, 1.3),
            (A, "not measured", "gpu.busy_ns_total", 1.1, 1.3),
            (A, "lost time", "storage-local", 1, 1.2),
            (A, "lost time", "storage-local", 1.5, 1.6),
            (A, "lost time", "unattributed", 1.6, 1.65),
            (A, "waits for ranks", "waits for rank 1: storage-local", 1.2, 1.7),
            (B, "main thread", "checkpoint", 1, 2),
            (B, "steps", "step 0", 1, 2.1),
            (B, "lost time", "storage-local", 1, 1.2),
            (B, "lost time", "storage-local", 1.5, 1.6),
            (B, "lost time", "unattributed", 1.6, 1.65),
            (B, "waits for ranks", "waits for an unknown rank", 1.9, 1.95),
            (B, "late for others", "late: storage-local", 1.2, 1.7),
        ]
    )


def test_the_arrow_goes_from_the_victim_to_the_culprit(trace: Path) -> None:
    query = f"""
        with lines as ({TRACK})
        select a.process, s.name, b.process, e.name, e.ts
        from flow f join slice s on f.slice_out = s.id join slice e on f.slice_in = e.id
        join lines a on a.track = s.track_id join lines b on b.track = e.track_id
    """
    assert ask(trace, query) == [
        (A, "waits for rank 1: storage-local", B, "arrives last", str(make_time_ns(1.7)))
    ]


def test_counters_have_their_values_and_units(trace: Path) -> None:
    query = f"""
        with lines as ({TRACK})
        select process, line, ct.unit, c.ts, cast(c.value as int) as value
        from counter c join lines on c.track_id = track
        join counter_track ct on ct.id = c.track_id order by c.ts, line
    """
    assert ask(trace, query) == [
        (A, "GPU busy · GPU-a", "%", str(make_time_ns(1)), "50"),
        (A, "GPU power · GPU-a", "W", str(make_time_ns(1)), "300"),
        ("host node-a", "disk read · sdb", "B/s", str(make_time_ns(1)), "10000"),
        (A, "GPU power · GPU-a", "W", str(make_time_ns(1.2)), "400"),
        (A, "GPU power · GPU-a", "W", str(make_time_ns(1.3)), "90"),
    ]


def test_sql_sums_of_a_real_trace_match_its_report(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    ours = [sys.executable, "-m", "clusterprof"]
    subprocess.run([*ours, "export", RECORDING, "--to", "perfetto", "-o", path], check=True)
    result = subprocess.run(
        [*ours, "analyze", RECORDING, "--format", "json"], check=True, capture_output=True
    )
    ranks = json.loads(result.stdout)["ranks"]
    query = f"""
        with lines as ({TRACK})
        select substr(process, 1, instr(process, ' ·') - 1), line, count(*), sum(s.dur)
        from slice s join lines on s.track_id = track
        where line in ('steps', 'lost time') group by 1, 2
    """
    by_key = {(who, line): (int(n), int(ns)) for who, line, n, ns in ask(path, query)}
    for rank in ranks:
        who = f"rank {rank['rank']}"
        assert by_key[who, "steps"][0] == rank["steps"]
        # The trace lays lost time over the run in equal stretches; the sum is the ledger's.
        assert by_key[who, "lost time"][1] == rank["lost_ns"]
