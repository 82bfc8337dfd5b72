"""What does the probe add to the start of every Python of the job? Pairs with and without."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from clusterprof.agent.launch import launcher

PAIRS = 60
RESIDENT = "print([l for l in open('/proc/self/status') if 'VmRSS' in l][0].split()[1])"


def main() -> None:
    """Start `python -c pass` in turns, with byte code that fits and with none."""
    bare = {key: value for key, value in os.environ.items() if not key.startswith("CLUSTERPROF_")}
    bare.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        launcher.install_probe(Path(folder), gpu_events=True, strict=False)
        probed = launcher.with_probe_path(Path(folder), bare)
        print_difference("with byte code", bare, probed)
        print(
            "resident memory         "
            f"{measure_resident_kib(probed) - measure_resident_kib(bare):+7d} KiB"
            "  (target 3,072)"
        )
        # Another Python than the recorder's, where writing byte code is forbidden: the worst case.
        for cached in Path(folder).rglob("*.pyc"):
            cached.unlink()
        forbidden = {"PYTHONDONTWRITEBYTECODE": "1"}
        print_difference("without byte code", {**bare, **forbidden}, {**probed, **forbidden})


def print_difference(title: str, bare: dict[str, str], probed: dict[str, str]) -> None:
    """Print the difference of the pairs: median, its 95 % interval, p95."""
    differences, alone = [], []
    for pair in range(PAIRS):
        # Each second pair the other way round: the second one finds warmer caches.
        if pair % 2:
            with_us, without = measure_start_ms(probed), measure_start_ms(bare)
        else:
            without, with_us = measure_start_ms(bare), measure_start_ms(probed)
        differences.append(with_us - without)
        alone.append(without)
    differences.sort()
    # Order statistics of the median, normal approximation of the binomial: n/2 ± 0.98 √n.
    spread = round(0.98 * PAIRS**0.5)
    low, high = differences[PAIRS // 2 - spread], differences[PAIRS // 2 + spread]
    median = statistics.median(differences)
    print(
        f"{title:<24}{median:+7.2f} ms median ({low:+.2f} to {high:+.2f}), "
        f"p95 {differences[PAIRS * 95 // 100]:+.2f} ms  (target 10)  "
        f"on {statistics.median(alone):.1f} ms of a bare Python"
    )


def measure_start_ms(environ: dict[str, str]) -> float:
    """Return the milliseconds from start to end of a Python that does nothing."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=environ, check=True)
    return 1e3 * (time.perf_counter() - began)


def measure_resident_kib(environ: dict[str, str]) -> int:
    """Return the median resident KiB of a Python that does nothing."""
    command = [sys.executable, "-c", RESIDENT]
    sizes = [int(subprocess.check_output(command, env=environ)) for _ in range(9)]
    return int(statistics.median(sizes))


if __name__ == "__main__":
    main()
