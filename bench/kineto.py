"""How fast is a trace of PyTorch's profiler read and analysed, and in how much memory?

    python -m bench kineto                    53 and 500 MB, of a real trace beside the repository
    python bench/kineto.py TRACE.json.gz --megabytes 53 500 2000

A real trace is repeated, each time later, to every size, in a temporary folder. Of each: the whole
`analyze` (start-up included), and beside it in the same run what reading alone costs: `json.loads`
of the standard library, and msgspec with the types that the importer asks for, a block at a time
(the floor: nothing is kept). MB of plain JSON per CPU-second; peak memory of the process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

REAL = FOLDER.parents[1] / "shared/data/kineto-hta/df_index_resolver_df_index_resolver.json.gz"
JSON_AT_MOST_MB = 60  # json.loads takes ten times a file's size
_LOADS = "import json, sys; json.load(open(sys.argv[1], 'rb'))"
_FLOOR = """
import sys
from pathlib import Path
from clusterprof.importers.base import Account
from clusterprof.importers.kineto.blocks import Trace
from clusterprof.importers.sources import sources_of
(source,) = sources_of(Path(sys.argv[1]))
for events in Trace(source, Account(source.path)).events():
    pass
"""


def measured(*command: str) -> tuple[float, float]:
    """Return CPU seconds and peak memory in MB of one command, those it starts included.

    The peak counts what this process had when it forked: so it must stay small itself.
    """
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.DEVNULL, env=environment
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:3])} … failed: {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> int:
    """Measure, and print a line for each size and way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", default=REAL)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[53, 500])
    args = parser.parse_args()
    if not args.trace.exists():
        print(f"no trace: {args.trace.name} is not beside the repository; name one")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in args.megabytes:
            path = Path(folder) / f"rank0-{megabytes}.json"
            maker = (str(FOLDER / "_kineto_traces.py"), str(args.trace), str(path))
            measured(*maker, "--megabytes", str(megabytes))  # in a process of its own: see peak
            size = path.stat().st_size / 1e6
            ways = {"analyze": ("-m", "clusterprof", "analyze", str(path))}
            ways["typed, nothing kept"] = ("-c", _FLOOR, str(path))
            if size <= JSON_AT_MOST_MB * 1.5:
                ways["json.loads"] = ("-c", _LOADS, str(path))
            for name, command in ways.items():
                cpu_s, peak_mb = measured(*command)
                print(
                    f"{size:6.0f} MB  {name:20} {size / cpu_s:6.0f} MB/CPU-s"
                    f"  {cpu_s:6.2f} CPU-s  peak {peak_mb:5.0f} MB"
                )
            path.unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
