"""Real `clusterprof` processes without start-up time: a process that has imported everything forks.

with Forks() as forks:
    done = forks.run("analyze", "storage", stdout="/dev/full")

A RUN that is the name of a report made by hand (tests/support/reports.py) gives that report.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.commands import TESTS, make_environment

_SERVER = """
import gc, json, os, resource, sys
sys.path.insert(0, {root!r})
from tests.support import reports
import clusterprof.analysis.pipeline as local
from clusterprof.cli import commands
from clusterprof.cli.app import main
import clusterprof.gate, clusterprof.analysis.live, clusterprof.output.renderers.top_screen
from clusterprof.output.renderers.base import RENDERERS
list(RENDERERS)  # each is loaded when it is asked for
really = local.analyze_with_request
def analyze_with_request(paths, request):
    made = reports.ALL.get(paths[0].name)
    return made() if made is not None else really(paths, request)
local.analyze_with_request = analyze_with_request

def child(order):
    os.chdir(order["cwd"])
    errors = os.open(order["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(errors, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if order["stdout"] == "gone":
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)
    elif order["stdout"] == "closed":
        os.close(1)
        sys.stdout = None
    else:
        os.dup2(os.open(order["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 1)
    if order["encoding"] and sys.stdout is not None:
        sys.stdout.reconfigure(encoding=order["encoding"])
    if order["bytes_at_most"]:
        most = order["bytes_at_most"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    if order["nobody"] and os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    os.close(answers.fileno())
    sys.argv = ["clusterprof", *order["arguments"]]
    sys.exit(main())

answers = os.fdopen(os.dup(1), "w")
sys.stdout = open(os.devnull, "w")
for warm in {warm!r}:
    main(warm)  # whatever it imports is imported once
sys.stdout = os.fdopen(1, "w")
gc.freeze()
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        child(json.loads(line))
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
"""


@dataclass(frozen=True)
class CompletedCommand:
    """Exit status and output of a process."""

    code: int
    errors: str
    stdout: bytes


class CommandForker:
    """Runs commands one after another, each in a forked process."""

    def __init__(self, folder: Path, *warm: tuple[str, ...]) -> None:
        """`warm`: commands that the first process carries out, so that no other need import."""
        self._folder, self._warm = folder, [list(arguments) for arguments in warm]
        self._server: Any = None

    def __enter__(self) -> CommandForker:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER.format(root=str(TESTS.parent), warm=self._warm)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=make_environment(),
            text=True,
        )
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait(timeout=30)

    def run(
        self,
        *arguments: str,
        stdout: str = "",
        cwd: Path | None = None,
        encoding: str = "",
        bytes_at_most: int = 0,
        nobody: bool = False,
    ) -> CompletedCommand:
        """Run one command. `stdout`: a path, or "gone" (a pipe nobody reads) or "closed"."""
        errors, out = self._folder / "errors", self._folder / "stdout"
        out.unlink(missing_ok=True)
        order = {
            "arguments": arguments,
            "stdout": stdout or str(out),
            "errors": str(errors),
            "cwd": str(cwd or self._folder),
            "encoding": encoding,
            "bytes_at_most": bytes_at_most,
            "nobody": nobody,
        }
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        log = errors.read_text(encoding="utf-8")
        return CompletedCommand(code, log, out.read_bytes() if out.exists() else b"")
