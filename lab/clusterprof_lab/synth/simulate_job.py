"""A synchronous training job, step by step: one pass of all ranks, then a common operation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterprof.probe import layout
from clusterprof.probe.hooks.process_groups import compute_group_number
from clusterprof_lab.synth import simulate_sharded
from clusterprof_lab.synth.simulate_faults import Fault, Faults
from clusterprof_lab.synth.simulate_loader import Loader
from clusterprof_lab.synth.simulate_plan import Plan
from clusterprof_lab.synth.simulated_rank import HostPart, SimulatedRank
from clusterprof_lab.synth.story import Act, Rank, Thread, Work
from clusterprof_lab.synth.wait_truth import Label
from clusterprof_lab.truth import OTHER

MICRO = 8
"""Micro-batches of a pipeline's step."""
_CALLS_PER_PASS = {"pipeline": MICRO, "sharded": simulate_sharded.UNITS}


class Job:
    """Players of one job and what they have in common; `run` moves them through all steps."""

    def __init__(
        self, plan: Plan, faults: Faults, first_rank: int = 0, start_ns: int = 0, life: int = 0
    ) -> None:
        self.plan, self.faults, self.first = plan, faults, first_rank
        self.random = np.random.default_rng([plan.seed, first_rank, life])
        self.players = [
            SimulatedRank(new_rank(plan, first_rank, i, life), plan.depth, start_ns)
            for i in range(plan.ranks)
        ]
        self.jitter = 1 + plan.jitter * np.clip(
            self.random.standard_normal((plan.ranks, plan.steps, 2)), -3, 3
        )
        self.load = 1 + 0.1 * self.random.uniform(-1, 1, (plan.ranks, plan.steps))
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._groups: dict[tuple[int, ...], int] = {}
        self.loaders: list[Loader | None] = []
        self.moved: list[tuple[int, int, int, int]] = []
        """(start, end, node, bytes) of transfers between nodes."""

    def run(self, startup_ns: int, steps: int | None = None, first_step: int = 0) -> None:
        """Start up and train."""
        for player in self.players:
            player.run_part(HostPart(startup_ns, "user", "startup"))
        self.loaders = [self._make_loader(player) for player in self.players]
        sharded = self.plan.layout == "sharded"
        for step in range(first_step, first_step + (self.plan.steps if steps is None else steps)):
            if sharded:
                simulate_sharded.begin_step(self, step)
            self.run_step(step)
        for player in self.players:
            player.finish()

    def run_step(self, step: int) -> None:
        """Let all ranks do one step."""
        began = [player.t if not player.steps else player.steps[-1][1] for player in self.players]
        for player, loader in zip(self.players, self.loaders):
            if not player.steps:
                player.wait_for_queue()  # what it lost until now lies before the steps
            self._apply_main_faults(player, step, "before")
            if loader is not None:
                loader.wait_for_batch()
                self._copy_batch(player, step)
        if self.plan.layout == "pipeline":
            self._run_pipeline(step)
            self._reduce_gradients(step)
        elif self.plan.layout == "sharded":
            simulate_sharded.pass_units(self, step)
        else:
            self._run_passes(step)
            self._reduce_gradients(step)
        for player, start in zip(self.players, began):
            self._run_optimizer(player, step, start)

    def _make_loader(self, player: SimulatedRank) -> Loader | None:
        plan = self.plan
        if plan.layout == "pipeline" and player.number % plan.stages:
            return None
        workers = player.rank.workers
        return Loader(player, workers, plan.prefetch, self._make_batch, plan.epochs == 1)

    def restart_loader(self, index: int, first_batch: int) -> None:
        """End the workers of a rank's finished epoch and start those of the next one."""
        player, loader = self.players[index], self.loaders[index]
        if loader is None:
            return
        loader.close()
        main = player.rank.main
        pid = main.pid + 1 + len(player.rank.workers)
        workers = [
            Thread(pid + i, pid + i, main.pid, "pt_data_worker") for i in range(self.plan.workers)
        ]
        player.rank.workers += workers
        self.loaders[index] = Loader(
            player, workers, self.plan.prefetch, self._make_batch, False, first_batch
        )

    def _make_batch(self, rank: int, batch: int) -> list[HostPart]:
        plan, factor = self.plan, float(self.load[rank - self.first, batch % self.plan.steps])
        read = round(plan.read_ns * factor)
        how = plan.read
        usual = "storage-local" if how["doing"] == "block-io" else "storage-remote"
        cause = how.get("cause", usual)
        per_ns = 1e-9 * float(how.get("operations_per_second", 0))
        parts = [
            HostPart(
                read,
                how["doing"],
                cause,
                how.get("resource", ""),
                round(read * 1.048576e-3 * float(how.get("mib_per_second", 0))),
                round(read * per_ns),
                0,
                how.get("what", "READ"),
            )
        ]
        parts += self.faults.list_loader_parts(rank, batch)
        own = next((f.cause for f in self.faults.all if f.cause == "cpu-loader-config"), None)
        parts.append(HostPart(round(plan.decode_ns * factor), "user", own or "cpu-preprocess"))
        return parts

    def _apply_main_faults(self, player: SimulatedRank, step: int, where: str) -> None:
        """Apply the faults of the main thread."""
        for fault in self.faults.list_by_kind("main"):
            if fault.where == where:
                self._apply_fault(player, fault, step, 1.0)

    def _apply_fault(self, player: SimulatedRank, fault: Fault, step: int, ratio: float) -> None:
        parts = fault.list_parts(player.number, step, ratio)
        if not parts:
            return
        if fault.synchronise:
            waits = 0 if fault.extra == "allocator" else sum(p.doing == "device" for p in parts[:1])
            asked = player.t
            player.synchronize()
            for part in parts[:waits]:
                player.run_part(part)
            parts = parts[waits:]
            if fault.extra == "allocator":
                player.allocate()
            else:
                player.mark(asked, layout.SYNC, player.t - asked, 1)
        began = player.t
        for part in parts:
            player.run_part(part)
        if fault.extra == "gil-hog":
            self._find_lock_holder(player).acts.append(Act(began, player.t, "user"))
        if fault.mark:
            player.mark(began, fault.mark, player.count_marks(fault.mark, fault.cause))
            player.rank.gc_pauses += fault.mark == layout.GC

    def _find_lock_holder(self, player: SimulatedRank) -> Thread:
        """Return the thread that holds the interpreter's lock."""
        main, threads = player.rank.main, player.rank.threads
        if not threads:
            threads.append(Thread(main.pid, main.pid + 50, main.parent_pid, "python"))
        return threads[0]

    def _copy_batch(self, player: SimulatedRank, step: int) -> None:
        began, more = player.t, self.faults.get_copy_delay_ns(player.number, step)
        unhooked = any(fault.extra == "unhooked" for fault in self.faults.list_by_kind("copy"))
        marked_ns = self.plan.copy_ns + (0 if unhooked else more)
        size = round(marked_ns * 12.0)  # 12 GB/s
        player.run_part(HostPart(50_000, "user", OTHER))
        player.launch(self.plan.copy_ns, "copy")
        if more and not unhooked:
            self._copy_blocking(player, more, "h2d-copy")
        player.mark(began, layout.H2D, size, int(unhooked or not more))
        if more and unhooked:  # an extension that the probe does not know copies
            self._copy_blocking(player, more, "h2d-copy-bound")

    def _copy_blocking(self, player: SimulatedRank, ns: int, cause: str) -> None:
        """Let the host wait for a copy, and the device compute nothing."""
        player.synchronize()
        copies = player.t
        player.run_part(HostPart(ns, "device", cause))
        player.rank.work.append(Work(copies, player.t, "copy"))

    def _run_passes(self, step: int) -> None:
        """Forward and backward."""
        plan = self.plan
        for i, where in enumerate(("forward", "backward")):
            for player in self.players:
                self.run_pass(player, step, where, plan.compute_ns * (1 + i) // 3, plan.chunks)
            if plan.layout == "tensor":
                for first in range(0, plan.ranks, plan.stages):
                    self.run_collective(
                        range(first, first + plan.stages), layout.ALL_REDUCE, {}, 4 << 20
                    )

    def run_pass(self, player: SimulatedRank, step: int, where: str, ns: int, chunks: int) -> None:
        """Launch one pass, in chunks; what strikes in it strikes before, or between them."""
        passes = _CALLS_PER_PASS.get(self.plan.layout, 1)
        struck = [fault for fault in self.faults.list_by_kind("main") if fault.where == where]
        on_main = [fault for fault in self.faults.list_by_kind("loader") if fault.main_ratio]
        slow = self.faults.compute(player.number, step)
        more = self.faults.get_launch_delay_ns(player.number, step)
        cause = next((f.cause for f in self.faults.list_by_kind("launch")), OTHER)
        factor = float(self.jitter[player.number - self.first, step, int(where == "backward")])
        total = round(ns * factor)
        for i in range(chunks):
            for fault in struck:
                times = min(fault.times, chunks)
                if i * times // chunks != (i - 1) * times // chunks:
                    self._apply_fault(player, fault, step, 1.0 / (times * passes))
            for fault in on_main:
                self._apply_fault(player, fault, step, fault.main_ratio / (2 * chunks * passes))
            player.run_part(HostPart(self.plan.launch_ns + more, "user", cause if more else OTHER))
            part = total * (i + 1) // chunks - total * i // chunks
            extra = None
            if slow is not None:
                extra = slow._replace(ns=slow.ns * part // self.plan.compute_ns)
            player.launch(part, "compute", extra, 0.9 if not more else 0.2)

    def _run_pipeline(self, step: int) -> None:
        """GPipe: all micro-batches forward through the stages, then backward."""
        plan, stages = self.plan, self.plan.stages
        down, up = plan.compute_ns // (3 * MICRO), 2 * plan.compute_ns // (3 * MICRO)
        for first in range(0, plan.ranks, stages):
            for _ in range(MICRO):
                for stage in range(stages):
                    self.run_pass(self.players[first + stage], step, "forward", down, 1)
                    if stage + 1 < stages:
                        self._send_message(first + stage, first + stage + 1)
            for _ in range(MICRO):
                for stage in reversed(range(stages)):
                    self.run_pass(self.players[first + stage], step, "backward", up, 1)
                    if stage:
                        self._send_message(first + stage, first + stage - 1)

    def _send_message(self, sender: int, receiver: int) -> None:
        between = self.plan.node_of(sender) != self.plan.node_of(receiver)
        net = {("net-transfer", None): self.plan.transfer_ns // (16 if between else 64)}
        self.run_collective((sender, receiver), layout.SEND, net, 1 << 20)

    def _reduce_gradients(self, step: int) -> None:
        """All-reduce the gradients, of each stage for itself."""
        plan = self.plan
        more = self.faults.get_transfer_delay(step)
        for stage in range(plan.stages):
            members = range(stage, plan.ranks, plan.stages)
            if len(members) > 1:
                net = {("net-transfer", None): plan.transfer_ns}
                for label, ns in more.items():
                    net[label] = net.get(label, 0) + ns
                # What merely takes its time is more data; what a fault adds is not.
                due_ns = net["net-transfer", None]
                size = round(due_ns * 1e-9 * plan.link_bytes_per_second)
                self.run_collective(members, layout.GRADIENTS, net, size)

    def run_collective(
        self, members: Sequence[int], operation: int, net: dict[Label, int], size: int
    ) -> None:
        """Let ranks leave an operation together; of a message, the first one is the sender."""
        players = [self.players[i] for i in members]
        on_device, p2p = self.plan.collectives == "device", operation == layout.SEND
        began = []
        for player in players:
            if not on_device:
                player.synchronize()
            began.append(player.t)
            if on_device:
                player.run_part(HostPart(40_000, "user", OTHER))
                player.wait_for_queue()
        come = [p.device_t if on_device else p.t for p in players]
        release = max(come)
        last = players[come.index(release)]
        why = dict(last.device_why if on_device else last.why)
        group = self._announce_group(players)
        for i, (player, start) in enumerate(zip(players, began)):
            spun = -1
            if on_device:
                spun = player.join_device_collective(last, release, why, net, p2p)
            else:
                player.join_host_collective(last, release, why, net, p2p)
            self._mark_operation(player, start, group, operation, size, players, i, spun)
        nodes = {self.plan.node_of(p.number) for p in players}
        if len(nodes) > 1:
            self.moved += [(release, release + sum(net.values()), n, size) for n in nodes]

    def _announce_group(self, players: Sequence[SimulatedRank]) -> tuple[int, tuple[int, ...]]:
        """Return the group's number, and announce it to its members."""
        ranks = tuple(player.number - self.first for player in players)
        ranks = tuple(sorted(ranks))
        if ranks not in self._groups:
            self._groups[ranks] = compute_group_number(ranks)
            for player in players:
                player.rank.groups[self._groups[ranks]] = ranks
        return self._groups[ranks], ranks

    def _mark_operation(
        self,
        player: SimulatedRank,
        began: int,
        group: tuple[int, tuple[int, ...]],
        operation: int,
        size: int,
        players: Sequence[SimulatedRank],
        place: int,
        spun: int,
    ) -> None:
        number, (d, key) = group[0], (operation, (group[0], 0, player.number))
        if operation == layout.SEND:
            peer = players[1 - place].number - self.first
            sends = place == 0
            d = (layout.SEND if sends else layout.RECV) | (peer + 1) << layout.PEER_SHIFT
            key = (number, players[0].number + 1, player.number)
            size = size if sends else 0
        b = self._numbers.get(key, 0)
        self._numbers[key] = b + 1
        sequence = player.mark(began, layout.COLLECTIVE, number, b, size, d)
        if spun >= 0:
            player.mark(began, layout.EXPOSED_COLLECTIVE, sequence, spun)

    def _run_optimizer(self, player: SimulatedRank, step: int, start: int) -> None:
        began = player.t
        player.run_part(HostPart(self.plan.launch_ns, "user", OTHER))
        player.launch(self.plan.compute_ns // 50)
        player.mark(began, layout.OPTIMIZER)
        player.mark_allocator()
        player.mark(start, layout.STEP, step)
        player.steps.append((start, player.t))
        self._apply_main_faults(player, step, "after")


def new_rank(plan: Plan, first: int, index: int, life: int = 0) -> Rank:
    """Return a rank that has done nothing yet."""
    node, local = divmod(index, plan.per_node)
    device = local + (plan.per_node if first else 0)
    base = 1_000 + 100_000 * life + (5_000 if first else 0) + 100 * local
    main = Thread(base, base, 1, "python")
    workers = [
        Thread(base + 1 + i, base + 1 + i, base, "pt_data_worker") for i in range(plan.workers)
    ]
    variables = {
        "RANK": str(index),
        "WORLD_SIZE": str(plan.ranks),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(plan.per_node),
        "MASTER_ADDR": "node0",
        "MASTER_PORT": str(29500 + (1 if first else 0)),
        "TORCHELASTIC_RESTART_COUNT": str(life),
        "TORCHELASTIC_RUN_ID": "second" if first else "first",
    }
    return Rank(first + index, f"node{node}", main, workers, f"emulated-{device}", [], variables)
