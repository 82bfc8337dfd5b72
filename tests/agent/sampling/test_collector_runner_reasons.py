"""Why numbers are missing: recorded when it changes, and separate from the numbers."""

from __future__ import annotations

from array import array

from clusterprof.agent.sampling.collector_runner import MissingValueReasons
from clusterprof.errors import Unavailable
from clusterprof.trace.schema import Gap, Record

NAMES = [("cpu.quota", ""), ("cpu.used", "a")]
NO_QUOTA = Unavailable("absent", "no quota", "")
DENIED = Unavailable("denied", "not yours", "ask")


def test_a_permanently_unknown_column_is_reported_once_and_masked() -> None:
    recorded: list[Record] = []
    reasons = MissingValueReasons("c", recorded.append)
    for t_ns in (10, 30):
        # the second time it is an equal reason of its own, as one that was raised anew is
        why = NO_QUOTA if t_ns == 10 else Unavailable("absent", "no quota", "")
        values, masks = reasons.pack(NAMES, "dq", [t_ns, t_ns + 10], [(why, why), (1, 2)])
        assert values == [array("d", [0.0, 0.0]), array("q", [1, 2])]
        assert [column.typecode for column in values] == ["d", "q"]
        assert masks == [b"\1\1", None]
    assert recorded == [Gap(10, "c", "cpu.quota", "", "absent", "no quota", "")]


def test_changed_and_recurring_reasons_are_recorded_again() -> None:
    recorded: list[Record] = []
    reasons = MissingValueReasons("c", recorded.append)
    reasons.pack(NAMES, "dq", [1, 2], [(NO_QUOTA, NO_QUOTA), (1, 2)])
    reasons.pack(NAMES, "dq", [3, 4], [(DENIED, DENIED), (1, 2)])
    reasons.pack(NAMES, "dq", [5], [(0.5,), (3,)])
    values, masks = reasons.pack(NAMES, "dq", [6, 7], [(DENIED, 0.25), (1, 2)])
    assert (values[0], masks[0]) == (array("d", [0.0, 0.25]), b"\1\0")
    assert [(gap.t_ns, gap.kind) for gap in recorded] == [  # type: ignore[union-attr]
        (1, "absent"),
        (3, "denied"),
        (6, "denied"),
    ]


def test_a_reason_of_the_whole_collector_holds_until_cleared() -> None:
    recorded: list[Record] = []
    reasons = MissingValueReasons("c", recorded.append)
    assert reasons.set_for_collector(1, DENIED) and not reasons.set_for_collector(2, DENIED)
    reasons.clear_columns()  # says nothing of the whole
    assert reasons.whole == DENIED
    reasons.clear_collector()
    assert reasons.whole is None
    assert reasons.set_for_collector(3, DENIED)
    assert recorded == [Gap(t_ns, "c", "", "", "denied", "not yours", "ask") for t_ns in (1, 3)]
