"""What the kernel tells only afterwards: waits booked when they end, delays without a sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.timeline.data_wait.blocked import (
    NO_SAMPLES,
    ensure_min_io,
    estimate_blocked_shares,
    get_read_context,
)
from clusterprof.analysis.timeline.data_wait.split import split_data_wait
from clusterprof.probe.layout import DATA_WAIT, FETCH
from tests.support.builders import (
    make_counter,
    make_fetches,
    make_header,
    make_io_samples,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
)

WORKER = 201
MAIN = 100


def test_late_booked_run_delay_is_spread_over_its_wait() -> None:
    # Two fetches of 2.97 s wait 2.7 s each for a CPU. The kernel adds that to run_delay when the
    # waits end, at 2.96 and 5.93: the first in a sample interval that lies partly in the second.
    rows = parse_activity("U0.26 R2.7 U0.01 U0.26 R2.7 U0.01 U0.6")
    whole = make_thread(rows, 7)
    booked = 2_700_000_000 * ((whole.t_ns > ns(2.96)) + 1 * (whole.t_ns > ns(5.93)))
    span = make_fetches(rows, (0, 2.97, 0), (2.97, 5.94, 0), (5.94, 6.54, 0))
    worker = make_process(WORKER, MAIN, {FETCH: span}, replace(whole, run_delay_ns=booked))
    main = make_process(
        MAIN, spans={DATA_WAIT: make_spans((0, 2.97, 0, WORKER), (2.97, 5.94, 1, WORKER))}
    )
    got = split_data_wait(make_rank(7, main, [worker]), span.start_ns, span.end_ns)
    np.testing.assert_allclose(got.runnable[:2] * 2.97, [2.7, 2.7], rtol=0.02)


def test_delay_accounted_io_is_split_by_bytes() -> None:
    # No sample fell into a blocked moment; the kernel counted 60 % of the time as waits for pages,
    # of which the mount's own counters say that they read nine in ten.
    unseen = estimate_blocked_shares(
        NO_SAMPLES, get_read_context(make_rank(1, make_process(MAIN)).chunk), 0.0, 0.0
    )
    assert (unseen.block_io, unseen.remote_io, unseen.unknown) == (0.0, 0.0, 1.0)
    got = ensure_min_io(unseen, 0.6, 0.9)
    assert (got.block_io, got.remote_io, got.unknown) == pytest.approx((0.06, 0.54, 0.4))


MIB = 1 << 20
FUSE = ({"point": "/mnt/data", "type": "fuse.sshfs"},)


def split_page_waits(
    busy_s: float, disk_mib: int, job_mib: int, mounts: tuple = FUSE, chars_mib: int = 400
) -> dict[str, float]:
    """Split 20 s of which a worker waits 16 for pages, in fetches of 5 s, and computes 4.

    busy_s, disk_mib: what the disk worked and read in 1,000 requests; job_mib: the worker's part.
    """
    rows = parse_activity("D4 U1 " * 4)
    read = job_mib * MIB // 4
    span = make_fetches(rows, *((at, at + 5, read) for at in (0, 5, 10, 15)))
    series = {
        (f"disk.{name}", "vda"): make_counter([0, 20], [0, grown])
        for name, grown in (
            ("busy_ns_total", busy_s * 1e9),
            ("read_ns_total", busy_s * 1e9),
            ("read_bytes_total", disk_mib * MIB),
            ("reads_total", 1000),
        )
    }
    # The loop of the loader reads the rest of what it requests from the page cache or a mount.
    ios = make_io_samples((0, 20), read_bytes=(0, job_mib * MIB), read_chars=(0, chars_mib * MIB))
    worker = make_process(WORKER, MAIN, {FETCH: span}, make_thread(rows, 20), io=ios)
    waits = make_spans(*((at, at + 5, i, WORKER) for i, at in enumerate((0, 5, 10, 15))))
    main = make_process(
        MAIN, spans={DATA_WAIT: waits}, io=make_io_samples((0, 20), read_bytes=(0, 0))
    )
    timeline = make_rank(20, main, [worker], series=series, node=make_header(mounts=list(mounts)))
    got = split_data_wait(timeline, span.start_ns, span.end_ns)
    names = ("block_io", "remote_io", "unknown")
    return {name: round(float(getattr(got, name).mean()), 2) for name in names}


def test_a_disk_busy_for_the_job_explains_page_waits() -> None:
    # 64 MiB in 1,000 reads of 16 ms; a mounted file system in user space changes nothing
    expected = {"block_io": 0.8, "remote_io": 0.0, "unknown": 0.0}
    assert split_page_waits(16, 64, 64) == expected
    assert split_page_waits(16, 64, 64, mounts=()) == expected


def test_an_idle_disk_does_not_explain_page_waits() -> None:
    # busy 0.2 of 20 s: 1 of 100 samples in 10 s, with scatter 1 + 2 + 1 = 4 of 80 that waited
    got = split_page_waits(0.2, 4, 4)
    assert (got["block_io"], got["remote_io"]) == pytest.approx((0.04, 0.76), abs=0.02)
    assert split_page_waits(0.2, 2, 0, mounts=())["unknown"] == pytest.approx(0.76, abs=0.02)


def test_a_disk_read_by_mount_servers_explains_no_page_waits() -> None:
    # the disk is busy all the time and gives 400 MiB, none of them to the job
    assert split_page_waits(20, 400, 0) == {"block_io": 0.0, "remote_io": 0.8, "unknown": 0.0}


def test_throttled_reads_are_assigned_to_the_disk_by_bytes() -> None:
    # the disk is idle between the few requests that a cgroup lets pass: all bytes came from it
    assert split_page_waits(1, 400, 400)["block_io"] == 0.8


def test_system_mounts_do_not_count_as_remote_storage() -> None:
    assert split_page_waits(0.2, 2, 0, mounts=({"type": "fusectl"},))["remote_io"] == 0.0
