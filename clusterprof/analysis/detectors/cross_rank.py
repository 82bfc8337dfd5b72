"""Causes that only the ranks of a job together can show, and their pages.

No detector claims them: `analysis.attribution.wait_for.blame` attributes the time in operations
with other ranks once the recordings of all nodes are available.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from clusterprof.report.model import Cause

TRANSFER = Cause(
    "net-transfer",
    "network",
    "Exposed communication: all ranks had arrived, data were in transfer",
    "Overlap communication with computation, send less, or use a faster link",
    manual_check=(
        "`all_reduce_perf -b 1M -e 1G -f 2` of nccl-tests on the same nodes: `busbw` against the "
        "rate of the links; `nsys profile`: how much communication overlaps computation."
    ),
)
TRANSFER_AT_LINK_RATE = replace(
    TRANSFER,
    title="Exposed communication, at the rate of the links",
    advice="No fault: overlap communication with computation, send less, or use a faster link",
)
TRANSFER_STEADY = replace(
    TRANSFER, title="Exposed communication: all transfers take about the same time"
)
TRANSFER_STEADY_SLOW = replace(
    TRANSFER,
    title="Exposed communication: data move slowly between all ranks, at a steady rate",
    advice="Find out which path they take, and measure the rate of that path alone",
)
TRANSFER_EXCESS = replace(
    TRANSFER,
    title="Exposed communication takes longer than expected",
    advice="Record the counters that are missing, and look at switches and neighbors at those"
    " times",
)
LINK = Cause(
    "net-link",
    "network",
    "A bad link slows the data down",
    "Drain the link that is named, then reseat or replace cable, transceiver or port",
    tone=1,
    can_be_node_fault=True,
    manual_check=(
        "`ethtool -S DEVICE`, `ip -s link` (InfiniBand: `perfquery -x`, `ibqueryerrors`) twice on "
        "both ends: errors that rise; `iperf3` or `ib_write_bw` between the two nodes and between "
        "others."
    ),
)
CONGESTION = Cause(
    "net-congestion",
    "network",
    "Data queue up in the network",
    "Check routing and congestion control, spread traffic over rails, or move the job away from"
    " its neighbors",
    tone=2,
    manual_check=(
        "`ethtool -S DEVICE | grep -E 'pause|ecn|cnp'` twice; `ss -tni`: `rtt` against `minrtt`. "
        "Run `ib_write_bw` or `iperf3` while the job is not running: then it is fast."
    ),
)
PATH = Cause(
    "net-path",
    "network",
    "Data take a slow path while a faster one is idle",
    "Point the job at the fast interface (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME)",
    tone=3,
    manual_check=(
        "`NCCL_DEBUG=INFO`: the lines `NET/…` name what it uses; `ip -s link`, `perfquery`: which "
        "device carries the bytes. Name the other by `NCCL_SOCKET_IFNAME` or `NCCL_IB_HCA` for one "
        "run."
    ),
)


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Limits for transfer time in excess of the expected time."""

    beyond_at_least_ratio: float = 0.1
    """A smaller share of the transfers of some nodes is normal variation and is not claimed."""
    unsure_at_least_ratio: float = 0.5
    """The same limit if the rate is unknown and only round trips, or loss without them, indicate a
    fault: a path that is always full shows these too, but there all durations are alike.
    """
    small_at_most_bytes: int = 1 << 20
    """Messages up to this size are limited by round trips, not by the rate; they are expected to
    take at least what the fastest tenth of them took.
    """


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Limits for a faulty link."""

    retransmits_at_least_ratio: float = 0.001
    """Segments retransmitted over segments sent."""
    errors_per_minute_at_least_count: float = 6.0
    """Packets with errors, symbol errors, or recoveries of the link, of one port."""
    rate_at_most_ratio: float = 0.75
    """Rate of a link over that of the corresponding links of the other nodes."""


@dataclass(frozen=True, slots=True)
class CongestionLimits:
    """Limits for a congested path."""

    marks_per_second_at_least_count: float = 10.0
    """Packets marked by a switch, congestion notifications, or pause frames, of one port."""
    drops_per_minute_at_least_count: float = 6.0
    """Packets dropped because buffers were full, of one port."""
    wait_at_least_ratio: float = 0.2
    """Ticks in which a port had data and could not send, over those plus the ticks in which it
    sent.
    """
    round_trip_at_least_ratio: float = 3.0
    """Round-trip time of the job's connections over their shortest round-trip time."""
    queue_at_least_bytes: int = 1 << 16
    """Bytes queued for sending in these connections during that time."""
    busy_at_least_ratio: float = 0.7
    """Traffic over the rate of the link, if half of the traffic does not belong to the job."""


