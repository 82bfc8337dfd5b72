"""Jobs that are forked from a Python that has imported PyTorch: 50 ms each, in place of 3 s.

The first process starts like any job, with the probe or without, and imports PyTorch. It trains
nothing, so the probe in it has opened no ring. A job is a fork of it, in which the probe begins
anew as in any process that a job forks. Jobs whose start matters are not for this.

with WarmJobs(folder, run_dir) as jobs:
    rings = jobs.record("for batch in loader: ...")
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterprof.agent.launch import launcher
from tests.support import job_python
from tests.support.probe_jobs import LIVENESS_SECONDS, WAIT, Ring, RingWatcher, clean_environment

# The optimizers of PyTorch 2 import torch._dynamo in their first step, for a second.
_SERVER = """
import gc, json, os, sys
import torch, torch.utils.data
try:
    import torch._dynamo
except ImportError:
    pass
gc.freeze()
for _line in sys.stdin:
    _pids = []
    for _order in json.loads(_line):
        _pid = os.fork()
        if not _pid:
            break
        _pids.append(_pid)
    else:
        print(json.dumps([[_pid, os.waitpid(_pid, 0)[1]] for _pid in _pids]), flush=True)
        continue
    break
else:
    sys.exit()
for _number, _name in enumerate((os.devnull, _order["stdout"], _order["stderr"])):
    os.dup2(os.open(_name, os.O_RDWR | os.O_CREAT), _number)
sys.stdin = open(0)
os.chdir(_order["cwd"])
os.environ.update(_order["environ"])
sys.argv = ["train.py"] + _order["arguments"]
__file__ = "train.py"
exec(compile(open(__file__).read(), __file__, "exec"))
"""


@dataclass(frozen=True)
class Done:
    """How a job ended, and what it wrote."""

    pid: int
    returncode: int
    stdout: bytes
    stderr: bytes


class WarmJobs:
    """Runs jobs one after the other, each in a process of its own."""

    def __init__(self, folder: Path, run_dir: Path | None, **environ: str) -> None:
        """folder: for what the jobs write; run_dir: of the probe, None for jobs without it."""
        self.run_dir = run_dir
        self._folder, self._count = folder, 0
        self._environ = clean_environment(OMP_NUM_THREADS="1", **environ)
        if run_dir is not None:
            self._environ = launcher.with_probe_path(run_dir, self._environ)
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> WarmJobs:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._server is not None:
            self._server.communicate(timeout=LIVENESS_SECONDS)

    def run(self, code: str, *arguments: str, **environ: str) -> Done:
        """Run a job in a new folder of its own, as the file train.py."""
        return self.run_ranks(code, arguments, [environ])[0]

    def run_ranks(
        self, code: str, arguments: Sequence[str], environs: Sequence[dict[str, str]]
    ) -> list[Done]:
        """Run a process for each environment, all at once, in a new folder."""
        self._count += 1
        folder = self._folder / f"job-{self._count}"
        folder.mkdir()
        (folder / "train.py").write_text(code)
        outputs = [
            {name: str(folder / f"{name}-{rank}") for name in ("stdout", "stderr")}
            for rank in range(len(environs))
        ]
        shared = {"cwd": str(folder), "arguments": list(arguments)}
        orders = [
            {**shared, **output, "environ": environ} for output, environ in zip(outputs, environs)
        ]
        return [
            Done(
                pid,
                os.waitstatus_to_exitcode(status),
                *(
                    job_python.drop_framework_logs(Path(path).read_bytes())
                    for path in output.values()
                ),
            )
            for (pid, status), output in zip(self._ask(orders), outputs)
        ]

    def record(self, code: str, *arguments: str, **environ: str) -> list[Ring]:
        """Run a job to its good and silent end; return the rings of all its processes."""
        return self._record(code, *arguments, **environ)[0]

    def record_both_ways(self, bare: WarmJobs, code: str) -> list[Ring]:
        """Run a job with the probe and without; its output may not differ. Returns all rings."""
        rings, output = self._record(code)
        theirs = bare.run(code + WAIT)
        assert (theirs.returncode, theirs.stdout) == (0, output), theirs
        assert [ring.switched_off for ring in rings] == [0] * len(rings)
        return rings

    def _record(self, code: str, *arguments: str, **environ: str) -> tuple[list[Ring], bytes]:
        assert self.run_dir is not None
        with RingWatcher(self.run_dir) as watcher:
            done = self.run(code + WAIT, *arguments, **environ)
        errors = b"" if job_python.IS_ANOTHER else done.stderr  # another version warns of more
        assert (done.returncode, errors) == (0, b""), done.stderr.decode()
        return watcher.read_rings(), done.stdout

    def _ask(self, orders: list[dict[str, object]]) -> list[tuple[int, int]]:
        """Have processes forked; return pid and wait status of each, once all have ended."""
        if self._server is None:
            command, pipe = [job_python.PYTHON, "-c", _SERVER], subprocess.PIPE
            self._server = subprocess.Popen(
                command, env=self._environ, stdin=pipe, stdout=pipe, start_new_session=True
            )
        server = self._server
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(orders).encode() + b"\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], LIVENESS_SECONDS)[0]:
            os.killpg(server.pid, signal.SIGKILL)  # the jobs too
            server.communicate()
            self._server = None  # the next job gets a new one
            raise TimeoutError(f"a job has not ended after {LIVENESS_SECONDS} s")
        return [(pid, status) for pid, status in json.loads(server.stdout.readline())]
