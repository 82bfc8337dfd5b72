"""`clusterprof doctor`: what can be recorded here, what cannot, and who can change that."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterprof.cli import common
from clusterprof.errors import UsageError

if TYPE_CHECKING:
    from clusterprof.collectors.base import Context
    from clusterprof.profiles import Profile
    from clusterprof.recorder.inspect import Look

_HANG_S = 1.0  # a path of a dead server is told as one, and not waited for


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Print a profile's effective values and their origin."),
    ] = None,
    job: Annotated[
        bool,
        typer.Option(
            "--job",
            help="Inside a job: whose device is which, cores, files, links, what to change.",
        ),
    ] = False,
    paths: Annotated[
        list[str] | None,
        typer.Option("--path", metavar="PATH", help="With --job: where the data are; repeatable."),
    ] = None,
) -> None:
    """Open every collector once: what is available, what is not, the remedy and who has it."""
    with common.errors_also_as_json(as_json):
        if profile is not None and (job or paths):
            raise UsageError("--profile and --job are two questions", "ask one at a time")
        if paths and not job:
            raise UsageError("--path says where the data of a job are", "add --job")
        if profile is not None:
            _print_profile(common.load_profile(profile), as_json)
            return
        from clusterprof.collectors.registry import COLLECTORS

        if job:
            _print_job(COLLECTORS, paths or [], as_json)
            return
        from clusterprof.recorder.inspect import look_at, look_at_spans
        from clusterprof.recorder.look_fabric import look_at_fabric

        looks = [*look_at(COLLECTORS, isolate=_as_recorded()), look_at_spans(dict(os.environ))]
        looks.append(look_at_fabric())
        _print_looks(looks, as_json, common.columns())


def _as_recorded() -> Callable[[str, Context], Any]:
    """Return what opens an isolated collector with the options that a recording here gives it."""
    from clusterprof.recorder.plan import plan_of_profile
    from clusterprof.recorder.service import isolate

    plan = plan_of_profile(common.load_profile(None).effective())
    return lambda name, context: isolate(name, context, plan.helper_options(name))


def _print_looks(looks: Sequence[Look], as_json: bool, width: int = 80) -> None:
    from clusterprof.cli.looks import looks_document, looks_text

    if as_json:
        document = {
            "format": "clusterprof-doctor",
            "schema_version": common.SCHEMA_VERSION,
            "collectors": looks_document(looks),
        }
        common.write_result(common.json_text(document), None)
        return
    common.write_result(looks_text(looks, width), None)


def _print_job(collectors: Sequence[type], paths: Sequence[str], as_json: bool) -> None:
    from clusterprof.cli.job import job_text
    from clusterprof.cli.looks import looks_document
    from clusterprof.recorder.surroundings import look_around
    from clusterprof.recorder.surroundings.files import within

    for path in paths:
        if within(_HANG_S, functools.partial(os.path.lexists, path)) is False:
            raise UsageError(f"--path {path}: there is no such file or folder on this node")
    full = [os.path.abspath(path) for path in paths]
    own = (os.getpid(), os.getppid())
    found = look_around(
        collectors, dict(os.environ), os.getcwd(), full, own, isolate=_as_recorded()
    )
    if as_json:
        document = {
            "format": "clusterprof-doctor-job",
            "schema_version": common.SCHEMA_VERSION,
            **found.document(),
            "collectors": looks_document(found.looks),
        }
        common.write_result(common.json_text(document), None)
        return
    common.write_result(job_text(found, common.columns()), None)


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
        common.write_result(common.json_text(document), None)
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
