"""Causes that only the ranks of a job together tell, and their pages.

No detector claims them: `attribution/blame.py` charges the time in operations with other ranks once
all recordings lie side by side.
"""

from __future__ import annotations

from clusterprof.detectors import network
from clusterprof.findings import Cause

_LAST_ARRIVER = """
All ranks leave an operation together, so the time from leaving one to arriving at the next tells
who came last and by how much, without a common clock. What the last rank had spent more of since
both last left an operation together is why it was late: a cause of its own (storage, cpu, …), for
which the waiting ranks are then charged under that cause; or waiting for a third rank, which is
followed; or work."""

_PAGES: dict[Cause, str] = {
    **network.PAGES,
    Cause(
        "sync-imbalance",
        "synchronization",
        "One rank takes longer for its work in every step: it has more, or is slower",
        "Compare its device with another; where it is as fast, balance the work over the ranks:"
        " batch sizes, sequence lengths, shards, stages",
    ): f"""
## What it sees

Time in which ranks waited in an operation for one that was still working, as it does in every step.

## Why the GPU waits

Synchronous training runs at the speed of the rank with the most work.

## How it decides
{_LAST_ARRIVER} Work beyond that of the waiting rank is imbalance as far as the same rank usually
has more of it.

## What to do

Balance what a step holds: tokens instead of samples, sorted or packed sequences, equal shards, the
layers of pipeline stages.

## Where it is blind

A rank that is slower in every step because its device or node is slower looks the same; compare
clocks and throttling. Where the job says how many samples or tokens a step held, the evidence has
those of the late rank beside the others': as many, and it is no larger batch (longer sequences it
may still be).
""",
    Cause(
        "sync-slow-compute",
        "synchronization",
        "One rank computes longer than the others",
        "Compare clocks, throttling and neighbours of that rank's node and device",
    ): f"""
## What it sees

Time in which ranks waited in an operation for one that was working for longer than it usually does.

## Why the GPU waits

Synchronous training runs at the speed of the rank that comes last.

## How it decides
{_LAST_ARRIVER} Work beyond what the late rank usually has more than the waiting one is slow
computation.

## What to do

Look at that rank's device (clocks, throttling, errors) and node (neighbours, NUMA, thermal), and at
what differs in its input.

## Where it is blind

Host work inside a step that no span marks counts as work. A steady difference is called imbalance.
""",
    Cause(
        "sync-bubble",
        "synchronization",
        "Stages wait for each other because of the pipeline's schedule",
        "Use more micro-batches or an interleaved schedule, and give the last stage fewer layers",
    ): """
## What it sees

Time in which a rank waited for a message of another that was working, though over many steps that
rank worked for no longer than the waiting one.

## Why the GPU waits

A pipeline must be filled and drained in every step: the later stages have nothing to do at first,
the earlier ones nothing at the end.

## How it decides

A wait for a message is charged to what the late rank had spent more of (as in `sync-imbalance`).
Work can have kept another rank waiting, over a stretch of many steps, for no longer than its rank
was busier than the other one; what is beyond is a bubble, and charged to no rank.

## What to do

More micro-batches make the bubble a smaller part of the step; interleaved schedules and those that
split the backward pass make it shorter. A last stage that computes the loss too needs fewer layers.

## Where it is blind

Only waits for messages (send, receive) are asked. Ranks that take turns in being late by little
look like a schedule.
""",
    Cause(
        "sync-unknown-peer",
        "synchronization",
        "A rank waits for one that was not recorded",
        "Record on every node of the job",
    ): """
## What it sees

Time in operations of which not all members were recorded.

## Why the GPU waits

Perhaps for the missing rank, perhaps for the network: the recordings at hand cannot tell.

## How it decides

The group of an operation is announced by its members; one whose recording is missing, or did not
reach that far, makes the operation incomplete.

## What to do

Record on every node, and bring all recordings together: `clusterprof analyze RUN/`.

## Where it is blind

A member that never announced its group and was never seen is not missed.
""",
    Cause(
        "fail-hang",
        "fail",
        "Progress stopped: ranks wait in an operation that does not end",
        "Look at the rank that is waited for: its stack, its node, its log",
    ): """
## What it sees

Operations with other ranks that began and had not ended when the recording did: the probe leaves
word when one begins. Counted from 10 seconds on, and from twice the longest operation before.

## Why the GPU waits

All members must come to an operation before any may leave it. One that crashed, loops, is stopped
or reads from a mount that does not answer holds all others, and nothing says so.

## How it decides

Each rank waits for the members that are not in the same operation; who waits for nobody is the
root. It is named with what its main thread did in the last ten seconds (running, asleep, blocked,
stopped) or how it ended. Ranks that took different operations in different order wait in a circle.
Where all members had come it is the operation that hangs: the network, or a device. A root that
still marked something in the last ten seconds was at work: then a note says so, and no finding.

## What to do

Look at the named rank: `py-spy dump --pid`, `dmesg` and the log of its node. A circle is a matter
of the program: all ranks must take the same operations in the same order.

## Where it is blind

On CUDA the host leaves most operations before they end, and stands still elsewhere: what it was in
is then not known. Of several threads in operations at once the last to begin one is known. A rank
whose last operation is missing from a damaged recording seems not to have come.
""",
    Cause(
        "fail-restart",
        "fail",
        "The job was begun anew after a failure",
        "Look at why the first rank failed, and start up faster: compile cache, local checkpoints",
    ): """
## What it sees

Time outside the steps, from the last record of a rank to its first step after it was begun anew.

## Why the GPU waits

When one rank fails, the launcher ends all others and starts them again: imports, process groups,
the checkpoint and warm-up are paid anew by every device, and so is the work since the last save.

## How it decides

The same rank of the same job was recorded again, and its launcher counted a restart
(`TORCHELASTIC_RESTART_COUNT`), or the life before ended with an error or by a signal. What the
later life spent before its first step then is this and not `startup`, and so is the gap between the
two, where both ran on one machine. The rank that failed first is named.

## What to do

Read the log of the rank that is named. Save more often and to a local disk, keep compile caches and
images warm, and exclude a node that fails twice.

## Where it is blind

Steps done since the last checkpoint and done again look like any others. Jobs without a name, and
lives of which the recorder did not see the end, are not taken for restarts. Between two machines
the gap is not counted: their clocks may differ.
""",
}
PEER_CAUSES: tuple[Cause, ...] = tuple(_PAGES)


def peer_page(cause: Cause) -> str:
    """Return the page of one of these causes as Markdown."""
    return f"# {cause.id}: {cause.title}\n{_PAGES[cause].rstrip()}\n"
