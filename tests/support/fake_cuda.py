"""A small torch.cuda with a stream clock, for jobs without a GPU."""

from __future__ import annotations

FAKE = """
import sys, time, types
clock = [0]
time.monotonic_ns = lambda: clock[0]

class Stream:
    def __init__(self, device):
        self.device_index, self.end, self.cuda_stream = device, 0, 0
    def work(self, ns):
        self.end = max(clock[0], self.end) + ns

class Event:
    made = 0
    def __init__(self, enable_timing):
        assert enable_timing
        Event.made += 1
        self.device, self.at = None, None
    def record(self, stream):
        assert not cuda.capturing and cuda.initialized
        assert self.device in (None, stream.device_index)
        self.device, self.at = stream.device_index, max(clock[0], stream.end)
    def query(self):
        assert not cuda.capturing
        return clock[0] >= self.at
    def elapsed_time(self, later):
        assert self.query() and later.query()
        return (later.at - self.at) / 1e6
    def synchronize(self):
        raise AssertionError

cuda = types.ModuleType("torch.cuda")
cuda.Event, cuda.capturing, cuda.initialized = Event, False, True
cuda.streams, cuda.device = [Stream(0), Stream(1)], 0
cuda.current_stream = lambda: cuda.streams[cuda.device]
cuda.current_device = lambda: cuda.device
cuda.is_current_stream_capturing = lambda: cuda.capturing
cuda.is_initialized = lambda: cuda.initialized
def get_device_properties(device):
    assert cuda.initialized
    return types.SimpleNamespace(uuid="c0ffee0%d" % device)
cuda.get_device_properties = get_device_properties

class Tensor:
    is_cuda = False
    def __init__(self, is_cuda=False):
        self.is_cuda = is_cuda

torch = types.ModuleType("torch")
torch.cuda, torch.Tensor = cuda, Tensor
sys.modules.update({"torch": torch, "torch.cuda": cuda})

class Base:
    _num_workers = _num_yielded = 0
    def __next__(self):
        clock[0] += self.takes
        self._num_yielded += 1

class Single(Base):
    def __init__(self, loader=None): pass

def _worker_loop(worker_id, num_workers): pass
Fetcher = type("Fetcher", (), {"fetch": lambda self, index: None})
loaders = types.SimpleNamespace(
    _BaseDataLoaderIter=Base, _SingleProcessDataLoaderIter=Single,
    _MultiProcessingDataLoaderIter=type("Multi", (Base,), {"__init__": lambda self: None}),
    _utils=types.SimpleNamespace(
        worker=types.SimpleNamespace(_worker_loop=_worker_loop),
        fetch=types.SimpleNamespace(_MapDatasetFetcher=Fetcher, _IterableDatasetFetcher=Fetcher),
    ),
)
import _clusterprof_probe as probe
probe.load()
from _clusterprof_probe.hooks import cuda as events, dataloader
dataloader.install(loaders)
batches = Base()
def wait(ns):
    batches.takes = ns
    next(batches)
"""
