"""Records that no recorder writes are refused where they enter, and counted."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.trace.plausibility import ImplausibleError, TimeFilter, check_record
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Clock, Columns, Event, Gap, Record, Rows
from tests.support.trace_samples import HEADER, SECOND_NS, write_recording

DAY_NS = 86_400 * SECOND_NS
HOUR_NS = 3600 * SECOND_NS


def columns(*t_ns: int) -> Columns:
    """A frame of one signal."""
    values = array("d", [1.0] * len(t_ns))
    return Columns("cpu", ("cpu_busy",), ("",), array("q", t_ns), (values,), (None,))


def rows(t_ns: int) -> Rows:
    """A row of a table with times."""
    return Rows("threads", ("t_ns", "pid"), (array("q", [t_ns]), array("q", [7])))


def pass_times(frames: list[list[Record]]) -> tuple[list[Record], int]:
    """Return the records that are accepted, and how many are refused."""
    times = TimeFilter()
    accepted = [record for records in times.filter_frames(frames) for record in records]
    return accepted, times.refused


SECONDS = [[columns(n * SECOND_NS)] for n in range(5, 15)]


@pytest.mark.parametrize("far_ns", [30 * DAY_NS, -(1 << 62), 1 << 62, 4 * HOUR_NS])
@pytest.mark.parametrize("place", [0, 1, 5, 10])
def test_a_record_with_a_distant_time_is_refused(far_ns: int, place: int) -> None:
    for record in (
        columns(far_ns),
        Clock(far_ns, 0, 0),
        Event(far_ns, "oom-kill", {}),
        Gap(far_ns, "cpu", "", "", "failed", "", ""),
        rows(far_ns),
    ):
        accepted, refused = pass_times([*SECONDS[:place], [record], *SECONDS[place:]])
        assert accepted == [record for records in SECONDS for record in records]
        assert refused == 1


def test_a_recorder_stopped_for_an_hour_loses_no_records() -> None:
    later = [[columns(HOUR_NS + n * SECOND_NS)] for n in range(3)]
    accepted, refused = pass_times([*SECONDS, *later])
    assert [record.t_ns[0] for record in accepted] == [
        *(n * SECOND_NS for n in range(5, 15)),
        *(HOUR_NS + n * SECOND_NS for n in range(3)),
    ]
    assert refused == 0


def test_two_distant_records_do_not_confirm_a_time_jump() -> None:
    # the third frame at that time is the second confirmation
    far = [[columns(HOUR_NS + n * SECOND_NS)] for n in range(2)]
    accepted, refused = pass_times([*SECONDS[:5], *far, *SECONDS[5:]])
    assert (len(accepted), refused) == (10, 2)


def test_columns_with_times_far_back_within_a_frame_are_refused() -> None:
    accepted, refused = pass_times([*SECONDS, [columns(1 << 61, 6 * SECOND_NS)]])
    assert (len(accepted), refused) == (10, 1)


def test_a_recording_of_a_single_frame_passes() -> None:
    assert pass_times([[HEADER], [columns(6 * SECOND_NS)]])[1] == 0
    assert pass_times([[HEADER]]) == ([HEADER], 0)


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        ("process-registered", {"pid": "7", "started_ticks": 1}),
        ("process-registered", {"pid": 7, "started_ticks": 1 << 62}),
        ("process-exited", {"pid": []}),
        ("group-announced", {"group": 1, "ranks": [0, 1]}),
        ("group-announced", {"pid": 7, "ranks": [0, 1]}),
        ("group-announced", {"pid": 7, "group": 1, "ranks": [0, {}]}),
        ("operation-under-way", {"pid": 7, "number": None}),
        ("gpu-xid", {"pid": -1, "code": 79}),
        ("an event of a later version", {"pid": 0.5}),
    ],
)
def test_events_with_invalid_types_or_ranges_are_refused(
    kind: str, attributes: dict[str, Any]
) -> None:
    with pytest.raises(ImplausibleError, match=kind):
        check_record(Event(5 * SECOND_NS, kind, attributes))


@pytest.mark.parametrize(
    ("kind", "attributes", "wrong"),
    [
        ("process-registered", {"pid": 7, "world_size": 10**9, "rank": 3}, {"world_size"}),
        ("process-registered", {"pid": 7, "started_ticks": 1, "rank": "=cmd|1"}, {"rank"}),
        (
            "process-registered",
            {"pid": 7, "variables": None, "frameworks": 3},
            {"variables", "frameworks"},
        ),
        ("process-registered", {"pid": 7, "host_functions": [1], "new": [1]}, {"host_functions"}),
        ("process-exited", {"pid": 7, "signal": "KILL", "exit_code": 0}, {"signal"}),
        ("group-announced", {"pid": 7, "group": 1, "ranks": [0], "name": 5}, {"name"}),
        ("gpu-xid", {"code": [79], "text": "fallen off the bus"}, {"code"}),
        ("nvlink-errors", {"errors": [[3, "a", -1]], "remotes": [[3, "a", ""]]}, {"errors"}),
        ("nvlink-errors", {"error_rates": [[3, 2.0]], "errors": []}, {"error_rates"}),
        ("nvlink-states", {"down": 3, "up": [4]}, {"down"}),
        ("an event of a later version", {"pid": 7, "message": 1, "other": 2}, {"message"}),
    ],
)
def test_an_invalid_optional_attribute_is_dropped_and_the_event_kept(
    kind: str, attributes: dict[str, Any], wrong: set[str]
) -> None:
    event = Event(5 * SECOND_NS, kind, attributes)
    kept, problems = check_record(event)
    right = {name: value for name, value in attributes.items() if name not in wrong}
    assert kept == Event(5 * SECOND_NS, kind, right)
    assert len(problems) == len(wrong)
    assert all(any(name in problem for problem in problems) for name in wrong)
    assert event.attributes == attributes


def test_additions_of_a_newer_recorder_are_accepted() -> None:
    check_record(Event(5, "process-registered", {"pid": 7, "started_ticks": 1, "new": [1]}))
    check_record(Event(5, "a new kind", {"anything": {"a": []}}))
    check_record(HEADER)


def test_the_report_counts_refused_records_and_attributes(tmp_path: Path) -> None:
    seconds: list[list[Record]] = [[columns(n * SECOND_NS)] for n in range(6, 40)]
    forged: list[Record] = [
        columns(30 * DAY_NS),
        Event(8 * SECOND_NS, "process-registered", {"pid": 7, "world_size": 10**9}),
    ]
    write_recording(tmp_path / "node", [*seconds, forged])
    reader = NodeReader(tmp_path / "node")
    times = [record.t_ns[-1] for record in reader if isinstance(record, Columns)]
    assert max(times) == 39 * SECOND_NS
    assert reader.damage.implausible_records == 1
    assert reader.damage.implausible_attributes == 1
    messages = [gap.message for gap in analyze(tmp_path).coverage_gaps]
    assert any("1 records and 1 attributes of records say what no" in text for text in messages)


def test_a_registration_with_an_invalid_attribute_keeps_its_rank(tmp_path: Path) -> None:
    seconds: list[list[Record]] = [[columns(n * SECOND_NS)] for n in range(6, 40)]
    attributes = {"pid": 7, "started_ticks": 1, "rank": 5, "world_size": 8, "role": "worker"}
    registration = Event(6 * SECOND_NS, "process-registered", {**attributes, "framework": 17})
    write_recording(tmp_path / "node", [[registration], *seconds])
    reader = NodeReader(tmp_path / "node")
    (event,) = [record for record in reader if isinstance(record, Event)]
    assert event.attributes == attributes
    damage = reader.damage
    assert (damage.implausible_records, damage.implausible_attributes) == (0, 1)
    assert (
        damage.implausible_example
        == "framework of an event process-registered: Expected `str | null`, got `int`"
    )
