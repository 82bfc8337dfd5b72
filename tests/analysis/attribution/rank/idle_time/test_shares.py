"""Idle time that many windows together place in the phases of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.analysis.attribution.rank.host_phases import FILL_ORDER
from clusterprof.analysis.attribution.rank.idle_time.queue import LaunchRows
from clusterprof.analysis.attribution.rank.idle_time.shares import (
    MIN_WINDOWS,
    NO_SHARES,
    PHASES,
    PhaseShares,
    allocate_by_shares,
    assume_queue,
    learn_shares,
    solve_shares,
)
from clusterprof.analysis.timeline.model import (
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_SYNC,
    Int,
)

MS = 1_000_000
TWO_PHASES = (PHASE_DATA_WAIT, PHASE_COMPUTE)
MAX_ERROR = 0.03
"""Bound of an estimated share where phases differ in length by a factor of up to 10: what is
within 0.02 of 0 or 1 is rounded, the rest is for the assumption that phases are alike."""
LEARNING = 128
"""Windows after which the bound holds."""


@dataclass(frozen=True)
class Windows:
    """Rows of windows: every window has each phase once, in the same order."""

    window: Int
    phase: Int
    room_ns: Int
    idle_ns: Int

    def cut(self, low: int, high: int) -> Windows:
        rows = (self.window >= low) & (self.window < high)
        return Windows(
            self.window[rows] - low, self.phase[rows], self.room_ns[rows], self.idle_ns[low:high]
        )

    def allocate(self, known: PhaseShares = NO_SHARES) -> tuple[Int, PhaseShares]:
        return allocate_by_shares(self.window, self.phase, self.room_ns, self.idle_ns, known)


def build(parts_ns: Int, phases: tuple[int, ...], idle_ns: Int) -> Windows:
    """parts_ns: int64[windows, phases], the length of each phase in each window."""
    count = len(parts_ns)
    window = np.repeat(np.arange(count, dtype=np.int64), len(phases))
    phase = np.tile(np.array(phases, np.int64), count)
    return Windows(window, phase, parts_ns.ravel().astype(np.int64), idle_ns.astype(np.int64))


def draw_windows(
    seed: int, phases: tuple[int, ...], shares: tuple[float, ...], count: int, noise: float = 0.0
) -> Windows:
    """Windows with phases of 10 to 100 ms each.

    noise: how far the idle part of a phase is from its share in a window at most, as a part of
    what the share leaves on either side: its mean stays the share.
    """
    rng = np.random.default_rng(seed)
    parts_ns = rng.integers(10 * MS, 100 * MS, (count, len(phases)))
    share = np.array(shares)
    share = share + noise * rng.uniform(-1, 1, parts_ns.shape) * np.minimum(share, 1 - share)
    return build(parts_ns, phases, np.rint((parts_ns * share).sum(axis=1)))


def check_sums(windows: Windows, allocated_ns: Int) -> None:
    """Every nanosecond is placed once, in a row that has room for it."""
    per_window = np.bincount(windows.window, allocated_ns, minlength=windows.idle_ns.size)
    np.testing.assert_array_equal(per_window.astype(np.int64), windows.idle_ns)
    assert (allocated_ns >= 0).all()
    assert (allocated_ns <= windows.room_ns).all()


def test_idle_shares_of_two_phases_are_solved_from_three_windows() -> None:
    # The example of the module: parts of 200 are (0.3, 0.7) (0.6, 0.4) (0.05, 0.95), of which
    # 0.4, 0.65 and 0.185 were idle. Normal equations: 0.4525 p + 0.4975 q = 0.51925 and
    # 0.4975 p + 1.5525 q = 0.71575, so p = 0.989 (nearly 1: it is 1) and q = 0.144.
    parts = np.array([[60, 140], [120, 80], [10, 190]]) / 200
    idle = np.array([80, 130, 37]) / 200
    products, idle_products = np.zeros((PHASES, PHASES)), np.zeros(PHASES)
    products[np.ix_(TWO_PHASES, TWO_PHASES)] = parts.T @ parts
    idle_products[list(TWO_PHASES)] = parts.T @ idle
    known = PhaseShares(
        windows=3,
        products=tuple(products.ravel()),
        idle_products=tuple(idle_products),
        idle_squares=float(idle @ idle),
    )
    shares = solve_shares(known)
    assert shares[PHASE_DATA_WAIT] == 1.0
    assert shares[PHASE_COMPUTE] == pytest.approx(0.144, abs=0.003)


def test_waits_are_filled_first_until_enough_windows_are_seen() -> None:
    # 15 windows: nothing is known; the wait of 60 is full, 20 are left for computing
    windows = build(np.tile([60 * MS, 140 * MS], (MIN_WINDOWS - 1, 1)), TWO_PHASES, idle(80, 15))
    allocated_ns, known = windows.allocate()
    assert allocated_ns.tolist() == [60 * MS, 20 * MS] * 15
    assert (known.windows, known.shares) == (15, ())


def test_sleep_outside_waits_has_a_share_of_its_own() -> None:
    # Windows of 100 ms in turn: the main thread sleeps for 80 and launches for 20, and the device
    # is idle as long as it sleeps; then it launches for 60 and 80 and waits in a collective for the
    # rest, and the device is idle for a quarter of the wait.
    lengths = np.tile([[100 * MS, 0], [60 * MS, 40 * MS], [80 * MS, 20 * MS]], (64, 1))
    phases = (PHASE_COMPUTE, PHASE_COLLECTIVE)
    windows = build(lengths, phases, np.tile([80 * MS, 10 * MS, 5 * MS], 64))
    asleep_ns = np.tile([80 * MS, 0, 0], 64)
    rows = windows.window, windows.phase, windows.room_ns, windows.idle_ns
    allocated_ns, _ = allocate_by_shares(*rows, NO_SHARES, asleep_ns)
    check_sums(windows, allocated_ns)
    by_window = allocated_ns.reshape(-1, 2)[-48:]
    expected = np.tile([[80 * MS, 0], [0, 10 * MS], [0, 5 * MS]], (16, 1))
    np.testing.assert_allclose(by_window, expected, atol=1 * MS)


def idle(each_ms: int, count: int) -> Int:
    return np.full(count, each_ms * MS, np.int64)


def test_window_deviation_goes_to_the_phase_with_varying_idle_time() -> None:
    # The device is idle in every wait and in a fifth of computing. Then two windows of 50 and 150:
    # 50 + 30 are expected. 95: the wait has no more room, so computing gets the other 15. 65: 15
    # too few; weights are 50 * 0.01 of the wait and 150 * 0.2 * 0.8 = 24 of computing, so the
    # wait loses 15 * 0.5 / 24.5 = 0.306.
    learnt = draw_windows(1, TWO_PHASES, (1.0, 0.2), MIN_WINDOWS)
    _, known = learnt.allocate()
    assert known.shares[PHASE_DATA_WAIT] == 1.0
    assert known.shares[PHASE_COMPUTE] == pytest.approx(0.2, abs=0.001)
    parts_ns = np.array([[50, 150], [50, 150]]) * MS
    windows = build(parts_ns, TWO_PHASES, np.array([95, 65]) * MS)
    allocated_ns, _ = windows.allocate(known)
    check_sums(windows, allocated_ns)
    assert (allocated_ns / MS).tolist() == pytest.approx([50, 45, 49.694, 15.306], abs=0.01)


def test_a_phase_in_which_the_device_never_idles_gets_nothing() -> None:
    # By the fixed order the wait would be filled first, although its queue lasts through it.
    learnt = draw_windows(2, TWO_PHASES, (0.0, 0.5), MIN_WINDOWS)
    _, known = learnt.allocate()
    windows = build(np.array([[60, 140]]) * MS, TWO_PHASES, np.array([70 * MS]))
    allocated_ns, _ = windows.allocate(known)
    assert (allocated_ns / MS).tolist() == pytest.approx([0.0, 70.0], abs=0.1)


def test_queued_work_is_completed_in_the_following_wait() -> None:
    # Two steps launch for 20 and for 40 (the host is slower) the same work of 50, then wait: 80
    # and 60. So 100 of 200 are busy. Step 1 launches 2.5 a ms: 30 are queued after 20, the wait is
    # idle for 50. Step 2 launches 1.25 a ms: 10 are queued after 40, the wait is idle for 50.
    phase = np.array([PHASE_COMPUTE, PHASE_COLLECTIVE, PHASE_COMPUTE, PHASE_COLLECTIVE])
    room_ns, step = np.array([20, 80, 40, 60]) * MS, np.array([5, 5, 6, 6])
    rows = LaunchRows(np.zeros(4, np.int64), phase, room_ns, step)
    shares = assume_queue(rows, 100 * MS)
    assert shares[PHASE_COMPUTE] == 0.0
    assert shares[PHASE_COLLECTIVE] == pytest.approx(100 / 140)
    assert np.isnan(shares[PHASE_DATA_WAIT])
    # With work of 10 a step the device is faster than its host: 10 of each 20 and 40 are idle.
    slow_host = assume_queue(rows, 180 * MS)
    assert slow_host[PHASE_COMPUTE] == pytest.approx(40 / 60)
    assert slow_host[PHASE_COLLECTIVE] == 1.0


def test_phases_in_constant_proportion_keep_the_queue_model_shares() -> None:
    # Every window has 20 of launching and 80 of waiting, and is idle for 30 to 70: no shares
    # explain that, and none of the two phases more than the other.
    idle_ns = np.tile(np.array([30, 50, 70]) * MS, 32)
    windows = build(
        np.tile([20 * MS, 80 * MS], (96, 1)), (PHASE_COMPUTE, PHASE_COLLECTIVE), idle_ns
    )
    step = np.repeat(np.arange(96), 2)
    rows = LaunchRows(windows.window, windows.phase, windows.room_ns, step)
    assumed = assume_queue(rows, int(idle_ns.sum()))
    assert assumed[PHASE_COMPUTE] == 0.0
    assert assumed[PHASE_COLLECTIVE] == pytest.approx(50 / 80)
    _, known = windows.allocate(PhaseShares(assumed=assumed))
    assert known.shares[PHASE_COMPUTE] == 0.0
    assert known.shares[PHASE_COLLECTIVE] == pytest.approx(50 / 80, abs=0.01)


@st.composite
def true_shares(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Two to four phases and the idle share of each."""
    phases = draw(st.lists(st.sampled_from(FILL_ORDER), min_size=2, max_size=4, unique=True))
    shares = draw(
        st.lists(st.floats(0.0, 1.0), min_size=len(phases), max_size=len(phases)).map(tuple)
    )
    # A host waits for its device only as long as that works.
    shares = tuple(0.0 if phase == PHASE_SYNC else share for phase, share in zip(phases, shares))
    return tuple(phases), shares


