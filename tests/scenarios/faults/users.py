"""Two users on one node, and what of a job's secrets enters its recording."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

from clusterprof.agent.launch.election import build_run_dir_path, choose_base
from clusterprof.agent.launch.identity import read_short_boot_id
from clusterprof.agent.linux.files import Roots
from clusterprof.trace.reader import NodeReader, list_node_folders
from tests.scenarios.faults.model import Fault, NotPossible, Trial
from tests.scenarios.faults.rig import PATIENCE_S, RecordedJob, list_children, wait_until_gone
from tests.support.recording_runs import (
    PYTHON,
    RECORD,
    get_run_dir,
    list_files,
    make_environment,
    make_job_id,
    wait_until,
)

NOBODY = 65534
ROOT = Path(__file__).resolve().parents[3]
SECRETS = 60


def share_node(folder: Path, number: int) -> Trial:
    """Record the same job id as two users; neither sees nor disturbs the other."""
    _require_nobody()
    job = make_job_id(f"users{number}")
    theirs = folder / "theirs"
    theirs.mkdir()
    shutil.chown(theirs, NOBODY, NOBODY)
    folder.chmod(0o755)
    folder.parent.chmod(0o755)
    own, other = (_start(folder / "own", job, None), _start(theirs / "out", job, NOBODY))
    try:
        wait_until(lambda: _has_frames(folder / "own") and _has_frames(theirs / "out"), PATIENCE_S)
        run_dir = get_run_dir(job)
        readable = [run_dir, folder / "own"]
        for path in readable:
            script = "import os, sys; os.listdir(sys.argv[1])"
            done = _run_as(NOBODY, [PYTHON, "-c", script, str(path)])
            assert done.returncode != 0 and "PermissionError" in done.stderr, path
    finally:
        for process in (own, other):
            assert process.wait(PATIENCE_S) == 0
    for out, uid in ((folder / "own", 0), (theirs / "out", NOBODY)):
        (node,) = list_node_folders(out)
        assert node.stat().st_uid == uid
        assert stat.S_IMODE(node.stat().st_mode) == 0o700
        pids = {
            record.attributes["pid"]
            for record in NodeReader(node)
            if getattr(record, "kind", "") == "process-registered"
        }
        assert len(pids) == 1, f"{len(pids)} processes in a recording of one"
    return Trial()


def plant_files(folder: Path, number: int) -> Trial:
    """Let another user plant a folder, a link, a pipe or a file where the run directory will be."""
    _require_nobody()
    job = make_job_id(f"planted{number}")
    path = build_run_dir_path(choose_base(os.environ), read_short_boot_id(Roots()), job)
    victim = folder / "victim"
    victim.mkdir()
    kinds = (
        f"import os; os.mkdir({str(path)!r}, 0o777)",
        f"import os; os.symlink({str(victim)!r}, {str(path)!r})",
        f"import os; os.mkfifo({str(path)!r})",
        f"open({str(path)!r}, 'w').write('x')",
    )
    planted = _run_as(NOBODY, [PYTHON, "-c", kinds[number % len(kinds)]])
    if planted.returncode:
        raise NotPossible(f"nobody cannot plant: {planted.stderr[-100:]}")
    try:
        done = subprocess.run(
            [*RECORD, "-o", str(folder / "out"), "--", "/bin/echo", "trained"],
            env=make_environment(job),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        inside = list(victim.iterdir()) + (list(path.iterdir()) if path.is_dir() else [])
    finally:
        _run_as(NOBODY, ["/bin/rm", "-rf", str(path)])
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "not recording" in done.stderr, done.stderr
    assert not inside, f"something was written to it: {inside}"
    return Trial()


def plant_secrets(folder: Path, number: int) -> Trial:
    """Plant 60 secrets in environment and command line; none enters the recording."""
    secrets = [f"s3cr3t-{at:02d}-{os.getpid()}" for at in range(SECRETS)]
    variables = {f"API_TOKEN_{at}": secret for at, secret in enumerate(secrets[:40])}
    program = "import sys, time; time.sleep(1.0); sys.exit(7)"
    out = folder / "out"
    job = make_job_id(f"secrets{number}")
    process = subprocess.Popen(
        [*RECORD, "-o", str(out), "--", PYTHON, "-c", program, *secrets[40:]],
        env=make_environment(job, **variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.wait(PATIENCE_S) == 7
    wait_until(lambda: not get_run_dir(job).exists(), PATIENCE_S)
    time.sleep(0.3)
    written = b"".join(path.read_bytes() for path in list_files(out))
    for words in (("dump",), ("analyze", "--full"), ("analyze", "--json")):
        command = [PYTHON, "-m", "clusterprof", words[0], str(out), *words[1:]]
        written += subprocess.run(command, capture_output=True, check=True).stdout
    assert job.encode() in written  # the search can find something
    entered = [secret for secret in secrets if secret.encode() in written]
    assert not entered, f"{len(entered)} of {SECRETS} secrets were recorded"
    return Trial(0.0, SECRETS)


def redact_recording(folder: Path, number: int) -> Trial:
    """Plant names in paths, launcher variables and folders of a redacted job; none is recorded."""
    word = f"s3cr3t{os.getpid()}n{number}"
    scripts = folder / f"home-{word}" / "project"
    scripts.mkdir(parents=True)
    script = scripts / f"train-{word}.py"
    script.write_text(
        "import time, clusterprof\n"
        "def loop():\n"
        "    for _ in range(150):\n"
        "        with clusterprof.span('work'):\n"
        "            sum(range(20000)); time.sleep(0.005)\n"
        "        clusterprof.step()\n"
        "loop()\n"
    )
    out, job = folder / "out", make_job_id(f"redact-{word}")
    variables = {"MASTER_ADDR": f"{word}.example.org", "RANK": "0", "WORLD_SIZE": "1"}
    process = subprocess.Popen(
        [*RECORD, "-o", str(out), "--redact", "--", PYTHON, str(script)],
        env={**make_environment(job, **variables), "PYTHONPATH": str(ROOT)},
        cwd=scripts,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.wait(PATIENCE_S) == 0
    wait_until(lambda: not get_run_dir(job).exists(), PATIENCE_S)
    time.sleep(0.3)
    written = b"".join(path.read_bytes() for path in list_files(out))
    written += b"".join(str(path.relative_to(out)).encode() for path in list_files(out))
    command = [PYTHON, "-m", "clusterprof", "dump", str(out)]
    dumped = subprocess.run(command, capture_output=True, check=True).stdout
    assert b"process-registered" in dumped and b"stacks-defined" in dumped
    assert word.encode() not in written + dumped, "a planted name was recorded"
    hostname = os.uname().nodename.encode()
    assert b'"hostname":"' + hostname not in dumped
    return Trial(0.0, 5)


def open_sockets(folder: Path, number: int) -> Trial:
    """Look for sockets of the recorder and its helpers that listen or lead elsewhere."""
    with RecordedJob(folder, number) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        time.sleep(5.0)  # a helper that listens would have been started
        end_s = time.monotonic() + PATIENCE_S
        others = _list_sockets(agent)
        while list_children(agent) and not others and time.monotonic() < end_s:
            time.sleep(0.5)  # on a busy machine it takes long until it listens
            others = _list_sockets(agent)
        job.end()
        wait_until_gone(agent)
    assert not others, f"{len(others)} sockets that are not of netlink"
    return Trial(0.0)


def _list_sockets(agent: int) -> set[str]:
    """Return the sockets of the recorder and its helpers that are not of netlink."""
    inodes = {
        os.readlink(link).removeprefix("socket:[").removesuffix("]")
        for pid in (agent, *list_children(agent))
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if os.path.islink(link) and os.readlink(link).startswith("socket:")
    }
    return inodes - {line.split()[9] for line in _read_table("/proc/net/netlink")}


def _read_table(path: str) -> list[str]:
    return Path(path).read_text().splitlines()[1:]


def _require_nobody() -> None:
    if os.geteuid() != 0:
        raise NotPossible("becoming another user needs root")
    done = _run_as(NOBODY, [PYTHON, "-c", "import clusterprof, msgspec"])
    if done.returncode:
        raise NotPossible(f"nobody cannot run this Python: {done.stderr.strip()[-100:]}")


def _start(out: Path, job: str, user: int | None) -> subprocess.Popen[bytes]:
    command = [*RECORD, "-o", str(out), "--", PYTHON, "-c", "import time; time.sleep(4)"]
    return subprocess.Popen(
        command,
        env=make_environment(job, HOME="/"),
        stderr=subprocess.DEVNULL,
        user=user,
        group=user,
        extra_groups=[] if user is not None else None,
        cwd=ROOT,
    )


def _run_as(user: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            user=user,
            group=user,
            extra_groups=[],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "HOME": "/"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except PermissionError as error:
        return subprocess.CompletedProcess(command, 126, "", str(error))


def _has_frames(out: Path) -> bool:
    return any(path.stat().st_size > 0 for path in out.glob("*/000001.cpf"))


assert sys.platform == "linux"

FAULTS = (
    Fault(
        "two-users",
        "two users record jobs of the same id on one node",
        "root and nobody",
        share_node,
        4,
        40,
    ),
    Fault(
        "planted-files",
        "another user plants a folder, a link, a pipe or a file at the run directory's path",
        "nobody writes to /dev/shm first",
        plant_files,
        8,
        80,
    ),
    Fault(
        "secrets",
        "60 secrets stand in environment and command line",
        "searched in the recording, its dump and its reports",
        plant_secrets,
        4,
        40,
        "secrets recorded",
        "secrets",
    ),
    Fault(
        "redacted",
        "names stand in the job's id, its folders, its script, MASTER_ADDR; `record --redact`",
        "searched in the recording, its file names and its dump",
        redact_recording,
        4,
        40,
        "names recorded",
        "names",
    ),
    Fault(
        "sockets",
        "the sockets of recorder and helpers are listed while it records",
        "/proc/PID/fd, without those of netlink",
        open_sockets,
        4,
        40,
        "sockets",
        at_once=2,
    ),
)
