"""Integrals of shares and of the firmware's sums: wraps, beginnings anew, gaps."""

from __future__ import annotations

from clusterprof.agent.linux.counters import CycleShare, ShareIntegral

S = 1_000_000_000


def test_a_share_counts_for_the_time_since_the_previous_reading() -> None:
    integral = ShareIntegral()
    start = integral.add(0.9, 5 * S)  # nothing is known of the time before
    assert [integral.add(share, t) - start for share, t in [(0.5, 6 * S), (1.0, 8 * S)]] == [
        S // 2,
        S // 2 + 2 * S,
    ]
    assert integral.add(1.7, 9 * S) - start == S // 2 + 3 * S  # never more than the time there was
    assert integral.add(-0.3, 10 * S) - start == S // 2 + 3 * S


def test_a_gap_in_readings_decreases_the_total() -> None:
    integral = ShareIntegral()
    totals = [integral.add(1.0, t * S) for t in (0, 1, 2)]
    totals.append(integral.add(1.0, 10 * S))
    assert totals[3] < min(totals[:3])  # it falls, which readers take for "not measured"
    assert integral.add(1.0, 11 * S) == totals[3] + S
    fallen = integral.add(0.0, 30 * S)
    assert fallen < totals[3]  # also where nothing was counted in between
    assert integral.add(0.5, 99 * S, holds_ns=100 * S) == fallen + 69 * S // 2


def test_a_backward_clock_step_is_a_gap() -> None:
    integral = ShareIntegral()
    before = integral.add(1.0, 5 * S)
    assert 0 < integral.add(1.0, 4 * S) < before


def test_the_next_share_does_not_fill_a_gap() -> None:
    integral = ShareIntegral()
    integral.invalidate()  # before anything was known nothing is lost
    start = integral.add(1.0, 1 * S)
    integral.invalidate()
    assert integral.add(1.0, 2 * S) < start
    assert integral.add(1.0, 3 * S) == start - 1 + S


def test_cycle_sums_handle_wraps_repeats_and_resets() -> None:
    share = CycleShare(1.0)
    assert share.share(100, 1000) is None
    assert share.share(350, 2000) == 0.25
    assert (share.share(350, 2000), share.unchanged) == (None, True)
    assert (share.share(350, 3000), share.unchanged) == (0.0, False)
    assert share.share(0xFFFFFFF0, 5000) is None  # more than half of what it can hold: anew
    assert share.share(0x10, 5064) == 0.5  # 32 of 64 cycles, over the end of 32 bits
    assert share.share(0x20, 0x10) is None  # the cycles began anew
    assert share.share(0x20 + 20, 0x20) is None  # 20 in 16 cycles: impossible


def test_a_rise_above_1_per_cycle_means_percent() -> None:
    share = CycleShare()
    assert share.share(0, 0, 3) is None
    assert share.share(500, 1000, 50) is None  # 0.5: perhaps half of the time, perhaps 0.5 %
    assert share.share(80_500, 2000, 80) == 0.8
    assert share.unit == 100.0
    assert share.share(80_900, 3000, 0) == 0.004


def test_three_matching_percentages_prove_that_the_unit_is_1() -> None:
    share = CycleShare()
    given = [(0, 0, 90), (900, 1000, 90), (1000, 2000, 1), (1900, 3000, 88), (2700, 4000, 81)]
    assert [share.share(*item) for item in given] == [None, None, None, None, 0.8]
    assert share.unit == 1.0


def test_contradicting_percentages_keep_the_unit_unknown() -> None:
    share = CycleShare()
    given = [(0, 0, 90), (900, 1000, 90), (1800, 2000, 90), (2000, 3000, 95), (2900, 4000, 90)]
    # 0.2 per cycle beside 95 % fits neither; counting begins again.
    assert [share.share(*item) for item in given][-1] is None