def test_sleep_after_a_device_wait_is_idle_time() -> None:
    # Each step launches for 20 ms, waits 30 for the device and sleeps for 50: work of 50, idle 50.
    phases = (PHASE_COMPUTE, PHASE_SYNC, PHASE_COMPUTE)
    lengths_ms, asleep_ns = [20, 30, 50], np.full(32, 50 * MS)
    windows = build(np.tile(np.array(lengths_ms) * MS, (32, 1)), phases, np.full(32, 50 * MS))
    rows = windows.window, windows.phase, windows.room_ns, windows.idle_ns
    drained = np.tile([False, False, True], 32)
    known = learn_shares(*rows, windows.window, asleep_ns, drained)
    assert known.shares[PHASE_SYNC] == known.shares[PHASE_COMPUTE] == 0.0
    assert known.shares[-1] == 1.0
    allocated_ns, _ = allocate_by_shares(*rows, known, asleep_ns, 32, drained)
    np.testing.assert_array_equal(allocated_ns.reshape(-1, 3), np.tile([0, 0, 50 * MS], (32, 1)))
    # Without knowing where the queue was empty, sleep is spread over all launching.
    spread_ns, _ = allocate_by_shares(*rows, known, asleep_ns, 32)
    assert spread_ns[0] > 10 * MS


