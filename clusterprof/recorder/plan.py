"""The effective sampling plan: plain numbers that the profile and the command line agreed on.

The launcher reads the profile (YAML) and writes `plan.json`; the agent reads only that, so that
it never imports a YAML library.

    {"hz": 10, "collectors": {"cpu": {"enabled": true, "interval_ns": 100000000}},
     "recording": {"segment_bytes": …, "max_bytes": …, "keep_free_bytes": …}, "profile": {…}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterprof.errors import UsageError

DEFAULT_HZ = 10.0
HZ_AT_LEAST = 0.01
HZ_AT_MOST = 1000.0
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What to sample how often, and how much disk to use."""

    hz: float = DEFAULT_HZ
    """Rate of the fast tier; slower collectors keep their own interval."""
    collectors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """name -> {"enabled", "interval_ns"}; a collector that is not named keeps its defaults."""
    recording: Mapping[str, int] = field(default_factory=dict)
    """segment_bytes, max_bytes, keep_free_bytes."""
    profile: Mapping[str, Any] = field(default_factory=dict)
    """Effective values of the profile, for the header."""

    def enabled(self, name: str) -> bool:
        """Return whether the collector is to be opened at all."""
        return bool(self.collectors.get(name, {}).get("enabled", True))

    def helper_options(self, name: str) -> tuple[str, ...]:
        """Return what an isolated collector's helper is told beside its name."""
        sampling = self.profile.get("sampling")
        wanted = isinstance(sampling, Mapping) and sampling.get("gpm") is True
        return ("--gpm", "off") if name == "gpu_nvidia" and not wanted else ()

    def interval_ns(self, name: str, default_ns: int) -> int:
        """Return the collector's interval: its own, unless it belongs to the fast tier.

        The fast tier is whatever is planned at 10 Hz or more often; `--hz` moves it as a whole
        and slows down slower collectors only when they would outrun it.
        """
        own = int(self.collectors.get(name, {}).get("interval_ns") or default_ns)
        fast = round(_SECOND_NS / self.hz)
        if own <= round(_SECOND_NS / DEFAULT_HZ):
            return fast if self.hz != DEFAULT_HZ else max(own, fast)
        return max(own, fast)


def plan_to_json(plan: Plan) -> bytes:
    """Return the content of `plan.json`."""
    values = {
        "hz": plan.hz,
        "collectors": {name: dict(entry) for name, entry in plan.collectors.items()},
        "recording": dict(plan.recording),
        "profile": dict(plan.profile),
    }
    return json.dumps(values).encode()


def plan_from_json(content: bytes) -> Plan:
    """Return the plan in a `plan.json`; raise `UsageError` when it is not one."""
    try:
        values = json.loads(content)
        collectors = values.get("collectors", {})
        plan = Plan(
            hz=float(values.get("hz", DEFAULT_HZ)),
            collectors={str(name): dict(entry) for name, entry in collectors.items()},
            recording={str(k): int(v) for k, v in values.get("recording", {}).items()},
            profile=dict(values.get("profile", {})),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"the sampling plan cannot be read: {error}") from error
    return with_hz(plan, plan.hz)


def with_hz(plan: Plan, hz: float) -> Plan:
    """Return the plan with another rate of the fast tier."""
    if not HZ_AT_LEAST <= hz <= HZ_AT_MOST:
        raise UsageError(f"{hz:g} Hz is not between {HZ_AT_LEAST:g} and {HZ_AT_MOST:g}")
    return Plan(hz, plan.collectors, plan.recording, plan.profile)


def plan_of_profile(
    profile: Mapping[str, Any], hz: float | None = None, keep_free_bytes: int | None = None
) -> Plan:
    """Return the plan that a profile's effective values and the command line make together."""
    sampling = profile.get("sampling", {})
    collectors = {}
    for name, wishes in sampling.get("collectors", {}).items():
        entry: dict[str, Any] = {"enabled": bool(wishes.get("enabled", True))}
        if wishes.get("hz"):
            entry["interval_ns"] = round(_SECOND_NS / wishes["hz"])
        collectors[name] = entry
    recording = {key: int(value) for key, value in profile.get("recording", {}).items()}
    if keep_free_bytes is not None:
        recording["keep_free_bytes"] = keep_free_bytes
    rate = hz if hz is not None else float(sampling.get("hz", DEFAULT_HZ))
    return with_hz(Plan(rate, collectors, recording, profile), rate)
