"""What processes use of graphics devices, out of their descriptors' files."""

from __future__ import annotations

import os
from typing import Any

from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.gpu.process_usage import (
    Client,
    DrmDescriptors,
    JobUsage,
    find_main_device,
    parse_client,
)
from clusterprof.errors import Unavailable

S = 1_000_000_000
XE, I915 = "0000:29:00.0", "0000:9a:00.0"
DEVICES = {XE: [(XE, 0)], I915: [(I915, 0)]}


def usage(roots: Roots, pids: list[int], times: list[int]) -> JobUsage:
    return JobUsage(roots, ("xe", "i915"), lambda: pids, DEVICES, iter(times).__next__)


def edit(roots: Roots, pid: int, fd: int, old: str, new: str) -> None:
    path = roots.proc / f"{pid}/fdinfo/{fd}"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_clients_of_xe_and_i915_are_parsed() -> None:
    xe = (
        "pos:\t0\ndrm-driver:\txe\ndrm-client-id:\t17\ndrm-pdev:\t0000:29:00.0\n"
        "drm-total-vram0:\t9 MiB\ndrm-resident-vram0:\t3 MiB\ndrm-resident-vram1:\t5 KiB\n"
        "drm-cycles-ccs:\t400\ndrm-total-cycles-ccs:\t1000\ndrm-engine-capacity-ccs:\t4\n"
    )
    assert parse_client(7, xe) == Client(
        7, "xe", XE, 17, {}, {"ccs": (400, 1000)}, (3 << 20) + (5 << 10)
    )
    i915 = (
        "drm-driver:\ti915\ndrm-pdev:\t0000:9A:00.0\ndrm-client-id:\t3\n"
        "drm-engine-render:\t12 ns\ndrm-engine-video-enhance:\t5 ns\n"
        "drm-engine-capacity-video:\t2\n"
    )
    assert parse_client(7, i915) == Client(
        7, "i915", I915, 3, {"render": 12, "video-enhance": 5}, {}, None
    )


def test_text_instead_of_numbers_is_ignored() -> None:
    text = (
        "drm-driver:\txe\ndrm-client-id:\t1\ndrm-pdev:\t0000:29:00.0\ndrm-cycles-ccs:\t-4\n"
        "drm-total-cycles-ccs:\t9\ndrm-cycles-rcs:\t4\ndrm-engine-copy:\tmany ns\n"
        "drm-resident-vram0:\t4 furlongs\ndrm-memory-vram:\t8\n"
    )
    assert parse_client(7, text) == Client(7, "xe", XE, 1, {}, {}, 8)
    assert parse_client(7, "pos:\t0\nflags:\t02\n") is None
    assert parse_client(7, "drm-driver:\txe\ndrm-pdev:\t0000:29:00.0\n") is None


def test_duplicated_descriptors_count_as_a_single_client(host: Any) -> None:
    drm_descriptors = DrmDescriptors(host("intel-max-node"), ("xe", "i915"))
    drm_descriptors.search([4711, 4712, 4799])
    assert [(client.pid, client.pci, client.client_id) for client in drm_descriptors.clients()] == [
        (4711, XE, 17),
        (4712, I915, 3),
    ]
    assert drm_descriptors.denied is None


def test_busy_shares_come_from_cycles_or_nanoseconds(host_copy: Any) -> None:
    roots = host_copy("intel-max-node")
    reader = usage(roots, [4711, 4712], [10 * S, 12 * S, 14 * S, 16 * S])
    first = reader.read()
    assert first.shares == {XE: 0.0, I915: 0.0}  # what was done before is not of this time
    assert first.memory_bytes == {XE: 1 << 30, I915: 512 << 20}
    assert (first.processes, first.works_on) == ({XE: 1, I915: 1}, {4711: XE, 4712: I915})
    for fd in (12, 13):
        edit(roots, 4711, fd, "drm-cycles-ccs:\t600000", "drm-cycles-ccs:\t650000")
        edit(roots, 4711, fd, "drm-total-cycles-ccs:\t1000000", "drm-total-cycles-ccs:\t1200000")
    edit(roots, 4712, 8, "compute:\t2000000000 ns", "compute:\t2500000000 ns")
    edit(roots, 4712, 8, "copy:\t99 ns", "copy:\t999999999 ns")  # copies are no computing
    assert reader.read().shares == {XE: 0.25, I915: 0.25}
    edit(roots, 4712, 8, "compute:\t2500000000 ns", "compute:\t2400000000 ns")
    assert reader.read().shares == {XE: 0.0, I915: 0.0}  # it may fall for a moment …
    edit(roots, 4712, 8, "compute:\t2400000000 ns", "compute:\t2900000000 ns")
    assert reader.read().shares == {XE: 0.0, I915: 0.2}  # … and what it had is not counted twice


def test_parallel_engines_add_up_to_at_most_the_elapsed_time(host_copy: Any) -> None:
    roots = host_copy("intel-max-node")
    reader = usage(roots, [4712], [10 * S, 11 * S])
    reader.read()
    edit(roots, 4712, 8, "compute:\t2000000000 ns", "compute:\t5000000000 ns")
    assert reader.read().shares[I915] == 1.0


def test_without_engine_times_the_busy_share_is_unknown(host_copy: Any) -> None:
    roots = host_copy("intel-max-node")
    path = roots.proc / "4712/fdinfo/8"
    lines = [line for line in path.read_text().splitlines() if "engine" not in line]
    path.write_text("\n".join(lines) + "\n")
    share = usage(roots, [4712], [1]).read().shares[I915]
    assert isinstance(share, Unavailable) and share.kind == "absent"


def test_a_hidden_process_is_denied(host_copy: Any, as_nobody: Any) -> None:
    roots = host_copy("intel-max-node")
    os.chmod(roots.proc / "4712/fd", 0)
    with as_nobody():
        readings = usage(roots, [4711, 4712], [1]).read()
    assert readings.denied is not None and readings.denied.kind == "denied"
    assert readings.works_on == {4711: XE}


def test_a_process_belongs_to_the_device_with_twice_the_memory() -> None:
    assert find_main_device({"a": 10, "b": 5}) == "a"
    assert find_main_device({"a": 10, "b": 6}) == ""
    assert find_main_device({"a": 0}) == ""
    assert find_main_device({}) == ""


def test_amd_memory_comes_from_kfd_in_the_same_pid_namespace(host_copy: Any) -> None:
    roots = host_copy("mi300x-node")
    devices = {
        "0000:05:00.0": [("one", 4711)],
        "0000:85:00.0": [("two", 4812)],
        "0000:a5:00.0": [("three/0", 5001), ("three/1", 5002)],
    }

    def read() -> Any:
        return JobUsage(roots, ("amdgpu",), lambda: [4711, 4712], devices, lambda: 1).read()

    held = {"one": 68_000_000_000, "two": 2 << 20, "three/0": 0, "three/1": 9_000_000_000}
    assert read().memory_bytes == held
    assert read().works_on == {4711: "one", 4712: "three/1"}
    (roots.proc / "self/ns/pid").unlink()
    (roots.proc / "self/ns/pid").symlink_to("pid:[4026532999]")  # a container: other numbers
    assert read().memory_bytes == {"one": 1 << 30, "two": 2 << 20}
    assert read().works_on == {4711: "one"}  # which partition, its file does not tell
