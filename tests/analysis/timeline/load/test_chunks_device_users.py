"""Who uses which device, as events say it: in the header of each chunk from then on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clusterprof.trace.schema import Clock, Columns, Event, Record
from tests.support.builders import build_chunks, make_header, ns


def one_second_each(seconds: int) -> list[Record]:
    """A header, and a counter that rises by one a second."""
    collected: list[Record] = [make_header()]
    for i in range(seconds):
        value = np.array([i], np.int64)
        names = ("disk.read_bytes_total",), ("vda",)
        collected.append(Columns("disk", *names, np.array([ns(i)]), (value,), (None,)))
    return collected


def test_a_device_that_appears_later_is_in_the_header_from_then_on() -> None:
    device = {"id": "emulated-0", "pid": 100, "emulated": True}
    records = [*one_second_each(25), Event(ns(12), "device-appeared", device), make_header()]
    records.append(Clock(ns(30), 0, 0))
    assert list(build_chunks(records, ns(10)))[-1].header.devices == [device]


def test_devices_name_the_processes_last_seen_to_work_on_them() -> None:
    known = replace(make_header(), devices=[{"id": "a"}, {"id": "b"}])

    def used(seconds: float, pid: int, device: str) -> Event:
        about = {"pid": pid, "started_ticks": 1, "device": device}
        return Event(ns(seconds), "device-used", about)

    records = [known, *one_second_each(25), used(3, 100, "a"), used(4, 101, "a"), used(5, 100, "b")]
    records += [known, Clock(ns(30), 0, 0)]  # every segment begins with a header
    assert list(build_chunks(records, ns(10)))[-1].header.devices == [
        {"id": "a", "users": [101]},
        {"id": "b", "users": [100]},
    ]


def test_device_owners_persist_over_new_headers() -> None:
    cores = [{"id": "neuron-0-core-0"}, {"id": "neuron-0-core-1"}]
    head = replace(make_header(), devices=cores)
    owner = {"collector": "gpu_neuron", "device": "neuron-0-core-1", "pid": 100}
    records = [head, *one_second_each(25)[1:], Event(ns(12), "device-owner", owner), head]
    records += [
        Event(ns(20), "device-owner", {**owner, "device": "elsewhere"}),
        Clock(ns(30), 0, 0),
    ]
    assert list(build_chunks(records, ns(10)))[-1].header.devices == [
        {"id": "neuron-0-core-0"},
        {"id": "neuron-0-core-1", "pid": 100},
    ]
