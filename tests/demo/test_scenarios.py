"""The demo's faults are real: reads reach the device, CPU time is used."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from clusterprof.demo.scenarios import ColdFile, require_real_disk, run_busy_loop, write_dataset
from clusterprof.errors import ClusterprofError

MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
tmpfs /tmp tmpfs rw 0 0
/dev/nvme0n1 /tmp/scratch xfs rw 0 0
"""


def test_a_folder_on_tmpfs_is_refused_with_a_remedy() -> None:
    with pytest.raises(ClusterprofError, match=r"/tmp/x is in memory \(tmpfs on /tmp\)") as caught:
        require_real_disk(Path("/tmp/x"), MOUNTS)
    assert "TMPDIR" in caught.value.remedy


@pytest.mark.parametrize("folder", ["/var/data", "/tmp/scratch/run", "/tmpfoo"])
def test_a_folder_on_a_disk_is_accepted(folder: str) -> None:
    require_real_disk(Path(folder), MOUNTS)


def test_cold_reads_bypass_the_page_cache(tmp_path: Path) -> None:
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    try:
        require_real_disk(tmp_path.resolve(), mounts)
    except ClusterprofError as error:
        pytest.skip(str(error))
    path = tmp_path / "dataset.bin"
    write_dataset(path, 8 << 20)
    assert path.stat().st_size == 8 << 20
    file = ColdFile(path, 16 * 1024, seed=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    read_ns, delay_ns = file.read_batch(40)
    assert read_ns > 0
    assert delay_ns >= 0
    blocks_of_512 = resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before
    # 40 random choices among 512 records hit about 39 different ones; a cache would serve repeats
    assert blocks_of_512 * 512 >= 30 * 16 * 1024
    assert file.read_batch(1, for_ns=20_000_000)[0] >= 20_000_000


def test_the_busy_loop_uses_cpu_time_of_its_thread() -> None:
    before_ns = time.thread_time_ns()
    wall_ns = run_busy_loop(20_000_000)
    assert time.thread_time_ns() - before_ns >= 20_000_000
    assert wall_ns >= 20_000_000
    assert os.getpid()  # still here: nothing was forked to do it
