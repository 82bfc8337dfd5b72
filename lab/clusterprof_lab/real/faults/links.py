"""A bad network between nodes: limits of the cable on a node's link, or other traffic on it.

The strength follows from what a step sends over the link. A ring of N ranks sends 2 (N - 1) / N
times the model's bytes each way (measured: 1.5 times with 4 ranks), of which `_EXPOSED` is not
hidden behind the rest of the backward pass. Each of its 2 (N - 1) rounds waits `_DELAYS_A_ROUND`
delays. These numbers were measured with gloo and Reno and are accurate to about a fifth; the actual
loss of a run is measured by its stopwatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from clusterprof_lab.real.faults import processes
from clusterprof_lab.real.faults.base import Log, Node, Options, Place, check_root, now_ns

MODEL_MB = 4.0
SMALL_MODEL_MB = 0.2
_EXPOSED = 0.82
_DELAYS_A_ROUND = 1.9
_ONE_WAY_EXPOSED = 0.6
"""How much of `_EXPOSED` is left when one direction is slow: the ring's other half goes on."""
_SEGMENT_BYTES = 1448
_LOSS_COSTS_S = 0.0065
"""Mean of what a lost frame holds the ring up, with Reno and half a millisecond each way."""
_LINK_BITS_PER_SECOND = 400_000_000
_FLOWS = 12
_PORT = 47_900
_SINK = """
import socket, sys, threading
def drain(one):
    into = bytearray(1 << 18)
    while one.recv_into(into): pass
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
while True: threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()
"""
# The kernel's own pacing: no more than this, and less when the link is full, as TCP is.
_SEND = """
import socket, sys
one = socket.socket()
one.setsockopt(socket.SOL_SOCKET, 47, int(sys.argv[3]))
one.connect((sys.argv[1], int(sys.argv[2])))
block = bytes(1 << 16)
while True: one.sendall(block)
"""


@dataclass(frozen=True)
class LinkFault:
    """One way in which a node's link is bad."""

    name: str
    cause: str
    make: Callable[[Place], Mapping[str, float]]
    model_mb: float = MODEL_MB

    def why_not_here(self) -> str:
        """Return why it cannot be made here, "" when it can."""
        return check_root("a network of its own") or processes.list_missing_commands(
            "nsenter", "ip"
        )

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Say what the node's link must be; ValueError for a place that is no node."""
        _get_node(place, self.name)
        log = Log(place.make_path(f"{self.name}.jsonl"))
        link = {} if place.clean else self.make(place)
        start_ns = now_ns()
        script = [f"--model-mb={get_model_mb(place, self.model_mb):g}"]
        yield Options(script, log=log.path, link=link)
        if not place.clean:
            log.write(start_ns, now_ns(), self.cause, **link)


class LinkAsymmetric:
    """What a node sends is slowed by a token bucket of its own (`tc tbf`); what it gets is not."""

    name = "link-asymmetric"

    def why_not_here(self) -> str:
        """Return why it cannot be made here, "" when it can."""
        return check_root("traffic control") or processes.list_missing_commands("nsenter", "tc")

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Put the bucket on the node's interface (`device` of the scenario, eth0)."""
        _get_node(place, self.name)
        log, device = (
            Log(place.make_path("link-asymmetric.jsonl")),
            place.options.get("device", "eth0"),
        )
        options = Options([f"--model-mb={get_model_mb(place, MODEL_MB):g}"], log=log.path)
        if place.clean:
            yield options
            return
        rate = round(_ONE_WAY_EXPOSED * _make_rate_link(place)["rate_bits_per_second"])
        bucket = ("root", "tbf", "rate", f"{rate}bit", "burst", "64kb", "limit", "1mb")
        undo = 'exec "$0" "$@" 2>/dev/null'
        with processes.run_at_end(
            undo, *place.make_node_command("tc", "qdisc", "del", "dev", device, "root")
        ):
            processes.run_command(
                *place.make_node_command("tc", "qdisc", "add", "dev", device, *bucket)
            )
            start_ns = now_ns()
            yield options
            log.write(start_ns, now_ns(), "net-link", rate_bits_per_second=rate)


