"""deploy/containers: the uploader against a store on this machine, and what the images may do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import make_environment
from tests.support.recording_runs import wait_until

CONTAINERS = Path(__file__).parents[2] / "deploy/containers"
UPLOAD = CONTAINERS / "upload.py"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[object, dict[str, str]]]:
    """A bucket in an object store on this machine, and the variables by which it is found."""
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs")
    moto_server = pytest.importorskip("moto.server", reason="needs moto[server]")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    bucket = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    bucket.mkdir("sidecar")  # of its own: all stores of a process are one
    yield bucket, variables
    server.stop()


def start_upload(
    folder: Path, variables: dict[str, str], interval: str = "0.1"
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(UPLOAD), str(folder), "s3://sidecar/team/run", interval],
        env=make_environment(**variables),
        stderr=subprocess.PIPE,
        text=True,
    )


def test_growing_files_are_uploaded_repeatedly_and_at_the_end(
    tmp_path: Path, store: tuple[object, dict[str, str]]
) -> None:
    bucket, variables = store
    node = tmp_path / "run/node-a"
    node.mkdir(parents=True)
    first, second = node / "000001.cpf", node / "000002.cpf"
    first.write_bytes(b"one")
    (node / ".agent.pid.1.tmp").write_bytes(b"temporary")
    (node / "nccl").symlink_to("/etc")

    def read(name: str) -> bytes:
        path = f"sidecar/team/run/node-a/{name}"
        return bucket.cat_file(path) if bucket.exists(path) else b""  # type: ignore[attr-defined]

    uploader = start_upload(tmp_path / "run", variables)
    try:
        wait_until(lambda: read("000001.cpf") == b"one")
        first.write_bytes(b"one and more")
        wait_until(lambda: read("000001.cpf") == b"one and more")
        second.write_bytes(b"two")
        uploader.send_signal(signal.SIGTERM)
        assert uploader.communicate(timeout=30)[1] == ""
    finally:
        uploader.kill()
        uploader.wait()
    assert (uploader.returncode, read("000002.cpf")) == (0, b"two")
    names = sorted(Path(name).name for name in bucket.find("sidecar"))  # type: ignore[attr-defined]
    assert names == ["000001.cpf", "000002.cpf"]


def test_an_unreachable_store_is_reported_and_exits_with_1(tmp_path: Path) -> None:
    pytest.importorskip("s3fs", reason="needs s3fs")
    (tmp_path / "file").write_bytes(b"x")
    variables = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_MAX_ATTEMPTS": "1",
    }
    uploader = start_upload(tmp_path, variables, "60")
    try:
        wait_until(lambda: "SigCgt" in (text := read_status(uploader.pid)) and has_handler(text))
        uploader.send_signal(signal.SIGTERM)
        errors = uploader.communicate(timeout=60)[1]
    finally:
        uploader.kill()
        uploader.wait()
    assert uploader.returncode == 1
    assert "clusterprof-upload: " in errors and "trying again" in errors


def read_status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def has_handler(status: str) -> bool:
    """Return whether a process handles SIGTERM."""
    caught = int(re.search(r"SigCgt:\s*([0-9a-f]+)", status)[1], 16)  # type: ignore[index]
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_a_missing_argument_prints_the_usage() -> None:
    pytest.importorskip("fsspec")
    done = subprocess.run([sys.executable, str(UPLOAD)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "clusterprof-upload FOLDER" in done.stderr


def test_every_image_runs_as_an_unprivileged_user() -> None:
    text = (CONTAINERS / "Containerfile").read_text(encoding="utf-8")
    stages = {part.split()[-1]: part for part in re.split(r"(?m)^(?=FROM )", text)[1:] if part}
    stages = {re.match(r"FROM \S+ AS (\w+)", part)[1]: part for part in stages.values()}  # type: ignore[index]
    assert set(stages) == {"source", "portable", "agent", "analysis"}
    for name in ("agent", "analysis"):
        assert re.findall(r"(?m)^USER (\S+)", stages[name]) == ["65532:65532"]
    copied = re.findall(r"(?m)^COPY (?!--from)(?:--\S+ )?(.+) \S+$", text)
    root = CONTAINERS.parents[1]
    missing = [name for line in copied for name in line.split() if not (root / name).exists()]
    assert missing == []
    assert os.access(CONTAINERS / "install-agent.sh", os.R_OK)
