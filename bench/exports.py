"""What does it cost to export a node-hour, and does memory stay constant for a longer recording?

The recording is that of `analysis` (8 ranks with 200 spans a second each, 160 signals at 10 Hz), a
third of the time and all of it. Each export runs in its own process, analysis and imports included.
`grows` is the peak memory of the long one over that of the short one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import analysis

SECONDS = int(sys.argv[1]) if len(sys.argv) > 1 else 1800
SHORTER = 3
GROWS_AT_MOST = 1.25
CASES = (
    ("perfetto", ("--to", "perfetto")),
    ("csv, all tables", ("--to", "csv")),
    ("json, spans", ("--to", "json", "--table", "spans")),
    ("openmetrics", ("--to", "openmetrics")),
)
EXPORT = """
import json, os, resource, sys
from clusterprof.cli.app import main
code = main(["export", *sys.argv[1:]])
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"code": code, "cpu_s": used.ru_utime + used.ru_stime,
                  "rss": used.ru_maxrss * 1024}))
"""


def main() -> int:
    """Print one line per format; return 1 when memory grows with the recording."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for seconds in (SECONDS // SHORTER, SECONDS):
            analysis.SECONDS = seconds
            runs[seconds] = Path(folder) / f"{seconds}s"
            written = analysis.write_recording(runs[seconds] / "node-1", threads=False)
        print(f"{SECONDS} s: {written / 1e6:.0f} MB, {SECONDS * analysis.RANKS * 200:,} spans")
        for name, words in CASES:
            short, long = (run_export(run, words, Path(folder) / "out") for run in runs.values())
            grows = long["rss"] / short["rss"]
            failed |= grows > GROWS_AT_MOST
            print(
                f"  {name:<16} {long['cpu_s']:6.1f} CPU-s  {long['bytes'] / 1e6:8.1f} MB written  "
                f"{long['rss'] / (1 << 20):4.0f} MiB at most, grows {grows:.2f}"
            )
    return int(failed)


def run_export(run: Path, words: tuple[str, ...], out: Path) -> dict:
    """Export in a fresh process; return what it used and wrote."""
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, str(run), *words, "-o", f"{out}/"],
        capture_output=True,
        text=True,
        check=True,
    )
    measured = json.loads(done.stdout)
    assert measured["code"] == 0, done.stderr
    measured["bytes"] = sum(file.stat().st_size for file in out.iterdir())
    for file in out.iterdir():
        file.unlink()
    out.rmdir()
    return measured


if __name__ == "__main__":
    raise SystemExit(main())
