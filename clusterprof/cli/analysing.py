"""What `clusterprof analyze` does, and its usual command lines read without typer.

typer and what it loads take 0.1 s of CPU, a third of what starting takes. So plain paths and whole
options are read here; whatever else stands there, mistakes and `--help` too, is left to typer, and
with it every message (`cli/analyze.py` declares the options; a test holds both together).
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterprof.cli import common
from clusterprof.cli.part import part_of
from clusterprof.cli.progress import progress_bar

FLAGS = {"--json": "as_json", "--strict": "strict", "--no-color": "no_color"}
VALUES = {
    "--format": "format_", "-o": "output", "--output": "output", "--profile": "profile",
    "--jobs": "jobs", "--width": "width", "--by": "by", "--top": "top", "--since": "since",
    "--until": "until", "--steps": "steps",
}  # fmt: skip
_LEAST = {"jobs": 1, "top": 1, "width": 0}
_DIGITS_AT_MOST = 9


def run(
    paths: Sequence[Path],
    format_: str = "terminal",
    as_json: bool = False,
    output: Path | None = None,
    profile: str | None = None,
    jobs: int = 1,
    strict: bool = False,
    width: int = 0,
    no_color: bool = False,
    by: Sequence[str] | None = None,
    top: int | None = None,
    since: str | None = None,
    until: str | None = None,
    steps: str | None = None,
) -> None:
    """Analyse recordings or foreign files, and write the report."""
    with common.errors_also_as_json(as_json or format_ == "json"):
        chosen = common.chosen_format(format_, as_json)
        common.refuse_terminal(chosen, output)
        settings = common.load_profile(profile)
        tables = {"by": common.chosen_tables(by or ()), "top": top}
        _load()
        part = part_of(since, until, steps)
        with progress_bar() as tell:
            report = common.analyse_with(
                paths, settings, jobs, history=True, tell=tell, part=part, leave_unknown=True
            )
        renderer = common.renderer_for(
            chosen, settings, width, no_color, tables, to_file=output is not None
        )
        common.write_result(renderer.render(report), output)
    if strict:
        common.insist_on_all(report)


def _load() -> None:
    """Load the analysis; none of it is garbage, so nobody looks for any meanwhile, nor later."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        import clusterprof.engine.local
        import clusterprof.renderers.registry  # noqa: F401
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def asked_plainly(words: Sequence[str]) -> dict[str, Any] | None:
    """Return what the words after `analyze` ask `run` for; None: typer has to read them."""
    asked: dict[str, Any] = {}
    paths: list[Path] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            paths.append(Path(word))
        elif word in FLAGS:
            asked[FLAGS[word]] = True
        else:
            name, joined, value = word.partition("=") if word.startswith("--") else (word, "", "")
            option = VALUES.get(name)
            value = value if joined else next(rest, "")
            if option is None or value.startswith("-") or not _take(asked, option, value):
                return None
    if not paths or "" in words:
        return None
    return {"paths": paths, **asked}


def _take(asked: dict[str, Any], option: str, value: str) -> bool:
    """Note the value of an option; False where typer has more to say about it."""
    if option == "by":
        asked.setdefault(option, []).append(value)
    elif option in asked or not value:
        return False
    elif option in _LEAST:
        number = int(value) if _is_whole(value) else -1
        asked[option] = number
        return number >= _LEAST[option]
    else:
        asked[option] = Path(value) if option == "output" else value
    return True


def _is_whole(value: str) -> bool:
    return value.isascii() and value.isdigit() and len(value) <= _DIGITS_AT_MOST
