"""`clusterprof doctor`: what can be recorded here, what cannot, and who can change that."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterprof.cli import common

if TYPE_CHECKING:
    from clusterprof.profiles import Profile
    from clusterprof.recorder.inspect import Look


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Print a profile's effective values and their origin."),
    ] = None,
) -> None:
    """Open every collector once: what is available, what is not, the remedy and who has it."""
    with common.errors_also_as_json(as_json):
        if profile is not None:
            _print_profile(common.load_profile(profile), as_json)
            return
        from clusterprof.collectors.registry import COLLECTORS
        from clusterprof.recorder.inspect import look_at, look_at_spans
        from clusterprof.recorder.look_fabric import look_at_fabric
        from clusterprof.recorder.service import isolate

        looks = [*look_at(COLLECTORS, isolate=isolate), look_at_spans(dict(os.environ))]
        looks.append(look_at_fabric())
        _print_looks(looks, as_json)


def _print_looks(looks: Sequence[Look], as_json: bool) -> None:
    if as_json:
        document = {
            "format": "clusterprof-doctor",
            "schema_version": common.SCHEMA_VERSION,
            "collectors": [
                {
                    "name": look.name,
                    "status": look.status,
                    "found": look.found,
                    "message": look.message,
                    "remedy": look.remedy,
                    "owner": look.owner,
                    "missing": list(look.missing),
                }
                for look in looks
            ],
        }
        common.write_result(json.dumps(document, indent=2) + "\n", None)
        return
    width = max(len(look.name) for look in looks)
    lines = []
    for look in looks:
        said = look.found if look.status == "available" else look.message
        lines.append(_line(f"{look.name:<{width}}  {look.status:<9}  {said}"))
        if look.remedy:
            lines.append(_line(f"{'':<{width}}  {'':<9}  remedy ({look.owner}): {look.remedy}"))
        elif look.owner:
            lines.append(_line(f"{'':<{width}}  {'':<9}  {look.owner}"))
        lines += [_line(f"{'':<{width}}  {'':<9}  without {missing}") for missing in look.missing]
    seen = sum(look.status == "available" for look in looks)
    lines.append(f"{seen} of {len(looks)} sources can be recorded here.")
    common.write_result("\n".join(lines) + "\n", None)


def _print_profile(profile: Profile, as_json: bool) -> None:
    if as_json:
        values = {
            key: {"value": value, "origin": profile.origins[key]}
            for key, value in profile.values.items()
        }
        document = {
            "format": "clusterprof-profile",
            "schema_version": common.SCHEMA_VERSION,
            "name": profile.name,
            "values": values,
        }
        common.write_result(json.dumps(document, indent=2) + "\n", None)
        return
    width = max(len(key) for key in profile.values)
    lines = [
        _line(f"{key:<{width}}  {_shown(value)}  ({profile.origins[key]})")
        for key, value in profile.values.items()
    ]
    common.write_result("\n".join([f"profile {profile.name}", *lines]) + "\n", None)


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return json.dumps(list(value))
    return json.dumps(value)


def _line(text: str) -> str:
    from clusterprof.renderers.text_safety import safe_text

    return safe_text(text, 500).rstrip()
