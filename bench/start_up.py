"""How long does a command of ours take to start? Beside a bare Python in the same run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 15
COMMANDS = {
    "bare python": ["-c", "pass"],
    "clusterprof --help": ["-m", "clusterprof", "--help"],
    "clusterprof --version": ["-m", "clusterprof", "--version"],
    "agent --help": ["-m", "clusterprof.agent", "--help"],
}


def main() -> None:
    """Interleave the commands, so that a change of the machine's speed meets all of them."""
    wall_ms: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
            wall_ms[name].append(1e3 * (time.perf_counter() - began))
    bare = statistics.median(wall_ms["bare python"])
    for name, values in wall_ms.items():
        median = statistics.median(values)
        print(
            f"{name:<24}{median:7.1f} ms  ({min(values):.1f} to {max(values):.1f})"
            f"  {median / bare:5.1f} × bare Python"
        )


if __name__ == "__main__":
    main()