class LinkBackground:
    """Others send to the node all the time, paced, over a link that is fast enough without them.

    A dozen TCP connections from another node, by processes that are not the job's. They leave the
    job what makes its transfer take longer by the stall.
    """

    name = "link-background"

    def why_not_here(self) -> str:
        """Return why it cannot be made here, "" when it can."""
        return check_root("a network of its own") or processes.list_missing_commands("nsenter")

    @contextmanager
    def apply(self, place: Place) -> Iterator[Options]:
        """Start the flows; the node's link has one rate, with and without them."""
        node = _get_node(place, self.name)
        others = [other for other in place.nodes if other.name != node.name]
        if not others:
            raise ValueError(f"{self.name}: needs a second node in Place.nodes")
        small = MODEL_MB / 2
        sent_bits = 8 * _EXPOSED * _ONE_WAY_EXPOSED * compute_ring_bytes(place, small)
        clean_s = sent_bits / _LINK_BITS_PER_SECOND
        left = sent_bits / (clean_s + place.stall_ns / 1e9)
        log = Log(place.make_path("link-background.jsonl"))
        with ExitStack() as stack:
            if not place.clean:
                sink = place.make_node_command(*processes.make_python_command(_SINK, str(_PORT)))
                stack.enter_context(processes.wait_until_listening(sink))
                pace = str(round((_LINK_BITS_PER_SECOND - left) / 8 / _FLOWS))
                send = processes.make_python_command(_SEND, node.name, str(_PORT), pace)
                elsewhere = Place(others[0], place.folder, place.random, 0.0, place.step_ns)
                for _ in range(_FLOWS):
                    stack.enter_context(processes.keep_running(elsewhere.make_node_command(*send)))
            start_ns = now_ns()
            link = {"rate_bits_per_second": _LINK_BITS_PER_SECOND}
            script = [f"--model-mb={get_model_mb(place, small):g}"]
            yield Options(script, log=log.path, link=link)
            if not place.clean:
                taken = round(_LINK_BITS_PER_SECOND - left)
                log.write(start_ns, now_ns(), "net-congestion", bits_per_second=taken)


def get_model_mb(place: Place, otherwise: float) -> float:
    """Return the size of the model: `get_model_mb` of the scenario, or what the fault suggests."""
    return place.get_number("model_mb", otherwise)


def compute_ring_bytes(place: Place, otherwise_mb: float = MODEL_MB) -> float:
    """Return what goes over the node's link each way per step."""
    ranks = place.ranks * max(2, len(place.nodes))
    return 2 * (ranks - 1) / ranks * get_model_mb(place, otherwise_mb) * (1 << 20)


def _get_node(place: Place, name: str) -> Node:
    if place.node is None:
        raise ValueError(f"{name}: only a node has a link")
    return place.node


def _make_rate_link(place: Place) -> dict[str, float]:
    bits = 8 * _EXPOSED * compute_ring_bytes(place)
    return {"rate_bits_per_second": round(bits * 1e9 / max(place.stall_ns, 1))}


def _compute_delay_s(place: Place) -> float:
    ranks = place.ranks * max(2, len(place.nodes))
    return place.stall_ns / 1e9 / (2 * (ranks - 1) * _DELAYS_A_ROUND)


def _make_latency_link(place: Place) -> dict[str, float]:
    return {"delay_s": _compute_delay_s(place)}


def _make_jitter_link(place: Place) -> dict[str, float]:
    return {"jitter_s": 2 * _compute_delay_s(place)}


def _make_loss_link(place: Place) -> dict[str, float]:
    frames = 2 * compute_ring_bytes(place) / _SEGMENT_BYTES
    return {"delay_s": 0.0005, "loss_ratio": place.stall_ns / 1e9 / (frames * _LOSS_COSTS_S)}


LINKS = (
    LinkFault("link-rate", "net-congestion", _make_rate_link),
    LinkFault("link-latency", "net-path", _make_latency_link, SMALL_MODEL_MB),
    LinkFault("link-jitter", "net-path", _make_jitter_link, SMALL_MODEL_MB),
    LinkFault("link-loss", "net-link", _make_loss_link),
    LinkAsymmetric(),
    LinkBackground(),
)
