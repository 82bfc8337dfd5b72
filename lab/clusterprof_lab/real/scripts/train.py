"""An ordinary PyTorch training script, unaware of any profiler, with options that make it slow.

DistributedDataParallel over gloo, a DataLoader with workers, an optimizer; the accelerator is
emulated (`device`). With collectives on the device, the transfer of the gradients is queued there
and the host goes on; with collectives on the host, the backward pass waits for it. Stopwatches:
`watch`.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time

import cuda
import torch
import torch.distributed as dist
from device import Device
from loading import ITEMS_PER_BATCH, Records, read_run_delay_ns
from stopwatch import Stopwatch, now_ns
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, get_worker_info
from training_faults import TrainingFaults
from turns import Turns

BLOCKS = 4


class Launch(torch.autograd.Function):
    """One block's kernels: a third of its device time forward, two thirds backward."""

    @staticmethod
    def forward(ctx, x, trainer):
        ctx.trainer = trainer
        trainer.launch(1 / 3 / BLOCKS)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.trainer.launch(2 / 3 / BLOCKS)
        ctx.trainer.in_backward()
        return gradient, None


class Model(torch.nn.Module):
    def __init__(self, features: int, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer
        layers = (torch.nn.Linear(features, features, bias=False) for _ in range(BLOCKS))
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = Launch.apply(torch.tanh(layer(x)), self.trainer)
        return x


class Trainer:
    """One rank."""

    def __init__(self, turns: Turns, rank: int, world: int) -> None:
        # What it is now: everyone who has it sees a turn.
        self.options = options = argparse.Namespace(**vars(turns.faulty))
        self.turns, self.rank, self.world, self.whole_mb = turns, rank, world, options.model_mb
        header = {"rank": rank, "world": world, "host": os.uname().nodename}
        header["workers"] = options.workers
        self.watch = Stopwatch(options.folder, rank, header)
        self.device = Device(get_queue_depth(options))
        self.on_host = options.collectives == "host"
        self.random = random.Random(options.seed * 1000 + rank)
        self.factor, self.backwards, self.step = 1.0, 0, 0
        self.arrived_ns = self.arrived_delay_ns = self.messages = 0
        self.transfers = dist.new_group(backend="gloo")
        self.model = Model(options.features, self)
        self.optimizer: torch.optim.Optimizer | None = None  # made for steps without DDP
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=1024)
        if not self.on_host:
            self.ddp.register_comm_hook(None, self.reduce_on_device)
        for parameter in self.model.parameters():
            parameter.register_hook(self.record_arrival)
        self.troubles = TrainingFaults(options, self.device, self.watch, cuda.install(self.device))
        self.set_options(turns.get_options(0))

    def set_options(self, options: argparse.Namespace) -> None:
        """Go on with these options."""
        vars(self.options).update(vars(options))
        self.device.set_queue_depth(get_queue_depth(options))
        self.device.throttle(options.clock_ratio, options.throttle_bits * (options.clock_ratio < 1))

    def switch_if_due(self) -> None:
        if self.turns.begins_turn(self.step):
            if self.options.switched:
                self.device.synchronize()
            self.turns.wait_until_switched(self.step, self.rank)
            self.set_options(self.turns.get_options(self.step))

    def record_arrival(self, _) -> None:
        if self.on_host:
            self.device.synchronize()
        self.arrived_ns, self.arrived_delay_ns = now_ns(), read_run_delay_ns()

    def launch(self, part: float) -> None:
        """Queue this part of the step's kernels."""
        options = self.options
        if options.host_ms:
            burn_cpu(options.host_ms)
        count = max(1, round(options.kernels * part))
        length_ns = round(options.compute_ms * 1e6 * self.factor * part / count)
        for _ in range(count):
            if options.launch_us:
                burn_until(now_ns() + round(options.launch_us * 1e3))
            self.device.submit(length_ns)
        if options.item_syncs:
            cuda.on_device(self.loss).item()

    def in_backward(self) -> None:
        self.backwards += 1
        if self.backwards % BLOCKS == 2:
            self.troubles.in_backward(self.step)

    def reduce_on_device(self, _, bucket):
        gradients = bucket.buffer()
        sent = round(gradients.numel() * min(1.0, self.options.model_mb / self.whole_mb))
        group, copy = self.transfers, gradients[:sent].clone()
        self.device.collective(lambda: group.allreduce([copy]).wait())
        torch.autograd.Variable._execution_engine.queue_callback(self.device.join)
        done = torch.futures.Future()
        done.set_result(gradients)
        return done

    def train(self) -> None:
        options = self.options
        records = Records(self.turns, self.rank, self.world)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        self.loss = torch.zeros(())
        dist.barrier()  # behind the loader's start the first step has begun, to those who watch
        began_ns = now_ns()
        batches = make_batches(records, self.turns)
        for self.step in range(options.steps):
            self.switch_if_due()
            self.draw()
            with self.watch.phase("data_wait"):
                x = next(batches[self.turns.is_on(self.step) - 1])
            self.stop_if_due()
            if options.micro_batches:
                self.run_pipeline(x)
            else:
                self.run_step(x, optimizer)
            if not self.last():  # what comes after the last step is in none
                self.troubles.after_step(self.step, self.model, cuda.on_device(self.loss))
            items = slice(self.step * ITEMS_PER_BATCH, (self.step + 1) * ITEMS_PER_BATCH)
            self.watch.step(self.step, began_ns, records.watch[items].tolist(), self.device.log)
        self.watch.step(-1, began_ns, [], self.device.log)

    def last(self) -> bool:
        return self.step == self.options.steps - 1

    def run_step(self, x, optimizer) -> None:
        self.troubles.before_forward(self.step)
        if self.options.chain:
            if self.rank > 0:
                self.send_or_receive("recv", x, self.rank - 1)
            if self.rank + 1 < self.world:
                self.send_or_receive("send", x, self.rank + 1)
        self.loss = self.ddp(x).square().mean()
        self.loss.backward()
        left_ns = now_ns()
        if self.on_host:
            came = (self.arrived_ns, left_ns)
            self.watch.operations.append(["all", -1, self.step, *came])
        if self.last():  # else the job is over on the host while its device still works
            self.device.synchronize()
        optimizer.step()
        optimizer.zero_grad()

    def run_pipeline(self, x) -> None:
        """Each rank is a stage: it takes what the stage before made, computes, hands it on."""
        parts = self.options.micro_batches
        for _ in range(parts):
            if self.rank > 0:
                self.send_or_receive("recv", x, self.rank - 1)
            self.launch(1 / parts)
            self.device.synchronize()
            if self.rank + 1 < self.world:
                self.send_or_receive("send", x, self.rank + 1)
        come_ns = now_ns()
        dist.all_reduce(torch.zeros(1))
        self.watch.operations.append(["all", -1, self.step, come_ns, now_ns()])
        run_optimizer(self)

    def send_or_receive(self, way: str, x, peer: int) -> None:
        come_ns = now_ns()
        (dist.send if way == "send" else dist.recv)(x, peer)
        self.watch.operations.append([way, peer, -1, come_ns, now_ns()])

    def draw(self) -> None:
        options = self.options
        self.factor = 1.0
        if options.jitter:
            self.factor = max(0.5, self.random.gauss(1.0, options.jitter))
        if options.skew:
            self.factor = math.exp(self.random.gauss(0.0, options.skew))

    def stop_if_due(self) -> None:
        if self.step == self.options.hang_at:
            time.sleep(1e6)
        if self.step == self.options.fail_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit("the script fails, as asked")


