"""The leaves of the taxonomy, each from a recording on disk to the line of a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.probe import layout
from clusterprof.report.model import Report
from tests.support.recordings import SECOND, Script, make_training
from tests.support.report_laws import analyze_script

# 50 steps of 0.24 s waiting (half blocked, half decoding) and 0.26 s computing, from 1 s on: of
# 25 s in steps 12 are lost, 6 of them blocked
JOB = [(0.24, 0.26)] * 50
DECODING = {"cpu-preprocess": 6.0}


def blocked_on(letter: str, read: int = 0, **signals: float) -> Script:
    """The job with another sleep of its worker; signals by name and growth per second."""
    script = make_training(JOB)
    script.worker = script.worker.replace("D", letter)
    script.worker_spans = [
        (*span[:6], read) if span[0] == layout.FETCH else span for span in script.worker_spans
    ]
    device = {"nfs": "/data", "lustre": "/data", "tcp": "eth0", "disk": "vda"}
    for name, rate in signals.items():
        kind, _, rest = name.partition("_")
        rest, _, operation = rest.partition("__")
        where = device.get(kind, "") + (f":{operation}" if operation else "")
        script.network[f"{kind}.{rest}", where] = rate
    return script


def seconds(report: Report) -> dict[str, float]:
    [ledger] = report.ranks
    return {id_: round(ns / SECOND, 1) for id_, ns in ledger.buckets if ns >= SECOND // 20}


S = 1e9
READS = {"nfs_operations_total__READ": 100, "nfs_read_bytes_total": 1 << 20}


@pytest.mark.parametrize(
    ("letter", "signals", "expected"),
    [
        # 0.9 s of each second of requests at the server; 0.8 s waiting for a slot; 0.6 s for names
        (
            "N",
            {**READS, "nfs_rtt_ns_total__READ": 0.9 * S, "nfs_execute_ns_total__READ": S},
            {"storage-remote": 6.0},
        ),
        (
            "N",
            {**READS, "nfs_rtt_ns_total__READ": 0.2 * S, "nfs_execute_ns_total__READ": S},
            {"storage-client-queue": 4.8, "storage-remote": 1.2},
        ),
        (
            "N",
            {
                **READS,
                "nfs_rtt_ns_total__READ": 0.4 * S,
                "nfs_execute_ns_total__READ": 0.4 * S,
                "nfs_operations_total__OPEN": 100,
                "nfs_rtt_ns_total__OPEN": 0.6 * S,
                "nfs_execute_ns_total__OPEN": 0.6 * S,
            },
            {"storage-metadata": 3.6, "storage-remote": 2.4},
        ),
        # of 2 s of RPCs to servers in each second, 1.2 s to those of metadata
        (
            "N",
            {
                "lustre_fetched_bytes_total": 1 << 20,
                "lustre_rpcs_total__read": 100,
                "lustre_rpc_ns_total__read": 0.8 * S,
                "lustre_rpcs_total__metadata": 900,
                "lustre_rpc_ns_total__metadata": 1.2 * S,
            },
            {"storage-metadata": 3.6, "storage-remote": 2.4},
        ),
        ("W", {"tcp_job_received_bytes_total": 1e6}, {"storage-object": 6.0}),
        ("I", {"tcp_job_received_bytes_total": 1e6}, {"storage-object": 6.0}),
        ("I", {"tcp_job_received_bytes_total": 1e3}, {"unattributed": 6.0}),
        # a MiB read by each of two fetches a second; three quarters of it were refaults
        (
            "D",
            {"disk_read_bytes_total": 2 << 20, "memory_refaults_total": 384},
            {"storage-local": 1.5, "storage-cold-cache": 4.5},
        ),
        # of 10 MB a second the two processes of the job read 2
        (
            "D",
            {"disk_read_bytes_total": 10e6, "disk_busy_ns_total": 0.9 * S},
            {"storage-local": 1.2, "storage-contention": 4.8},
        ),
    ],
)
def test_worker_blocked_time_goes_to_the_blocking_cause(
    letter, signals, expected, tmp_path: Path
) -> None:
    read = 1 << 20 if letter == "D" else 0
    report = analyze_script(blocked_on(letter, read, **signals), tmp_path)
    assert seconds(report) == pytest.approx({**DECODING, **expected}, abs=0.15)


def within_steps(main: str, *spans: tuple) -> Script:
    """60 steps of 0.5 s without waits, in each of which the device stands still for 0.2 s."""
    script = make_training([(0.0, 0.5)] * 60)
    script.main_spans = [span for span in script.main_spans if span[0] == layout.STEP]
    script.worker_spans, script.worker = [], ""
    script.busy = [(1 + 0.5 * i + 0.2, 1.5 + 0.5 * i) for i in range(60)]
    script.main = "U1 " + " ".join([main] * 60)
    script.written = 1 << 10
    for i in range(60):
        at = 1 + 0.5 * i
        script.main_spans += [
            (kind, at + start, at + end, *rest) for kind, start, end, *rest in spans
        ]
    return script


@pytest.mark.parametrize(
    ("main", "spans", "expected"),
    [
        ("U0.5", (), {"launch-bound": 11.8}),
        ("U0.5", ((layout.EVAL, 0.0, 0.2),), {"eval-host": 12.0}),
        ("F0.2 U0.3", (), {"eval-host": 12.0}),
        # it works for 0.2 s, and waits for the device for 0.3 s of each step
        ("U0.5", ((layout.SYNC, 0.2, 0.5, layout.WHOLE_NS, 1),), {"h2d-sync": 12.0}),
        # each step compiles; in the first ten that is part of starting up
        ("U0.5", ((layout.COMPILE, 0.0, 0.2),), {"launch-recompile": 10.0, "startup": 2.0}),
    ],
)
def test_main_thread_time_within_steps_goes_to_its_cause(
    main, spans, expected, tmp_path: Path
) -> None:
    report = analyze_script(within_steps(main, *spans), tmp_path)
    by_key = {id_: s for id_, s in seconds(report).items() if s >= 0.5}
    assert by_key == pytest.approx(expected, abs=0.5)