def test_a_short_wait_after_unplaced_sleep_is_not_idle_time() -> None:
    # Each step launches for 20 ms, sleeps for 20 somewhere in between and waits 5 for data: work of
    # 30, idle 15. What is launched after the sleep (half of it, work of 15) outlasts the wait.
    phases = (PHASE_COMPUTE, PHASE_DATA_WAIT)
    windows = build(np.tile(np.array([40, 5]) * MS, (8, 1)), phases, np.full(8, 15 * MS))
    rows = windows.window, windows.phase, windows.room_ns, windows.idle_ns
    known = learn_shares(*rows, windows.window, np.full(8, 20 * MS))
    assert known.assumed[PHASE_DATA_WAIT] == 0.0


def test_atypical_first_windows_do_not_determine_the_shares() -> None:
    # Two windows of a first step, idle while the host launches; then 30 of launching, which keep
    # the device busy, and 70 of waiting in which it is idle. The phases hardly vary.
    rng = np.random.default_rng(1)
    waits_ms = 70 + rng.uniform(-0.5, 0.5, 40)
    parts_ms = np.stack([100 - waits_ms, waits_ms], axis=1)
    parts_ms[:2] = [[98, 2], [99, 1]]
    idle_ms = np.concatenate([[99, 99], 70 + rng.uniform(-1, 1, 38)])
    phases = (PHASE_COMPUTE, PHASE_COLLECTIVE)
    windows = build(np.rint(parts_ms * MS), phases, np.rint(idle_ms * MS))
    rows = windows.window, windows.phase, windows.room_ns, windows.idle_ns
    known = learn_shares(*rows, windows.window)
    assert known.shares[PHASE_COMPUTE] < 0.3
    assert known.shares[PHASE_COLLECTIVE] > 0.85


