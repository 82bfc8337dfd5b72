"""What can hold up data between ranks that have all come: causes, limits and pages.

No detector claims them: `attribution/net_split.py` shares out the time in transfers once all
recordings lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterprof.findings import Cause

TRANSFER = Cause(
    "net-transfer",
    "network",
    "All ranks had come, and the data were still on their way",
    "Overlap communication with computation, send less, or use a faster link",
)
AT_RATE = Cause(
    TRANSFER.id,
    TRANSFER.family,
    "The data were on their way, at the rate of the links",
    "No fault: overlap communication with computation, send less, or use a faster link",
)
AT_PACE = Cause(
    TRANSFER.id,
    TRANSFER.family,
    "The data were on their way, each time about as long",
    TRANSFER.advice,
)
AT_SLOW_PACE = Cause(
    TRANSFER.id,
    TRANSFER.family,
    "Data move slowly between all ranks, each time alike",
    "Find out which path they take, and what it gives by itself",
)
BEYOND = Cause(
    TRANSFER.id,
    TRANSFER.family,
    "The data were on their way for longer than they need",
    "Record the counters that are missing, and look at switches and neighbours at those times",
)
LINK = Cause(
    "net-link",
    "network",
    "A bad link slows the data down",
    "Drain the link that is named, then reseat or replace cable, transceiver or port",
)
CONGESTION = Cause(
    "net-congestion",
    "network",
    "Data queue up in the network",
    "Check routing and congestion control, spread traffic over rails, or move the job away from"
    " its neighbours",
)
PATH = Cause(
    "net-path",
    "network",
    "Data take a slow path while a faster one is idle",
    "Point the job at the fast interface (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME)",
)


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """When time beyond what transfers need counts."""

    beyond_at_least_ratio: float = 0.1
    """Less than this part of the transfers of some nodes is how durations vary, and claimed by
    none."""
    unsure_at_least_ratio: float = 0.5
    """The same where the rate is not known and only round trips, or loss without these, speak for
    a fault: a path that is full all the time shows them too, and there durations are alike."""
    small_at_most_bytes: int = 1 << 20
    """Messages up to this size take round trips rather than a rate; they are expected to take what
    the fastest tenth of them took, or longer."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """When a link counts as bad."""

    retransmits_at_least_ratio: float = 0.001
    """Segments sent again over segments sent."""
    errors_per_minute_at_least_count: float = 6.0
    """Packets with errors, symbol errors, or recoveries of the link, of one port."""
    rate_at_most_ratio: float = 0.75
    """Rate of a link over that of its peers on the other nodes."""


@dataclass(frozen=True, slots=True)
class CongestionLimits:
    """When a path counts as congested."""

    marks_per_second_at_least_count: float = 10.0
    """Packets marked by a switch, notifications of such, or pause frames, of one port."""
    drops_per_minute_at_least_count: float = 6.0
    """Packets dropped for want of room, of one port."""
    wait_at_least_ratio: float = 0.2
    """Ticks in which a port had data and could not send, over these and those in which it sent."""
    round_trip_at_least_ratio: float = 3.0
    """Round trip of the job's connections over the shortest they had."""
    queue_at_least_bytes: int = 1 << 16
    """What waits to be sent in them, all that while."""
    busy_at_least_ratio: float = 0.7
    """Traffic over the rate of the link, when half of the traffic is not the job's."""


@dataclass(frozen=True, slots=True)
class PathLimits:
    """When a path counts as wrong."""

    faster_at_least_ratio: float = 2.0
    """Rate of the idle interface over that of the one in use."""
    idle_at_most_ratio: float = 0.01
    """Traffic of the idle interface over that of the one in use."""
    uneven_at_least_ratio: float = 2.0
    """Traffic of the busiest rail of a node over that of the least busy one in use."""


LIMITS: dict[str, type] = {
    TRANSFER.id: TransferLimits,
    LINK.id: LinkLimits,
    CONGESTION.id: CongestionLimits,
    PATH.id: PathLimits,
}