@dataclass(frozen=True, slots=True)
class PathLimits:
    """Limits for a wrongly chosen path."""

    faster_at_least_ratio: float = 2.0
    """Rate of the idle interface over that of the one in use."""
    idle_at_most_ratio: float = 0.01
    """Traffic of the idle interface over that of the one in use."""
    uneven_at_least_ratio: float = 2.0
    """Traffic of the busiest rail of a node over that of the least busy one in use."""


NETWORK_LIMITS: dict[str, type] = {
    TRANSFER.id: TransferLimits,
    LINK.id: LinkLimits,
    CONGESTION.id: CongestionLimits,
    PATH.id: PathLimits,
}

_EXPECTED_TEXT = """
The expected time of an operation is its bytes divided by the rate of the slowest node's links, if
that rate is known and the link is physical. (The speed that a virtual device reports is not used.)
If not, it is the time of the fastest tenth of the operations of this kind, size and members, or
their median if they overlap with computation. Small messages always use this second rule."""
_EXCESS_TEXT = f"""
Transfer time of some nodes in excess of the expected time, if a counter of one of these nodes, read
during their operations, shows why.{_EXPECTED_TEXT}"""
_ORDER_TEXT = """
Checked in this order: a path below its rate, errors of a link, signs of congestion, loss without
those signs, a path that is wrong otherwise. The first one found gets the excess."""

NETWORK_PAGES: dict[Cause, str] = {
    TRANSFER: f"""
## What it sees

Time in operations between ranks (all-reduce, broadcast, send and receive, …) after the last rank
had arrived, unless a network fault explains it.

## Why the GPU waits

The operation ends when the data have crossed the slowest link between its members.

## How it decides

The transfer time of an operation is the shortest time that any member spent in it, measured on its
own clock; any longer time of a member was a wait for a peer. The evidence says how much of it these
transfers need, and how much is excess for a reason that no counter shows. Such excess of small
messages between two ranks has no cause: the receiver may have waited for its peer.
{_EXPECTED_TEXT.strip()}

## What to do

First measure the path alone (nccl-tests, `iperf3`): if it is much faster than the job, the job uses
the wrong interface or a slow path. A transfer at the path's own rate is no fault: communicate
rarely (gradient accumulation), overlap communication with the backward pass, or use a faster link;
send less (compression, lower precision) only last, as that changes training. Larger buckets help if
a step has many small operations, or if a long round trip costs every message; smaller ones if one
large operation waits for the whole backward pass; for a single one of a few MiB they do not matter.
If the receiver's window is full, raise `tcp_rmem`.

## Where it is blind

A network that is always slow looks as if it could not be faster, unless the rate of its links is
known, or the ranks are on one node: there less than 256 MiB/s, a quarter of the rate of sockets, is
called slow for operations of one MiB or more. A transfer that overlaps with waiting counts as
waiting.
""",
    LINK: f"""
## What it sees
{_EXCESS_TEXT}

## Why the GPU waits

Lost or damaged data are sent again after a wait; a link that came up at a lower rate than its peers
delays all of them.

## How it decides

Errors, symbol errors, a link that went down and came back, or a rate below that of the same links
of other nodes; retransmitted segments without signs of congestion. If TCP ran as fast as its loss
and round trip permit, and there was no queue, all excess is due to the loss.{_ORDER_TEXT}

## What to do

Take the named link out of service, look at its error counters (`ethtool -S`, `perfquery`),
reseat or replace cable and transceiver, then the port.

## Where it is blind

With two nodes both ends see the same losses: no node is named unless its own port counts them.
Links between switches are not observed at all.
""",
    CONGESTION: f"""
## What it sees
{_EXCESS_TEXT}

## Why the GPU waits

Packets wait in queues behind those of other nodes or jobs, or may not be sent at all (pause).

## How it decides

Marks of switches (ECN, CNP), pause frames, port wait counters, packets dropped for full buffers;
round trips several times the shortest with data waiting to be sent; a busy link with half of its
traffic not the job's.{_ORDER_TEXT}

## What to do

Check that congestion control and routing are set as intended, spread traffic over all rails, move
storage traffic to another network, or ask for nodes that are close to each other.

## Where it is blind

Marks do not show whose traffic it was. Queues and loss are not checked if TCP reports that the
receiver's window was full for half of the time.
""",
    PATH: f"""
## What it sees

Transfer time in excess of that on a faster, idle interface of the same nodes; or in excess of the
expected time while RDMA was present but unused, rails carried unequal traffic, or one rail carried
none while most did.

## Why the GPU waits

The library chose the wrong interface, or was configured to use it: the data cross a slow link.

## How it decides

The interface that carried the job's traffic has a known rate, and on every node that uses that rate
another interface is up, idle and at least twice as fast. Without a faster one: an active RDMA port
without traffic while TCP is used, or rails that differ by a factor of two: those in use, and the
others of their kind if these are fewer.{_ORDER_TEXT}

## What to do

Name the interface or the HCAs to the library (`NCCL_SOCKET_IFNAME`, `NCCL_IB_HCA`,
`GLOO_SOCKET_IFNAME`), check that RDMA works in the container (devices, memory limits), and that all
rails are cabled and routed alike.

## Where it is blind

Whether the idle interface reaches the other nodes is not tested. Interfaces without a known rate
are not compared.
""",
}