SEEDS = st.integers(0, 2**32 - 1)


@given(true_shares(), SEEDS, st.integers(LEARNING, 300))
def test_learned_shares_are_accurate_and_keep_the_idle_sum(
    truth: tuple[tuple[int, ...], tuple[float, ...]], seed: int, count: int
) -> None:
    phases, shares = truth
    windows = draw_windows(seed, phases, shares, count)
    allocated_ns, known = windows.allocate()
    check_sums(windows, allocated_ns)
    assert known.windows == count
    for phase, share in zip(phases, shares):
        assert known.shares[phase] == pytest.approx(share, abs=MAX_ERROR)


@given(true_shares(), SEEDS, st.floats(0.0, 1.0))
def test_varying_idle_time_is_placed_exactly(
    truth: tuple[tuple[int, ...], tuple[float, ...]], seed: int, noise: float
) -> None:
    windows = draw_windows(seed, *truth, 300, noise)
    allocated_ns, _ = windows.allocate()
    check_sums(windows, allocated_ns)


@given(true_shares(), SEEDS, st.integers(0, 300))
def test_chunking_does_not_change_shares_or_placement(
    truth: tuple[tuple[int, ...], tuple[float, ...]], seed: int, cut: int
) -> None:
    windows = draw_windows(seed, *truth, 300, noise=0.5)
    whole_ns, at_once = windows.allocate()
    first_ns, known = windows.cut(0, cut).allocate()
    rest_ns, in_two = windows.cut(cut, 300).allocate(known)
    # Sums of floats in another order: a nanosecond may fall on the other side.
    assert np.abs(np.concatenate([first_ns, rest_ns]) - whole_ns).max() <= 2
    assert in_two.windows == at_once.windows
    np.testing.assert_allclose(in_two.shares, at_once.shares, atol=1e-9)
    np.testing.assert_allclose(in_two.products, at_once.products, atol=1e-9)


@pytest.mark.parametrize(("copying", "share"), [(False, 0.0), (True, 0.4)])
def test_device_waits_have_an_idle_share_only_while_copying(copying: bool, share: float) -> None:
    phases = (PHASE_COMPUTE, PHASE_SYNC)
    windows = draw_windows(3, phases, (0.0, 0.4), LEARNING)
    none = np.zeros(windows.phase.size, np.int64)
    known = learn_shares(
        windows.window, windows.phase, windows.room_ns, windows.idle_ns, none, copying=copying
    )
    assert known.shares[PHASE_SYNC] == pytest.approx(share, abs=MAX_ERROR)
