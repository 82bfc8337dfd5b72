"""torch.cuda in front of the emulated device: what a job would see on real accelerators.

Only what a training script and its tools use: initialization, streams, events, copies by
`Tensor.to("cuda")`, counters of the allocator. Tensors stay in host memory.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
from device import Device, Event


class OnDevice(torch.Tensor):
    """A tensor that says that it is on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values as a result that the device still computes."""
    return tensor.detach().as_subclass(OnDevice)


def install(device: Device) -> dict[str, int]:
    """Put the device under torch.cuda; return the allocator's counters, for the script to raise."""
    cuda, owner = torch.cuda, os.getpid()
    stream = SimpleNamespace(device_index=0, cuda_stream=0, synchronize=device.synchronize)
    counters = {"num_alloc_retries": 0, "num_ooms": 0, "num_device_alloc": 0, "num_device_free": 0}
    cuda._initialized = True
    cuda.is_initialized = lambda: os.getpid() == owner
    cuda.current_device = lambda: 0
    cuda.current_stream = lambda device=None: stream
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_properties = lambda device=None: SimpleNamespace(name="emulated")
    cuda.Event = lambda **options: Event(device)
    cuda.synchronize = lambda _=None: device.synchronize()
    cuda.memory_stats = lambda device=None: dict(counters)
    cuda.memory.memory_stats = cuda.memory_stats
    cuda.memory_stats_as_nested_dict = cuda.memory_stats
    original = torch.Tensor.to

    def to(tensor, *arguments, **keywords):
        if arguments[:1] != ("cuda",):
            return original(tensor, *arguments, **keywords)
        size_bytes = tensor.numel() * tensor.element_size()
        device.copy(size_bytes, pinned=bool(keywords.get("non_blocking")))
        return on_device(tensor)

    torch.Tensor.to = to
    item = torch.Tensor.item

    def synchronized(tensor):
        device.synchronize()
        return item(tensor)

    torch.Tensor.item = synchronized
    return counters