_LAST_ARRIVAL_TEXT = """
All ranks leave an operation together, so the time from leaving one to arriving at the next shows
which rank arrived last and by how much, without a common clock. The last rank was late because of
what it spent more time on since both last left an operation together: a cause of its own (storage,
cpu, …), for which the waiting ranks are then blamed under that cause; or waiting for a third rank,
to which the blame is propagated; or work."""

_PEER_PAGES: dict[Cause, str] = {
    **NETWORK_PAGES,
    Cause(
        "sync-imbalance",
        "synchronization",
        "One rank takes longer for its work in every step: it has more work or is slower",
        "Compare its device with another; if it is as fast, balance the work over the ranks:"
        " batch sizes, sequence lengths, shards, stages",
        can_be_node_fault=True,  # one job cannot tell more work from a slower device, many jobs can
        manual_check=(
            "count tokens or samples per step on each rank and compare them with the time of "
            "forward and backward: the rank that is waited for has more."
        ),
    ): f"""
## What it sees

Time in which ranks waited in an operation for one that was still working, as it does in every step.

## Why the GPU waits

Synchronous training runs at the speed of the rank with the most work.

## How it decides
{_LAST_ARRIVAL_TEXT} Work in excess of the waiting rank's is imbalance as far as the late rank
usually has more work.

## What to do

Balance the content of steps: tokens instead of samples, sorted or packed sequences, equal shards,
the layers of pipeline stages.

## Where it is blind

A rank that is slower in every step because its device or node is slower looks the same; compare
clocks and throttling. If the job reports how many samples or tokens a step held, the evidence
compares the late rank with the others: with equal counts the batch is no larger, although its
sequences may be longer. In a mixture of experts the tokens of a rank's experts show as bytes that
it brings to all-to-all operations: the evidence says so where the late rank brings the most.
Exchanges that pad all ranks to one size, or that libraries make without torch.distributed, do not
show it.
""",
    Cause(
        "sync-slow-compute",
        "synchronization",
        "One rank computes longer than the others",
        "Compare clocks, throttling and neighbors of that rank's node and device",
        tone=1,
        can_be_node_fault=True,
        manual_check=(
            "run the same fixed batch on each rank (`dcgmi diag -r 2`, a matrix product of fixed "
            "size): the late one is slower with equal work. Swap two nodes."
        ),
    ): f"""
## What it sees

Time in which ranks waited in an operation for a rank that worked for longer than it usually does.

## Why the GPU waits

Synchronous training runs at the speed of the rank that arrives last.

## How it decides
{_LAST_ARRIVAL_TEXT} Work in excess of the waiting rank's, beyond the usual difference between the
two, is slow computation.

## What to do

Look at that rank's device (clocks, throttling, errors) and node (neighbors, NUMA, thermal), and at
how its input differs.

## Where it is blind

Host work inside a step without a span counts as work. A steady difference is called imbalance.
""",
    Cause(
        "sync-bubble",
        "synchronization",
        "Stages wait for each other because of the pipeline's schedule",
        "Use more micro-batches or an interleaved schedule, and give the last stage fewer layers",
        tone=2,
        manual_check=(
            "(stages - 1) / (micro-batches + stages - 1) of a step is what the schedule costs by "
            "itself; torch.profiler of the first and the last stage shows where they wait."
        ),
    ): """
## What it sees

Time in which a rank waited for a message of a rank that was working, although over many steps that
rank worked no longer than the waiting one.

## Why the GPU waits

A pipeline must be filled and drained in every step: the later stages have nothing to do at first,
the earlier ones nothing at the end.

## How it decides

A wait for a message is attributed to what the late rank spent more time on (as in
`sync-imbalance`). Over a window of many steps, work of a rank can explain no more waiting than the
time by which it was busier than the waiting rank; the rest is a bubble and attributed to no rank.

## What to do

More micro-batches make the bubble a smaller part of the step; interleaved schedules and those that
split the backward pass make it shorter. A last stage that computes the loss too needs fewer layers.

## Where it is blind

Only waits for messages (send, receive) are examined. Ranks that take turns in being slightly late
look like a schedule.
""",
    Cause(
        "sync-unknown-peer",
        "synchronization",
        "Communication with ranks that were not recorded",
        "Record on every node of the job",
        tone=3,
        manual_check=(
            "`ls RUN`: a folder for each node? `clusterprof doctor` on the node that is missing."
        ),
    ): """
## What it sees

Time in operations of which not all members were recorded.

## Why the GPU waits

Possibly for the missing rank, possibly for the network: the recordings do not show which.

## How it decides

The group of an operation is announced by its members; one whose recording is missing, or did not
reach that far, makes the operation incomplete.

## What to do

Record on every node, and analyze all recordings together: `clusterprof analyze RUN/`.

## Where it is blind

A member that never announced its group and was never observed is not detected as missing.
""",
    Cause(
        "fail-hang",
        "fail",
        "Progress stopped: ranks wait in an operation that does not end",
        "Look at the rank for which the others wait: its stack, its node, its log",
        manual_check=(
            "`py-spy dump --pid PID` on every rank: all but one are in the same operation; "
            "the flight recorder's dumps in the recording say what each was in."
        ),
    ): """
## What it sees

Operations with other ranks that began and had not ended when the recording did: the probe records
each start. They count from 10 seconds on, and from twice the longest operation before.

## Why the GPU waits

All members must arrive at an operation before any may leave it. One that crashed, loops, is stopped
or reads from a mount that does not answer blocks all others, without any message.

## How it decides

Each rank waits for the members that are not in the same operation; a rank that waits for none is
the root. It is named with its main thread's state in the last ten seconds (running, asleep,
blocked, stopped) or how it ended, and with the line in which its samples were since its last span;
if a worker of its data loader is stuck, with that line, too. Ranks that entered different
operations, or the same in different order, wait in a circle; the smaller part is named. If all
members had arrived, the operation itself hangs: the network, or a device. A root that recorded a
span in the last ten seconds was working: then there is a note and no finding, unless it went on
for ten steps, and twice as many as ever before, without an operation.

## What to do

Look at the named line and rank, `dmesg` and the log of its node. A circle is an error of the
program: all ranks must enter the same operations in the same order. `record --on-hang COMMAND`
runs a command when ranks make no progress (docs/hangs.md).

## Where it is blind

On CUDA the host leaves most operations before they end, and blocks elsewhere: its operation is then
unknown. Of several threads in operations at once only the last to begin one is known. A rank whose
last operation is missing from a damaged recording seems not to have arrived.
""",
    Cause(
        "fail-restart",
        "fail",
        "The job was restarted after a failure",
        "Look at why the first rank failed, and start up faster: compile cache, local checkpoints",
        tone=1,
        manual_check=(
            "the launcher's log: exit codes and the first traceback; `dmesg -T` of that node: Xid, "
            "out of memory; `sacct -j JOB --format=State,ExitCode,NodeList`."
        ),
    ): """
## What it sees

Time outside steps, from the last record of a rank to its first step after the restart.

## Why the GPU waits

When one rank fails, the launcher ends all others and starts them again: imports, process groups,
the checkpoint and warm-up are repeated on every device, and so is the work since the last save.

## How it decides

The same rank of the same job was recorded again, and its launcher counted a restart
(`TORCHELASTIC_RESTART_COUNT`), or the previous process ended with an error or by a signal. The time
before the first step of the later one then counts here and not as `startup`, and so does the gap
between them, if both ran on one machine. The rank that failed first is named.

## What to do

Read the log of the named rank. Save more often and to a local disk, keep compile caches and
images warm, and exclude a node that fails twice.

## Where it is blind

Steps repeated since the last checkpoint look like any others here; the life of the job (`analyze
--section life`) counts them. Jobs without a name, and processes
whose end the recorder did not see, are not taken for restarts. Between two machines the gap is not
counted: their clocks may differ.
""",
}
PEER_CAUSES: tuple[Cause, ...] = tuple(_PEER_PAGES)


def build_peer_page(cause: Cause) -> str:
    """Build the page of one of these causes as Markdown.

    Raises: KeyError when it is not one of these causes.
    """
    return f"# {cause.id}: {cause.title}\n{_PEER_PAGES[cause].rstrip()}\n"
