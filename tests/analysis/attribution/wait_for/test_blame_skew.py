"""Ranks that leave an operation at different times: nobody is blamed for the way the data take."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.attribution.wait_for.blame import NO_CULPRIT, WORK, blame_waits
from clusterprof.analysis.attribution.wait_for.totals import WaitTotals
from clusterprof.analysis.timeline.collectives.operations import Operations

MS = 1_000_000
CATEGORIES = ("storage-local", WORK)
STEPS = 40


def booked(
    arrive_ms: np.ndarray, leave_ms: np.ndarray, spent_ms: np.ndarray, on_device: bool = False
) -> tuple:
    """Blame steps x 2 times of two ranks; `spent_ms`: steps x 2 x 2, since the step before."""
    n = len(arrive_ms)
    ops = Operations(
        first=np.arange(n + 1) * 2,
        process_group=np.zeros(n, np.int64),
        operation=np.ones(n, np.int64),
        bytes=np.full(n, 1000),
        complete=np.ones(n, np.bool_),
        rank=np.tile([0, 1], n),
        arrive_ns=arrive_ms.ravel() * MS,
        leave_ns=leave_ms.ravel() * MS,
        blocked_ns=(leave_ms - arrive_ms).ravel() * MS,
        source=np.arange(2 * n),
        on_device=np.full(2 * n, on_device),
    )
    spent = np.cumsum(spent_ms, axis=0).reshape(2 * n, 2) * MS
    blamed, _ = blame_waits(ops, spent, spent, 2)
    books = WaitTotals(2, CATEGORIES)
    books.add(ops, blamed)
    assert int(books.victim_ns.sum()) == int(books.culprit_ns.sum()) == int(ops.blocked_ns.sum())
    return books, blamed


def one_way(more_work_ms: int = 0, delay_ms: int = 12, transfer_ms: int = 20) -> tuple:
    """Both work 100 ms, rank 1 some more; what rank 0 sends reaches rank 1 `delay_ms` later.

    Rank 0 goes on when rank 1 has come, rank 1 when what rank 0 sent has arrived.
    """
    t = [0, 0]
    arrive, leave, spent = [], [], []
    for _ in range(STEPS):
        come = [t[0] + 100, t[1] + 100 + more_work_ms]
        t = [max(come) + transfer_ms, max(come[0] + delay_ms, come[1]) + transfer_ms]
        arrive.append(come)
        leave.append(t)
        spent.append([[0, 100], [0, 100 + more_work_ms]])
    return booked(np.array(arrive), np.array(leave), np.array(spent))


def on_devices(apart: bool) -> WaitTotals:
    """Devices that leave together; rank 1's hosts are ahead by 0 or 40 ms, which shifts its times.

    Rank 1 works 130 ms and rank 0 100; without `apart` the times are those of the devices.
    """
    leave = np.arange(1, STEPS + 1) * 150
    leave = np.stack([leave, leave], axis=1)
    arrive = leave - np.array([50, 20])
    ahead = np.zeros((STEPS, 2), np.int64)
    ahead[:, 1] = np.where(np.arange(STEPS) % 2, 40, 0) * apart
    spent = np.zeros((STEPS, 2, 2), np.int64)
    spent[:, :, 1] = np.diff(arrive - ahead, prepend=0, axis=0) - np.array([50, 20])
    return booked(arrive - ahead, leave - ahead, spent, on_device=True)[0]


def test_host_lead_over_its_device_does_not_change_blame() -> None:
    # Rank 0 waits 30 of its 50 ms for the work of rank 1; 20 are transfer.
    for books in (on_devices(apart=False), on_devices(apart=True)):
        result = caused_ms(books, 1)
        assert result.pop("unattributed") == 30  # the first time
        assert set(result) <= {"sync-imbalance", "sync-slow-compute"}
        assert int(books.culprit_ns[1].sum()) == 30 * STEPS * MS
        assert caused_ms(books, NO_CULPRIT) == {"net-transfer": 2 * 20 * STEPS}


def caused_ms(books: WaitTotals, rank: int) -> dict[str, int]:
    return {c: int(ns) // MS for c, ns in zip(books.causes, books.culprit_ns[rank]) if ns}


def test_an_asymmetric_network_delay_is_blamed_on_no_rank() -> None:
    # Rank 1 leaves 12 ms later every other time, and so comes 12 ms later to the next. The first
    # step is judged by itself: nothing was left together before.
    books, blamed = one_way()
    assert caused_ms(books, 1) == {}
    assert set(caused_ms(books, 0)) <= {"unattributed"}  # the first step
    assert sum(caused_ms(books, 0).values()) <= 12
    assert blamed.last_arrival[1:].tolist() == [NO_CULPRIT] * (STEPS - 1)
    assert blamed.recoverable_ns[1:].tolist() == [0] * (STEPS - 1)
    everything = int(books.victim_ns.sum()) // MS
    assert caused_ms(books, NO_CULPRIT) == {
        "net-transfer": everything - sum(caused_ms(books, 0).values())
    }


def test_blame_is_limited_to_extra_work_despite_asymmetric_network_delay() -> None:
    # 30 ms more of work: rank 1 comes 30 ms later every time, and 12 ms of delay are hidden.
    books, blamed = one_way(more_work_ms=30)
    work = sum(ms for cause, ms in caused_ms(books, 1).items() if cause.startswith("sync-"))
    assert work == 30 * (STEPS - 1)
    assert blamed.last_arrival[1:].tolist() == [1] * (STEPS - 1)


def test_leaving_apart_longer_than_the_operation_blames_no_rank() -> None:
    # In step 20 rank 1 leaves 500 ms late, of operations that take 20 ms, and so comes late next.
    arrive = np.array([[100, 100]] * STEPS) + 120 * np.arange(STEPS)[:, None]
    leave = arrive + 20
    arrive[21:] += 500
    leave[21:] += 500
    arrive[21, 0] -= 500
    leave[20, 1] += 500
    books, _ = booked(arrive, leave, np.array([[[0, 100], [0, 100]]] * STEPS))
    assert caused_ms(books, 1) == {}