def get_queue_depth(options: argparse.Namespace) -> int:
    return max(8, options.queued_steps * max(options.kernels, 8))


def make_batches(records: Records, turns: Turns) -> list:
    """Return the batches, or those of turns with the fault and those of turns without it."""
    out = []
    for number, options in enumerate(turns.loader_options):
        mine = None
        if len(turns.loader_options) > 1:
            mine = [
                step * ITEMS_PER_BATCH + item
                for step in range(options.steps)
                if turns.is_on(step) == (number == 0)
                for item in range(ITEMS_PER_BATCH)
            ]
        prefetch = {"prefetch_factor": options.prefetch} if options.workers else {}
        loader = DataLoader(
            records,
            ITEMS_PER_BATCH,
            sampler=mine,
            num_workers=options.workers,
            worker_init_fn=hold_memory,
            **prefetch,
        )
        out.append(iter(loader))
    return out


def run_optimizer(trainer: Trainer) -> None:
    """A step of an optimizer over gradients of a forward-only pipeline."""
    if trainer.optimizer is None:
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.001)
    trainer.optimizer.step()


def hold_memory(worker: int) -> None:
    get_worker_info().dataset.allocate_memory()


def burn_cpu(length_ms: float) -> None:
    end_ns = time.thread_time_ns() + round(length_ms * 1e6)
    while time.thread_time_ns() < end_ns:
        sum(i * i % 7 for i in range(50))


def burn_until(end_ns: int) -> None:
    while now_ns() < end_ns:
        pass


def join_process_group() -> None:
    life, variables = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ
    if life == "0":
        dist.init_process_group("gloo")
        return
    # gloo would find the addresses of ranks that are gone, in the store that outlived them.
    rank, world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    store = dist.TCPStore(variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"life-{life}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def main() -> None:
    turns = Turns(sys.argv[1:])
    sys.setswitchinterval(0.0005)  # the driver's thread must not wait long for the interpreter
    torch.set_num_threads(1)
    torch.manual_seed(0)
    join_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    turns.apply_rank_options(rank)
    trainer = Trainer(turns, rank, world)
    if trainer.options.start_ms:
        time.sleep(trainer.options.start_ms / 1000)
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
