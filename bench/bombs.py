"""What happens to files made to exhaust memory, or to be read without end?

Each bomb (bench/_bombs.py) goes through a real `clusterprof analyze FILE`. It must end within 10 s
of CPU and 300 MB, in a clear refusal or in a report; after a minute it is killed. Names select some
of them: `python -m bench.bombs zip nest`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench._bombs import BOMBS

SECONDS_AT_MOST, BYTES_AT_MOST = 10.0, 300_000_000
ENDED_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class AnalysisRun:
    """What one analysis did."""

    status: int
    wall_s: float
    cpu_s: float
    rss_bytes: int
    said: str
    """The first line on stderr."""

    @property
    def ended_well(self) -> bool:
        """Whether it ended as it should."""
        small = self.cpu_s <= SECONDS_AT_MOST and self.rss_bytes <= BYTES_AT_MOST
        return small and 0 <= self.status <= 5 and "Traceback" not in self.said


def main() -> int:
    """Print a line per bomb; return 1 when one of them is not survived."""
    wanted = sys.argv[1:]
    failed = 0
    print("bomb                                          size   ends    wall     CPU    memory")
    for name in BOMBS:
        if wanted and not any(word in name for word in wanted):
            continue
        with tempfile.TemporaryDirectory(prefix="clusterprof-bombs-") as folder:
            words = [sys.executable, "-m", "bench._bombs", name, folder]
            made = subprocess.run(words, check=True, capture_output=True, text=True)
            path = Path(made.stdout.strip())
            run = analyze_file(path)
            size = path.stat().st_size if path.is_file() else 0
        failed += not run.ended_well
        print(
            f"{name:<42} {_format_size(size):>7}   {run.status:>4}"
            f"  {run.wall_s:5.1f} s {run.cpu_s:5.1f} s"
            f"  {run.rss_bytes / 1e6:5.0f} MB {'' if run.ended_well else '  FAILS'}"
            f"\n    {run.said}",
            flush=True,
        )
    print(f"{failed} not survived (target 0: {SECONDS_AT_MOST:.0f} s of CPU, 300 MB)")
    return int(failed > 0)


def analyze_file(path: Path) -> AnalysisRun:
    """Analyze a file in a process of its own."""
    words = [sys.executable, "-m", "clusterprof", "analyze", "--format", "plain", str(path)]
    begun = time.monotonic()
    with tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=stderr)
        while True:
            pid, status, used = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - begun > ENDED_AFTER_S:
                child.kill()
                _, status, used = os.wait4(child.pid, 0)
                break
            time.sleep(0.02)
        child.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.monotonic() - begun
        stderr.seek(0)
        text = stderr.read().decode("utf-8", "replace").strip()
    first = (text.splitlines() or ["a report"])[0].replace(f"{path.parent}/", "")
    first = "Traceback" if "Traceback" in text else first.removeprefix("clusterprof: ")
    cpu_s = used.ru_utime + used.ru_stime
    return AnalysisRun(child.returncode, wall_s, cpu_s, used.ru_maxrss * 1024, first[:110])


def _format_size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
