"""The capture script lets nothing through that names a machine or a job."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.tools.capture_host import ALLOWED, main, scrub, scrub_path

HOSTS = Path(__file__).parents[1] / "hosts"


def test_a_captured_host_holds_only_counters_and_neutral_names(tmp_path) -> None:
    root = tmp_path / "machine"
    shutil.copytree(HOSTS / "h100-node", root)
    (root / "proc/self/cgroup").write_text("0::/slurm/job_7/step_0\n")
    (root / "proc/self/mountstats").write_text((root / "proc/4711/mountstats").read_text())
    (root / "proc/cmdline").write_text("BOOT_IMAGE=secret\n")
    assert main(["copy", "--root", str(root), "--into", str(tmp_path / "hosts")]) == 0
    copy = tmp_path / "hosts/copy"
    names = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert "proc/cmdline" not in names
    assert "sys/fs/cgroup/level1/level2/cpu.max" in names
    assert (copy / "proc/self/cgroup").read_text() == "0::/level1/level2/level3\n"
    text = "".join((copy / name).read_text() for name in names)
    assert [word for word in ("job_7", "slurm", "mapper", "secret") if word in text] == []
    assert (copy / "proc/meminfo").read_text() == (root / "proc/meminfo").read_text()


def test_an_existing_capture_is_not_overwritten(tmp_path) -> None:
    (tmp_path / "there/proc").mkdir(parents=True)
    assert main(["there", "--into", str(tmp_path)]) == 2
    assert list((tmp_path / "there/proc").iterdir()) == []


def test_names_and_identifiers_are_scrubbed() -> None:
    assert scrub_path("sys/fs/cgroup/cpu/kubepods/pod3f/cpu.stat") == (
        "sys/fs/cgroup/cpu/level1/level2/cpu.stat"
    )
    mounts = (
        "27 1 254:0 / / rw - ext4 /dev/disk/by-uuid/3f rw,secret\n"
        "28 27 0:5 / /srv/anna rw - tmpfs tmpfs rw\n"
        "29 27 0:6 / /data rw - nfs4 filer.example.org:/vol/anna rw,addr=10.1.2.3\n"
    )
    assert scrub("mountinfo", mounts) == (
        "27 1 254:0 / / rw - ext4 /dev/root rw\n"
        "29 27 0:6 / /data rw - nfs4 server:/export rw,addr=192.0.2.1\n"
    )
    stat = "cpu  1\n" + "".join(f"cpu{n} 1\n" for n in range(6)) + "btime 1795221824\n"
    assert scrub("stat", stat) == ("cpu  1\ncpu0 1\ncpu1 1\ncpu2 1\ncpu3 1\nbtime 1700000000\n")
    assert not [pattern for pattern in ALLOWED if "cmdline" in pattern or "environ" in pattern]
