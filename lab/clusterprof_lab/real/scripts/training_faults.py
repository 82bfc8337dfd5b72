"""Faults inside the training process: real pauses, timed by the stopwatches."""

from __future__ import annotations

import argparse
import gc
import os
import threading
import time

import torch
from device import Device
from stopwatch import Stopwatch, now_ns


def _is_due(step: int, interval_steps: int) -> bool:
    """In the middle of so many steps: the last steps of a job are then as usual as the first."""
    return interval_steps > 0 and step % interval_steps == interval_steps // 2


class TrainingFaults:
    """Injects the faults that the options ask for, between the parts of a step."""

    def __init__(
        self,
        options: argparse.Namespace,
        device: Device,
        watch: Stopwatch,
        counters: dict[str, int],
    ) -> None:
        self.options, self.device, self.watch, self.counters = options, device, watch, counters
        self.folder = options.write_to or options.folder
        self.rank = int(os.environ["RANK"])
        self.heap: list = []
        self.hold = threading.Event()
        if options.gc_every:
            self._grow_heap(options.gc_ms)
        if options.gil_ms:
            threading.Thread(
                target=self._hold_interpreter_lock, daemon=True, name="metrics"
            ).start()
        if options.recompile_every:
            self.compiled = self._get_compiled()
        if options.log_ms or options.log:
            path = options.log or f"{self.folder}/train"
            self.log = os.open(f"{path}.{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def before_forward(self, step: int) -> None:
        """After the batch is there: copies, allocations, compilation."""
        options = self.options
        if options.copy_mb:
            batch = torch.empty(1, dtype=torch.uint8).expand(round(options.copy_mb * 1e6))
            with self.watch.phase("h2d-copy"):
                batch.to("cuda", non_blocking=bool(options.pinned))
        if options.alloc_ms:
            with self.watch.phase("launch-alloc"):
                self.device.synchronize()  # freeing waits for the device, as in a driver
                self.counters["num_alloc_retries"] += 1
                self.counters["num_device_alloc"] += 8
                self.counters["num_device_free"] += 8
                time.sleep(options.alloc_ms / 1000)
        late = step >= 10  # what is compiled before belongs to the start
        if options.recompile_every and late and step % options.recompile_every == 0:
            with self.watch.phase("launch-recompile"):
                self.compiled(torch.ones(3 + step))

    def in_backward(self, step: int) -> None:
        """In the middle of the launches."""
        options = self.options
        if options.gil_ms:
            self.hold.set()  # the other thread takes the interpreter; we go on when it lets go
            time.sleep(0.001)
        if options.gc_every and step % options.gc_every == options.gc_every - 1:
            with self.watch.phase("cpu-gc"):
                gc.collect()

    def after_step(self, step: int, model: torch.nn.Module, loss: torch.Tensor) -> None:
        """Between two steps of the optimizer: logs, checkpoints, validation."""
        options = self.options
        if options.log_ms or options.log:
            with self.watch.phase("eval-host"):
                self._write_log(loss.item(), options.log_ms)
        if _is_due(step, options.checkpoint_every):
            with self.watch.phase("checkpoint"):
                self._checkpoint(model, options.checkpoint_ms)
        if _is_due(step, options.eval_every):
            with self.watch.phase("eval-host"):
                self._evaluate(model, options.eval_ms)

    def _checkpoint(self, model: torch.nn.Module, length_ms: float) -> None:
        self.device.synchronize()
        end_ns, shard = now_ns() + round(length_ms * 1e6), 0
        size = self.options.checkpoint_mb << 18 or 1 << 18
        while not shard or now_ns() < end_ns:
            path = f"{self.options.checkpoint or self.folder + '/checkpoint'}.{self.rank}-{shard}"
            torch.save({"model": model.state_dict(), "more": torch.zeros(size)}, path)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            shard += 1

    def _write_log(self, loss: float, length_ms: float) -> None:
        end_ns = now_ns() + round(length_ms * 1e6)
        line = f"loss {loss:.6f}\n".encode()
        while True:
            os.write(self.log, line * (self.options.log_bytes // len(line)))
            os.fsync(self.log)
            if now_ns() >= end_ns:
                return

    def _evaluate(self, model: torch.nn.Module, length_ms: float) -> None:
        model.eval()
        self.device.synchronize()
        end_ns = time.thread_time_ns() + round(length_ms * 1e6)
        with torch.no_grad():
            while time.thread_time_ns() < end_ns:
                sorted((i * 7919) % 1000 for i in range(300))
        model.train()

    def _grow_heap(self, length_ms: float) -> None:
        """Live objects until a full collection takes that long."""
        while True:
            self.heap.extend([[], []] for _ in range(50_000))
            began_ns = now_ns()
            gc.collect()
            if now_ns() - began_ns >= length_ms * 1e6:
                return

    def _hold_interpreter_lock(self) -> None:
        """Keep the interpreter in one long call that never looks whether others want it."""
        count = 100_000
        while True:
            self.hold.wait()
            self.hold.clear()
            start_ns = now_ns()
            sum(range(count))
            end_ns = now_ns()
            self.watch.injected.append([start_ns, end_ns, "cpu-gil"])
            if not self.options.gil_ms:
                continue  # its turn has just ended
            factor = self.options.gil_ms * 1e6 / max(end_ns - start_ns, 1)
            count = max(1000, round(count * min(max(factor, 0.5), 20.0)))

    def _get_compiled(self):
        import torch._dynamo as dynamo

        for name in ("cache_size_limit", "recompile_limit"):
            if hasattr(dynamo.config, name):
                setattr(dynamo.config, name, 10_000)
        dynamo.config.automatic_dynamic_shapes = False
        count = self.options.recompile_operations

        def augment(x):
            for number in range(count):
                x = torch.tanh(x * 1.01 + number)
            return x

        return torch.compile(augment, backend="eager", dynamic=False)
