"""Whether NVML need be tried at all on a node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.gpu.nvml_errors import explain_absence


@pytest.mark.parametrize(
    ("prepare", "known"),
    [
        (lambda folder: None, False),
        (lambda folder: (folder / "nvidiactl").touch(), True),
        (lambda folder: (folder / "libnvidia-ml.so.1").touch(), True),
        (lambda folder: (folder / "cache").write_bytes(b"..libnvidia-ml.so.1.."), True),
        (lambda folder: (folder / "cache").unlink(), True),  # only the loader can say
    ],
)
def test_nodes_without_a_driver_start_no_helper(
    tmp_path: Path, prepare: Callable[[Path], Any], known: bool
) -> None:
    cache = tmp_path / "cache"
    cache.write_bytes(b"libc.so.6")
    prepare(tmp_path)
    environ = {"LD_LIBRARY_PATH": f":{tmp_path}"}
    reason = explain_absence(environ, [str(tmp_path / "nvidiactl")], str(cache))
    assert (reason is None) == known
    if reason is not None:
        assert (reason.kind, reason.message) == ("absent", "libnvidia-ml.so.1 was not found")
        assert "driver" in reason.remedy
