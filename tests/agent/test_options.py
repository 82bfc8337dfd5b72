"""The sampling plan: profile and command line in, plain numbers out."""

from __future__ import annotations

from typing import Any

import pytest

from clusterprof.agent.options import (
    Plan,
    build_plan,
    decode_plan,
    encode_plan,
    parse_duration,
    with_hang_options,
    with_hz,
    with_mode,
)
from clusterprof.errors import UsageError

FAST_NS, SLOW_NS = 100_000_000, 1_000_000_000
PROFILE = {
    "sampling": {"hz": 5.0, "collectors": {"mounts": {"hz": 0.5}, "network": {"enabled": False}}},
    "recording": {"segment_bytes": 1024, "max_bytes": 4096.0, "keep_free_bytes": 7},
    "gate": {"min_steps": 20},
}


@pytest.mark.parametrize(
    ("hz", "fast_ns", "slow_ns"),
    [
        (10, 100_000_000, 1_000_000_000),
        (100, 10_000_000, 1_000_000_000),  # the slow tier keeps its own rate
        (20, 50_000_000, 1_000_000_000),
        (1, 1_000_000_000, 1_000_000_000),
        (0.5, 2_000_000_000, 2_000_000_000),  # nothing is sampled more often than the fast tier
    ],
)
def test_the_rate_changes_only_the_fast_interval(hz: float, fast_ns: int, slow_ns: int) -> None:
    plan = Plan(hz)
    assert plan.interval_ns("cpu", FAST_NS) == fast_ns
    assert plan.interval_ns("mounts", SLOW_NS) == slow_ns


def test_the_command_line_overrides_the_profile_in_a_plan() -> None:
    plan = build_plan(PROFILE, hz=None, keep_free_bytes=99)
    assert plan == Plan(
        5.0,
        {"mounts": {"enabled": True, "interval_ns": 2_000_000_000}, "network": {"enabled": False}},
        {"segment_bytes": 1024, "max_bytes": 4096, "keep_free_bytes": 99},
        PROFILE,
    )
    assert not plan.enabled("network")
    assert plan.enabled("cpu")
    assert plan.interval_ns("mounts", SLOW_NS) == 2_000_000_000
    assert build_plan(PROFILE, hz=20).hz == 20  # the command line comes first


@pytest.mark.parametrize(
    ("gpm", "options"), [("auto", ()), (True, ("--gpm", "on")), (False, ("--gpm", "off"))]
)
def test_the_profile_sets_the_gpm_option_of_nvml(gpm: object, options: tuple[str, ...]) -> None:
    sampling = {**PROFILE["sampling"], "gpm": gpm}
    plan = decode_plan(encode_plan(build_plan({**PROFILE, "sampling": sampling})))
    assert plan.helper_options("gpu_nvidia") == options
    assert plan.helper_options("gpu_gaudi") == ()


@pytest.mark.parametrize("profile", [PROFILE, {}, {"sampling": "odd"}])
def test_a_profile_without_gpm_passes_no_option(profile: Any) -> None:
    assert Plan(profile=profile).helper_options("gpu_nvidia") == ()


def test_a_plan_survives_an_encoding_round_trip() -> None:
    plan = build_plan(PROFILE)
    assert decode_plan(encode_plan(plan)) == plan
    asked = with_hang_options(plan, "py-spy dump", 5_000_000_000)
    assert decode_plan(encode_plan(asked)) == asked
    assert with_hz(asked, 5).on_hang == with_mode(asked, 0o750).on_hang == "py-spy dump"
    assert with_mode(asked, 0o750).recording["hang_after_ns"] == 5_000_000_000
    assert "hang_after_ns" not in with_hang_options(plan, "", None).recording


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"hz": "x"}',
        b'{"hz": 0}',
        b'{"hz": 1e9}',
        b'{"collectors": [1]}',
        b'{"recording": {"max_bytes": "much"}}',
        b'{"hz": NaN}',
    ],
)
def test_an_invalid_plan_is_a_usage_error(content: bytes) -> None:
    with pytest.raises(UsageError):
        decode_plan(content)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("90s", 90_000_000_000),
        ("10m", 600_000_000_000),
        ("2h", 7_200_000_000_000),
        ("45", 45_000_000_000),
        ("1.5 h", 5_400_000_000_000),
        ("250ms", 250_000_000),
        ("1min", 60_000_000_000),
        ("1d", 86_400_000_000_000),
    ],
)
def test_durations_are_parsed_to_nanoseconds(text: str, ns: int) -> None:
    assert parse_duration(text) == ns


@pytest.mark.parametrize("text", ["", "m", "-5s", "0", "5 parsecs", "nan", "1e30h", "10 m s"])
def test_an_invalid_duration_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


def test_the_helper_for_viewers_can_be_disabled() -> None:
    plan = build_plan({**PROFILE, "recording": {"live_helper": False}})
    assert decode_plan(encode_plan(plan)).recording == {"live_helper": 0}
