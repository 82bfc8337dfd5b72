"""One recorder on a node, however many processes of a job begin at once."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.recording_runs import (
    RECORD,
    get_run_dir,
    list_events,
    make_environment,
    make_job_id,
    run_launcher,
    wait_for_end,
    wait_until,
)


@pytest.fixture
def job() -> Iterator[str]:
    name = make_job_id("one")
    yield name
    wait_until(lambda: not get_run_dir(name).exists())  # every recorder left, and tidied up


def test_sixteen_ranks_elect_a_single_recorder(tmp_path: Path, job: str) -> None:
    out = tmp_path / "out"
    body = """
        import time
        children, (reads, writes) = [], os.pipe()
        for rank in range(16):
            child = os.fork()
            if child == 0:
                os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
                os.dup2(reads, 0)
                os.close(writes)
                command = ["/bin/cat"]  # until the last of them has begun, and a while longer
                request = LaunchRequest(command, Path(sys.argv[1]), Plan, "auto")
                record_command(request, os.environ, lambda line: print("line", flush=True))
            children.append(child)
        for child in children:
            while open(f"/proc/{child}/comm").read() != "cat\\n":
                time.sleep(0.01)
        time.sleep(0.5)
        os.close(writes)
        print(sorted(os.waitpid(child, 0)[1] for child in children))
        """
    output = run_launcher(out, job, body, hold=False)
    assert output.splitlines() == ["line", str([0] * 16)]  # one line, from the one that started it
    wait_for_end(out)
    assert len(list(out.iterdir())) == 1
    ranks = [event.attributes["rank"] for event in list_events(out, "process-registered")]
    assert sorted(ranks) == list(range(16))
    assert len(list_events(out, "process-exited")) == 16


def test_a_later_process_of_the_job_elects_a_new_recorder(tmp_path: Path, job: str) -> None:
    out, env = tmp_path / "out", make_environment(job)
    for _ in range(2):
        done = subprocess.run(
            [*RECORD, "-o", str(out), "--", "/bin/true"], env=env, capture_output=True, check=False
        )
        assert done.returncode == 0
        wait_until(lambda: not get_run_dir(job).exists())
    assert len(list(out.iterdir())) == 2
