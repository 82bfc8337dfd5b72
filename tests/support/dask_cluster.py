"""A Dask cluster of real processes on this machine: a scheduler and its workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clusterprof.analysis.tasks.base import Cluster

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0


@dataclass
class DaskCluster:
    """Processes of a cluster, in a folder of their own."""

    folder: Path
    host: str = "127.0.0.1"
    environment: Mapping[str, str] = field(default_factory=dict)
    scheduler: subprocess.Popen[bytes] | None = None
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def scheduler_file(self) -> Path:
        return self.folder / "scheduler.json"

    @property
    def address(self) -> Cluster:
        return Cluster(scheduler_file=str(self.scheduler_file))

    def start_scheduler(self) -> None:
        words = ["--host", self.host, "--port", "0", "--no-dashboard", "--no-show"]
        self.scheduler = self._start("scheduler", words)
        until = time.monotonic() + START_S
        while not self.scheduler_file.exists():
            assert self.scheduler.poll() is None and time.monotonic() < until, self.read_logs()
            time.sleep(0.05)

    def start_worker(self, name: str, prefix: Sequence[str] = (), host: str = "") -> None:
        """Start a worker; prefix: words before its command, such as those of `ip netns exec`."""
        local = self.folder / f"worker-{name}"
        words = ["--name", name, "--nthreads", "1", "--no-dashboard", "--no-nanny"]
        words += ["--local-directory", str(local), "--memory-limit", "0"]
        words += ["--host", host or self.host, "--death-timeout", "60"]
        self.workers[name] = self._start("worker", words, prefix)

    def _start(
        self, what: str, words: Sequence[str], prefix: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        command = [*prefix, sys.executable, "-m", "dask", what, *words]
        command += ["--scheduler-file", str(self.scheduler_file)]
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_for_workers(self, count: int) -> None:
        """Wait until so many workers have joined; the scheduler forgets the dead ones at once."""
        from distributed import Client

        file = str(self.scheduler_file)
        with Client(scheduler_file=file, timeout=START_S, set_as_default=False) as client:
            until = time.monotonic() + START_S
            while len(client.nthreads()) != count:
                assert time.monotonic() < until, self.read_logs()
                time.sleep(0.05)

    def kill_worker(self, name: str) -> None:
        process = self.workers.pop(name)
        process.kill()
        process.wait()

    def kill_scheduler(self) -> None:
        assert self.scheduler is not None
        self.scheduler.kill()
        self.scheduler.wait()

    def stop(self) -> None:
        processes = [*self.workers.values(), *([self.scheduler] if self.scheduler else [])]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()

    def read_logs(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]


@contextmanager
def run_cluster(folder: Path, workers: int, **environment: str) -> Iterator[DaskCluster]:
    """Run a scheduler with workers `0`, `1` … on the loopback device."""
    cluster = DaskCluster(folder, environment=environment)
    try:
        cluster.start_scheduler()
        for number in range(workers):
            cluster.start_worker(str(number))
        cluster.wait_for_workers(workers)
        yield cluster
    finally:
        cluster.stop()
