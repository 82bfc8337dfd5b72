"""A synchronous training job, step by step: one pass of all ranks, then a common operation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterprof.probe import layout
from clusterprof.probe.hooks.process_groups import compute_group_number
from clusterprof_lab.synth import simulate_sharded
from clusterprof_lab.synth.simulate_blame import Label
from clusterprof_lab.synth.simulate_faults import Fault, Faults
from clusterprof_lab.synth.simulate_loader import Loader
from clusterprof_lab.synth.simulate_plan import Plan
from clusterprof_lab.synth.simulate_player import Part, Player
from clusterprof_lab.synth.story import Act, Rank, Thread, Work
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
            Player(new_rank(plan, first_rank, i, life), plan.depth, start_ns)
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
            player.do(Part(startup_ns, "user", "startup"))
        self.loaders = [self._loader(player) for player in self.players]
        sharded = self.plan.layout == "sharded"
        for step in range(first_step, first_step + (self.plan.steps if steps is None else steps)):
            if sharded:
                simulate_sharded.begin_step(self, step)
            self.step(step)
        for player in self.players:
            player.finish()

    def step(self, step: int) -> None:
        """Let all ranks do one step."""
        began = [player.t if not player.steps else player.steps[-1][1] for player in self.players]
        for player, loader in zip(self.players, self.loaders):
            if not player.steps:
                player.device_ready()  # what it lost until now lies before the steps
            self._main(player, step, "before")
            if loader is not None:
                loader.next()
                self._copy(player, step)
        if self.plan.layout == "pipeline":
            self._pipeline(step)
            self._meet_all(step)
        elif self.plan.layout == "sharded":
            simulate_sharded.pass_units(self, step)
        else:
            self._passes(step)
            self._meet_all(step)
        for player, start in zip(self.players, began):
            self._optimise(player, step, start)

    def _loader(self, player: Player) -> Loader | None:
        plan = self.plan
        if plan.layout == "pipeline" and player.number % plan.stages:
            return None
        workers = player.rank.workers
        return Loader(player, workers, plan.prefetch, self._produce, plan.epochs == 1)

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
            player, workers, self.plan.prefetch, self._produce, False, first_batch
        )

    def _produce(self, rank: int, batch: int) -> list[Part]:
        plan, factor = self.plan, float(self.load[rank - self.first, batch % self.plan.steps])
        read = round(plan.read_ns * factor)
        how = plan.read
        usual = "storage-local" if how["doing"] == "block-io" else "storage-remote"
        cause = how.get("cause", usual)
        per_ns = 1e-9 * float(how.get("operations_per_second", 0))
        parts = [
            Part(
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
        parts += self.faults.loader(rank, batch)
        own = next((f.cause for f in self.faults.all if f.cause == "cpu-loader-config"), None)
        parts.append(Part(round(plan.decode_ns * factor), "user", own or "cpu-preprocess"))
        return parts

    def _main(self, player: Player, step: int, where: str) -> None:
        """Let faults of the main thread strike."""
        for fault in self.faults.of("main"):
            if fault.where == where:
                self._strike(player, fault, step, 1.0)

    def _strike(self, player: Player, fault: Fault, step: int, ratio: float) -> None:
        parts = fault.parts(player.number, step, ratio)
        if not parts:
            return
        if fault.synchronise:
            waits = 0 if fault.extra == "allocator" else sum(p.doing == "device" for p in parts[:1])
            asked = player.t
            player.synchronise()
            for part in parts[:waits]:
                player.do(part)
            parts = parts[waits:]
            if fault.extra == "allocator":
                player.allocate()
            else:
                player.mark(asked, layout.SYNC, player.t - asked, 1)
        began = player.t
        for part in parts:
            player.do(part)
        if fault.extra == "gil-hog":
            self._hog(player).acts.append(Act(began, player.t, "user"))
        if fault.mark:
            player.mark(began, fault.mark, player.count_marks(fault.mark, fault.cause))
            player.rank.gc_pauses += fault.mark == layout.GC

    def _hog(self, player: Player) -> Thread:
        """Return the thread that holds the interpreter's lock."""
        main, threads = player.rank.main, player.rank.threads
        if not threads:
            threads.append(Thread(main.pid, main.pid + 50, main.parent_pid, "python"))
        return threads[0]

    def _copy(self, player: Player, step: int) -> None:
        began, more = player.t, self.faults.copy_ns(player.number, step)
        unhooked = any(fault.extra == "unhooked" for fault in self.faults.of("copy"))
        marked_ns = self.plan.copy_ns + (0 if unhooked else more)
        size = round(marked_ns * 12.0)  # 12 GB/s
        player.do(Part(50_000, "user", OTHER))
        player.launch(self.plan.copy_ns, "copy")
        if more and not unhooked:
            self._copy_blocking(player, more, "h2d-copy")
        player.mark(began, layout.H2D, size, int(unhooked or not more))
        if more and unhooked:  # an extension that the probe does not know copies
            self._copy_blocking(player, more, "h2d-copy-bound")

    def _copy_blocking(self, player: Player, ns: int, cause: str) -> None:
        """Let the host wait for a copy, and the device compute nothing."""
        player.synchronise()
        copies = player.t
        player.do(Part(ns, "device", cause))
        player.rank.work.append(Work(copies, player.t, "copy"))

    def _passes(self, step: int) -> None:
        """Forward and backward."""
        plan = self.plan
        for i, where in enumerate(("forward", "backward")):
            for player in self.players:
                self.run_pass(player, step, where, plan.compute_ns * (1 + i) // 3, plan.chunks)
            if plan.layout == "tensor":
                for first in range(0, plan.ranks, plan.stages):
                    self.meet(range(first, first + plan.stages), layout.ALL_REDUCE, {}, 4 << 20)

    def run_pass(self, player: Player, step: int, where: str, ns: int, chunks: int) -> None:
        """Launch one pass, in chunks; what strikes in it strikes before, or between them."""
        passes = _CALLS_PER_PASS.get(self.plan.layout, 1)
        struck = [fault for fault in self.faults.of("main") if fault.where == where]
        on_main = [fault for fault in self.faults.of("loader") if fault.main_ratio]
        slow = self.faults.compute(player.number, step)
        more = self.faults.launch_ns(player.number, step)
        cause = next((f.cause for f in self.faults.of("launch")), OTHER)
        factor = float(self.jitter[player.number - self.first, step, int(where == "backward")])
        total = round(ns * factor)
        for i in range(chunks):
            for fault in struck:
                times = min(fault.times, chunks)
                if i * times // chunks != (i - 1) * times // chunks:
                    self._strike(player, fault, step, 1.0 / (times * passes))
            for fault in on_main:
                self._strike(player, fault, step, fault.main_ratio / (2 * chunks * passes))
            player.do(Part(self.plan.launch_ns + more, "user", cause if more else OTHER))
            part = total * (i + 1) // chunks - total * i // chunks
            extra = None
            if slow is not None:
                extra = slow._replace(ns=slow.ns * part // self.plan.compute_ns)
            player.launch(part, "compute", extra, 0.9 if not more else 0.2)

    def _pipeline(self, step: int) -> None:
        """GPipe: all micro-batches forward through the stages, then backward."""
        plan, stages = self.plan, self.plan.stages
        down, up = plan.compute_ns // (3 * MICRO), 2 * plan.compute_ns // (3 * MICRO)
        for first in range(0, plan.ranks, stages):
            for _ in range(MICRO):
                for stage in range(stages):
                    self.run_pass(self.players[first + stage], step, "forward", down, 1)
                    if stage + 1 < stages:
                        self._message(first + stage, first + stage + 1)
            for _ in range(MICRO):
                for stage in reversed(range(stages)):
                    self.run_pass(self.players[first + stage], step, "backward", up, 1)
                    if stage:
                        self._message(first + stage, first + stage - 1)

    def _message(self, sender: int, receiver: int) -> None:
        between = self.plan.node_of(sender) != self.plan.node_of(receiver)
        net = {("net-transfer", None): self.plan.transfer_ns // (16 if between else 64)}
        self.meet((sender, receiver), layout.SEND, net, 1 << 20)

    def _meet_all(self, step: int) -> None:
        """All-reduce the gradients, of each stage for itself."""
        plan = self.plan
        more = self.faults.transfer(step)
        for stage in range(plan.stages):
            members = range(stage, plan.ranks, plan.stages)
            if len(members) > 1:
                net = {("net-transfer", None): plan.transfer_ns}
                for label, ns in more.items():
                    net[label] = net.get(label, 0) + ns
                # What merely takes its time is more data; what a fault adds is not.
                due_ns = net["net-transfer", None]
                size = round(due_ns * 1e-9 * plan.link_bytes_per_second)
                self.meet(members, layout.GRADIENTS, net, size)

    def meet(
        self, members: Sequence[int], operation: int, net: dict[Label, int], size: int
    ) -> None:
        """Let ranks leave an operation together; of a message, the first one sends."""
        players = [self.players[i] for i in members]
        on_device, p2p = self.plan.collectives == "device", operation == layout.SEND
        began = []
        for player in players:
            if not on_device:
                player.synchronise()
            began.append(player.t)
            if on_device:
                player.do(Part(40_000, "user", OTHER))
                player.device_ready()
        come = [p.device_t if on_device else p.t for p in players]
        release = max(come)
        last = players[come.index(release)]
        why = dict(last.device_why if on_device else last.why)
        group = self._group(players)
        for i, (player, start) in enumerate(zip(players, began)):
            spun = -1
            if on_device:
                spun = player.meet_device(last, release, why, net, p2p)
            else:
                player.meet_host(last, release, why, net, p2p)
            self._mark(player, start, group, operation, size, players, i, spun)
        nodes = {self.plan.node_of(p.number) for p in players}
        if len(nodes) > 1:
            self.moved += [(release, release + sum(net.values()), n, size) for n in nodes]

    def _group(self, players: Sequence[Player]) -> tuple[int, tuple[int, ...]]:
        """Return the group's number, and announce it to its members."""
        ranks = tuple(player.number - self.first for player in players)
        ranks = tuple(sorted(ranks))
        if ranks not in self._groups:
            self._groups[ranks] = compute_group_number(ranks)
            for player in players:
                player.rank.groups[self._groups[ranks]] = ranks
        return self._groups[ranks], ranks

    def _mark(
        self,
        player: Player,
        began: int,
        group: tuple[int, tuple[int, ...]],
        operation: int,
        size: int,
        players: Sequence[Player],
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

    def _optimise(self, player: Player, step: int, start: int) -> None:
        began = player.t
        player.do(Part(self.plan.launch_ns, "user", OTHER))
        player.launch(self.plan.compute_ns // 50)
        player.mark(began, layout.OPTIMIZER)
        player.look_at_allocator()
        player.mark(start, layout.STEP, step)
        player.steps.append((start, player.t))
        self._main(player, step, "after")


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