_EXPECTED = """
Expected of an operation is what its bytes take at the rate of the slowest node's links in use,
where that is known and the link is a physical one (what a virtual device says of its speed is not
used); else what the fastest tenth of its kind, size and members took, and of operations that
overlap with computation the middle one. Small messages are expected to take that in any case."""
_BEYOND = f"""
What the transfers of some nodes took beyond what was expected, where a counter of one of these
nodes, read in the time of their operations, shows why.{_EXPECTED}"""
_ORDER = """
Asked in this order: a path at less than its rate, errors of a link, signs of congestion, loss
without such signs, a path that is wrong otherwise. The first that shows takes what is beyond."""

PAGES: dict[Cause, str] = {
    TRANSFER: f"""
## What it sees

Time in operations between ranks (all-reduce, broadcast, send and receive, …) after the last rank
had arrived, as far as no fault of the network shows.

## Why the GPU waits

The operation ends when the data have crossed the slowest link between its members.

## How it decides

The transfer of an operation is the shortest time that any member spent in it, which each measures
on its own clock; what a member spent beyond that it waited for a peer. The evidence says how much
of it is what these transfers need, and how much is beyond that for a reason that no counter shows.
{_EXPECTED.strip()}

## What to do

First measure the path by itself (nccl-tests, `iperf3`): what is far below that is the wrong
interface or a slow path. What is at the path's own rate is no fault: communicate rarely (gradient
accumulation), overlap communication with the backward pass, or use a faster link; send less
(compression, lower precision) at last, as that changes training. Larger buckets help where a step
has many small operations, or where a long round trip costs every message, smaller ones where one
large operation waits for the whole backward pass; a single one of a few MiB is no matter of
buckets. Where the receiver's window is full, raise `tcp_rmem`.

## Where it is blind

A network that is slow all the time looks as if it could not be faster, unless the rate of its links
is known, or the ranks are in one node: there less than 256 MiB/s, a quarter of what sockets give,
is called slow where operations are of a mebibyte or more. A transfer that overlaps with waiting
counts as waiting.
""",
    LINK: f"""
## What it sees
{_BEYOND}

## Why the GPU waits

What is lost or damaged is sent again, after a wait; a link that came up at a lower rate than its
peers holds all of them up.

## How it decides

Errors, symbol errors, a link that went down and came back, or a rate below that of the same links
of other nodes; segments sent again where nothing speaks of congestion. Where TCP went as fast as
its loss and round trip permit, and no queue stood anywhere, all of it is due to the loss.{_ORDER}

## What to do

Take the link that is named out of service, look at its error counters (`ethtool -S`, `perfquery`),
reseat or replace cable and transceiver, then the port.

## Where it is blind

With two nodes both ends see the same losses: no node is named unless one's own port counts them.
Links between switches are not seen at all.
""",
    CONGESTION: f"""
## What it sees
{_BEYOND}

## Why the GPU waits

Packets stand in queues behind those of other nodes or jobs, or may not be sent at all (pause).

## How it decides

Marks of switches (ECN, CNP), pause frames, port wait counters, packets dropped for want of room;
round trips several times the shortest with data waiting to be sent; a busy link of which half is
not the job's traffic.{_ORDER}

## What to do

Check that congestion control and routing are set as intended, spread traffic over all rails, move
storage traffic to another network, or ask for nodes that are close to each other.

## Where it is blind

Marks do not tell whose traffic it was. Queues and loss are not asked where TCP says that for half
of the time the receiver took no more.
""",
    PATH: f"""
## What it sees

What transfers took more than they would on a faster interface of the same nodes that stood idle, or
beyond what was expected while RDMA was there and unused, or rails carried unequal traffic, or one
of them none while most did.

## Why the GPU waits

The library chose the wrong interface, or was told so: the data cross a slow link.

## How it decides

The interface that carried the job's traffic has a known rate, and on every node that uses such a
slow one another is up, idle and at least twice as fast. Without a faster one: an active RDMA port
without traffic beside TCP, or rails that differ by a factor of two: those in use, and the others of
their kind when these are fewer.{_ORDER}

## What to do

Name the interface or the HCAs to the library (`NCCL_SOCKET_IFNAME`, `NCCL_IB_HCA`,
`GLOO_SOCKET_IFNAME`), check that RDMA works in the container (devices, memory limits), and that all
rails are cabled and routed alike.

## Where it is blind

That the idle interface reaches the other nodes is not tried. Interfaces without a known rate are
not compared.
""",
}
