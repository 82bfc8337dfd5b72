"""The demo's ring of sockets: its sums, its rate, what it says of itself."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from clusterprof.demo.allreduce import Ring
from clusterprof.errors import ClusterprofError


def rings(world: int, rate: int = 0) -> list[Ring]:
    """Rings whose links are pairs of sockets: `links[r]` goes from rank r to the next."""
    links = []
    for _ in range(world):
        with socket.create_server(("127.0.0.1", 0)) as server:
            sends = socket.create_connection(server.getsockname())
            links.append((sends, server.accept()[0]))
    return [Ring(rank, links[rank - 1][1], links[rank][0], world, rate) for rank in range(world)]


def at_once(rows: list[Ring], what: Callable[[Ring], None]) -> None:
    threads = [threading.Thread(target=what, args=(ring,)) for ring in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(("world", "size"), [(2, 5), (3, 10), (4, 100_001)])
def test_all_reduce_gives_every_rank_the_sum(world: int, size: int) -> None:
    # Rank r brings r + its index: the sum over ranks is world x index + 0 + 1 + … + world - 1.
    opened = rings(world)
    values = [np.arange(size, dtype=np.float32) + rank for rank in range(world)]
    at_once(opened, lambda ring: ring.all_reduce(values[ring.rank]))
    wanted = world * np.arange(size, dtype=np.float32) + sum(range(world))
    for value, ring in zip(values, opened):
        assert np.array_equal(value, wanted)
        ring.close()


def test_a_link_transfers_at_most_at_its_rate() -> None:
    # Of 400,000 bytes each of 2 ranks sends half, twice: 400,000 bytes at 2 MB/s take 0.2 s.
    opened = rings(2, rate=2_000_000)
    values = [np.ones(100_000, np.float32) for _ in opened]
    at_once(opened, lambda ring: ring.all_reduce(values[ring.rank]))
    for ring in opened:
        ((came_ns, left_ns),) = ring.operations
        assert left_ns - came_ns >= 200_000_000
        ring.close()


def test_all_ranks_agree_on_the_last_rank_to_arrive() -> None:
    opened = rings(3)
    order = {0: [1, 2, 0], 1: [2, 0, 1]}  # rank 0 comes last to the first, rank 1 to the second
    printed: dict[int, list[tuple[int, int]]] = {}

    def work(ring: Ring) -> None:
        for ranks in order.values():
            time.sleep(0.05 * ranks.index(ring.rank))  # on a busy machine another may be the last
            ring.all_reduce(np.ones(6, np.float32))
        printed[ring.rank] = ring.find_last_arrivals()
        ring.close()

    at_once(opened, work)
    assert printed[0] == printed[1] == printed[2]
    came = [[ring.operations[at][0] for ring in opened] for at in order]
    assert [tuple(entry) for entry in printed[0]] == [
        (max(all_), all_.index(max(all_))) for all_ in came
    ]


def test_a_lost_neighbour_rank_raises_a_clusterprof_error() -> None:
    before, after = rings(2)
    after.close()
    with pytest.raises(ClusterprofError, match="rank 0 lost"):
        before.all_reduce(np.ones(100_000, np.float32))
    before.close()
