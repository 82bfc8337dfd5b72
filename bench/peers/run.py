"""The numbers of other tools beside ours on the same traces; each tool in its own environment.

    make peers                          # all traces, all tools; writes docs/agreement.md
    python -m bench.peers.run HTA       # one tool

A tool that cannot be installed here is left out, and the page gives the reason. TraceLens is in no
package index: `CLUSTERPROF_TRACELENS` names a checkout of it. The traces are from third parties and
lie beside the project (`../shared/data`); without them there is nothing to compare.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
DATA = PROJECT.parent / "shared" / "data"
PLACE = Path(os.environ.get("CLUSTERPROF_PEERS", PROJECT / ".peers"))
LIMIT_S = 300
RESULTS = HERE / "results.json"
KINETO = ("kineto-dlrm-8rank", "kineto-dataloader", "kineto-hta", "kineto-tracelens")


@dataclass(frozen=True)
class Peer:
    """One tool: what to install, and the script that asks it."""

    name: str
    script: str
    install: tuple[str, ...] = ()
    reads: str = "kineto"
    checkout: str = ""
    """Environment variable with the path of its sources."""


PEERS = (
    Peer("clusterprof", "ours_.py", reads="kineto nsys"),
    Peer("HTA", "hta_.py", ("HolisticTraceAnalysis==0.5.0",)),
    Peer(
        "TraceLens",
        "tracelens_.py",
        ("pandas", "tqdm", "openpyxl", "tabulate", "orjson", "PyYAML", "matplotlib"),
        checkout="CLUSTERPROF_TRACELENS",
    ),
    Peer(
        "torch-tb-profiler",
        "tb_.py",
        ("torch-tb-profiler==0.4.3", "tensorboard", "pandas<2", "numpy<2"),
    ),
    Peer("nsys-ai", "nsys_ai_.py", ("nsys-ai==0.3.0",), reads="nsys"),
)


def main(names: Sequence[str]) -> None:
    """Ask the tools and write what they say."""
    if not DATA.is_dir():
        sys.exit(f"no traces: {DATA} is not there")
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for peer in PEERS:
        if names and peer.name not in names:
            continue
        python, why = _get_python(peer)
        for path in _list_traces(peer.reads):
            key = str(path.relative_to(DATA))
            answer = _ask(peer, python, path) if python else {"error": why}
            known.setdefault(key, {})[peer.name] = answer
            print(f"{peer.name:18} {key}: {json.dumps(answer)[:150]}", flush=True)
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    from bench.peers.page import make_page, replace_generated_part

    path = PROJECT / "docs" / "agreement.md"
    path.write_text(replace_generated_part(path.read_text(encoding="utf-8"), make_page(known)))


def _list_traces(formats: str) -> list[Path]:
    paths = []
    if "kineto" in formats:
        paths += [path for folder in KINETO for path in sorted((DATA / folder).glob("*.json.gz"))]
    if "nsys" in formats:
        paths += sorted((DATA / "nsys-sqlite").glob("mfu*.sqlite*"))
    return paths


def _get_python(peer: Peer) -> tuple[str, str]:
    """The interpreter of a tool's environment, made when it is not there; or why there is none."""
    if not peer.install:
        return sys.executable, ""
    sources = os.environ.get(peer.checkout, "") if peer.checkout else ""
    if peer.checkout and not Path(sources or "/nowhere").is_dir():
        return "", f"not installed: {peer.checkout} names no checkout"
    folder = PLACE / peer.name
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", *peer.install]
        made = subprocess.run(pip, capture_output=True, text=True, check=False)
        if made.returncode:
            return "", f"not installed: {made.stderr.strip().splitlines()[-1][:200]}"
        done.write_text("")
    return str(python), ""


def _ask(peer: Peer, python: str, path: Path) -> dict[str, Any]:
    """Run a tool on one trace: what it says, its CPU time and peak memory, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        if path.suffix == ".gz" and peer.reads == "nsys":  # it opens files, not what is packed
            plain = Path(folder) / path.stem
            with gzip.open(path) as packed, open(plain, "wb") as out:
                shutil.copyfileobj(packed, out)
            path = plain
        sources = os.environ.get(peer.checkout, "") if peer.checkout else str(PROJECT)
        env = {**os.environ, "PYTHONPATH": sources, "MPLBACKEND": "agg"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            run = subprocess.run(
                [python, str(HERE / peer.script), str(path)],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                env=env,
                cwd=folder,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {LIMIT_S} s"}
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.returncode:
        return {"error": _get_last_line(run.stderr)}
    answer: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    used = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return {**answer, "cpu_s": round(used, 2)}


def _get_last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "it ended without a word"


if __name__ == "__main__":
    main(sys.argv[1:])
