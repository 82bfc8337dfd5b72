"""How waits for the device are merged, and the allocator, against the stand-in of `fake_cuda`."""

from __future__ import annotations

from pathlib import Path

from tests.support.fake_cuda import FAKE
from tests.support.probe_jobs import STEP, Ring, install_probe, record_code

SYNC = 18

# Each of these waits for 1,000 ns; the first wait for a batch shows CUDA to the probe.
WAITS = """
def waits(self=None):
    clock[0] += 1_000
    return 7
Tensor.item = Tensor.__bool__ = Tensor.tolist = waits
cuda.synchronize = waits
clock[0] = 1_000
wait(10)
there = Tensor(True)
"""


def ran(tmp_path: Path, code: str) -> Ring:
    (ring,) = record_code(FAKE + WAITS + code, install_probe(tmp_path / "run"))
    assert ring.switched_off == 0
    return ring


def waited(ring: Ring) -> list[tuple[int, int, int, int]]:
    return [(span.start_ns, span.end_ns, span.a, span.b) for span in ring.of(SYNC)]


def test_nearby_device_waits_are_merged_within_a_step(tmp_path: Path) -> None:
    code = """
clock[0] = 10_000
assert there.item() == 7 and there.tolist() == 7   # 10,000 … 12,000
clock[0] = 20_000
cuda.synchronize()                                  # 20,000 … 21,000
clock[0] = 5_010_000
bool(there)                                         # 5 ms after the first: another record
probe.step()
"""
    code = code.replace("bool(there)", "there.__bool__()")
    ring = ran(tmp_path, code)
    assert waited(ring) == [(10_000, 21_000, 3_000, 3), (5_010_000, 5_011_000, 1_000, 1)]
    [step] = ring.of(STEP)
    assert step.sequence > ring.of(SYNC)[-1].sequence


def test_an_exception_of_a_synchronizing_call_reaches_the_job(tmp_path: Path) -> None:
    code = """
def breaks(self):
    raise ValueError("theirs")
del Tensor.item
Tensor.item = breaks
sync = sys.modules["_clusterprof_probe.hooks.device_sync"]
sync.install(torch)
try:
    there.item()
except ValueError as error:
    print(error)
probe.step()
"""
    assert waited(ran(tmp_path, code)) == []


def test_allocator_counters_are_read_every_second_and_rises_recorded(tmp_path: Path) -> None:
    code = """
counts = {"num_alloc_retries": 2, "num_device_alloc": 70, "num_ooms": 0}
cuda.memory_stats_as_nested_dict = lambda: counts
clock[0] = 5_000_000_000
events.collect_finished_waits()  # the first reading: nothing to compare it with
clock[0] = 5_900_000_000
counts["num_alloc_retries"] = 3
events.collect_finished_waits()  # too early
clock[0] = 6_000_000_000
counts["num_device_alloc"] = 75
events.collect_finished_waits()
"""
    records = ran(tmp_path, code).of(19)
    # how often memory was given back is not known to this version
    assert [
        (record.start_ns, record.end_ns, record.a, record.b, record.c, record.d)
        for record in records
    ] == [(5_000_000_000, 6_000_000_000, 1, 5, -1, 0)]


def test_an_allocator_without_statistics_is_queried_only_once(tmp_path: Path) -> None:
    code = """
asked = []
def refuses():
    asked.append(1)
    raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")
cuda.memory_stats_as_nested_dict = refuses
for clock[0] in (5_000_000_000, 6_000_000_000, 7_000_000_000):
    events.collect_finished_waits()
assert asked == [1]
probe.step()
"""
    ring = ran(tmp_path, code)
    assert (len(ring.of(19)), len(ring.of(STEP))) == (0, 1)


def test_empty_cache_calls_and_warm_up_spans_are_recorded(tmp_path: Path) -> None:
    code = """
assert cuda.empty_cache() == 7          # 1,000 ns
with probe.span("warm_up"):
    clock[0] += 500
"""
    head = "cuda.empty_cache = cuda.synchronize\n"
    (ring,) = record_code(
        FAKE + WAITS.replace("clock[0] = 1_000", head + "clock[0] = 1_000") + code,
        install_probe(tmp_path / "run"),
    )
    spans = [(span.end_ns - span.start_ns, span.a, span.b) for span in ring.of(22)]
    assert spans == [(1_000, 2, -1), (500, 1, -1)]
