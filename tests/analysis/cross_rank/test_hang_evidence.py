"""What the answer of NCCL's RAS service says, and answers that are meant to harm.

The documents have the form that rasDumpCommsToJSON of NCCL 2.28.9 writes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from clusterprof.analysis.cross_rank.hang_evidence import describe_reply

GREETING = "SERVER PROTOCOL 2\nOK\nOK\n"


def member(rank: int, **counts: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": "10.0.0.1",
        "pid": 4700 + rank,
        "cuda_dev": rank,
        "nvml_dev": rank,
        "status": {
            "init_state": 0,
            "async_error": 0,
            "finalize_called": False,
            "destroy_flag": False,
            "abort_flag": False,
        },
        "collective_counts": {"Broadcast": 2, "AllReduce": 812, **counts},
    }


def missing(rank: int, dead: bool) -> dict[str, Any]:
    status = {"unresponsive": not dead, "considered_dead": dead}
    return {"rank": rank, "host": "10.0.0.3", "pid": 4711, "cuda_dev": 0, "status": status}


def answer(*communicators: dict[str, Any]) -> str:
    document = {
        "nccl_version": "2.28.9",
        "communicators_count": len(communicators),
        "communicators": list(communicators),
        "ras": {"collection_time_sec": 0.012, "timeouts_count": 0},
    }
    return GREETING + json.dumps(document, indent=2)


def communicator(ranks: list[dict[str, Any]], *absent: dict[str, Any]) -> dict[str, Any]:
    return {
        "hash": "0x5fab",
        "secondary_hash": "0x1:0x2",
        "size": len(ranks) + len(absent),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(absent),
        "ranks": ranks,
        "missing_ranks": list(absent),
    }


def test_a_rank_that_began_fewer_operations_is_named() -> None:
    reply = answer(communicator([member(0), member(1), member(2, AllReduce=811)]))
    assert describe_reply(reply) == [
        "communicator 0x5fab of 3 ranks: rank 2 began 811 AllReduce, others 812"
    ]


def test_missing_ranks_are_named_with_their_process() -> None:
    reply = answer(communicator([member(0), member(1)], missing(2, False), missing(3, True)))
    assert describe_reply(reply) == [
        "communicator 0x5fab of 4 ranks: rank 2 (process 4711 on 10.0.0.3) does not answer;"
        " rank 3 (process 4711 on 10.0.0.3) is considered dead"
    ]


def test_agreeing_ranks_give_no_hang_evidence() -> None:
    assert describe_reply(answer(communicator([member(0), member(1)]))) == []


def test_errors_of_an_older_nccl_version_are_shown() -> None:
    text = (
        GREETING.replace("OK\nOK", "OK\nERROR: Unknown command SET FORMAT json")
        + "NCCL version 2.27.3 compiled with CUDA 12.9\n\nErrors\n======\n\nDEAD\n"
        "  1 job process is considered dead (unreachable via the RAS network)\n"
        "  Process 4711 on node 10.0.0.3 managing GPU 0\n\nWarnings\n========\n\n#0-0 MISMATCH\n"
    )
    assert describe_reply(text) == [
        "DEAD 1 job process is considered dead (unreachable via the RAS network)"
        " Process 4711 on node 10.0.0.3 managing GPU 0"
    ]


@pytest.mark.parametrize(
    "reply",
    [
        GREETING,
        GREETING + "{",
        GREETING + "[" * 100_000,
        GREETING + "{" + '"a":{' * 100_000,
        GREETING + '{"communicators": 3}',
        GREETING + '{"communicators": [{"size": "x"}]}',
        GREETING + '{"communicators": [{"size": 1e999, "hash": 0, "ranks": []}]}',
        GREETING + '{"communicators": [{"size": 2, "hash": 0, "ranks": [1]}]}',
        answer(communicator([{"rank": 0, "collective_counts": {"AllReduce": "many"}}])),
    ],
)
def test_a_malformed_answer_is_reported_as_unreadable(reply: str) -> None:
    assert describe_reply(reply) == ["its answer could not be read"]
