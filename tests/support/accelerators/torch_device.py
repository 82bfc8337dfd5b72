"""A device of PyTorch for jobs without a GPU: torch_device.cpp, compiled once in a test session."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import job_python

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILE_SECONDS = 600

DEVICE = """
import functools, os, sys, time, types
import torch
torch.ops.load_library(os.environ["TORCH_DEVICE"])
torch.utils.rename_privateuse1_backend("testdevice")
device = types.ModuleType("torch.testdevice")
device.Event = functools.partial(torch.Event, "testdevice")
device.current_stream = torch.accelerator.current_stream
device.is_initialized = torch.ops.testdevice.is_initialized
device.synchronize = lambda: torch.accelerator.synchronize()
device.is_available, device.device_count, device.current_device = lambda: True, lambda: 1, lambda: 0
torch._register_device_module("testdevice", device)
torch.utils.generate_methods_for_privateuse1_backend()

def keep_busy(seconds):
    '''Queue work for the current stream.'''
    torch.ops.testdevice.busy_(torch.empty(1, device="testdevice"), round(seconds * 1e3))

class Slow(torch.utils.data.Dataset):
    '''Items that take some time.'''
    def __init__(self, *seconds):
        self.seconds = seconds
    def __len__(self):
        return len(self.seconds)
    def __getitem__(self, index):
        time.sleep(self.seconds[index])
        return torch.ones(8)

net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

def make_step(net):
    '''Move the net to the device; return what trains it on a batch.'''
    net.to("testdevice")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    def step(batch):
        optimizer.zero_grad()
        loss = (net(batch.to("testdevice")) - 1.0).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss
    return step
"""
"""The beginning of a job: the module of the device, and a loop to train with."""


def build_library(folder: Path) -> Path:
    """Compile the device for the jobs' PyTorch; processes that share the folder compile it once.

    Skips the test if there is no compiler, or if another PyTorch than that of the tests has
    another interface. Returns the path that the job wants in TORCH_DEVICE.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"needs a C++ compiler to build a device of PyTorch: no {compiler[0]}")
    library = folder / "torch_device.so"
    with open(folder / "torch_device.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, library)
    return library


def _compile(compiler: list[str], library: Path) -> None:
    extension = "torch.utils.cpp_extension"
    flags = f"['-I' + path for path in {extension}.include_paths()]"
    flags += f" + ['-L' + path for path in {extension}.library_paths()]"
    flags += " + ['-D_GLIBCXX_USE_CXX11_ABI=%d' % torch._C._GLIBCXX_USE_CXX11_ABI]"
    command = [*compiler, "-shared", "-fPIC", "-std=c++20", "-O0", str(SOURCE)]
    command += job_python.evaluate_in_job_python(f"'\\n'.join({flags})", extension).splitlines()
    temporary = library.with_suffix(".tmp")
    done = subprocess.run(
        [*command, "-ltorch_cpu", "-lc10", "-o", str(temporary)],
        capture_output=True,
        text=True,
        timeout=COMPILE_SECONDS,
        check=False,
    )
    if done.returncode and job_python.IS_ANOTHER:
        pytest.skip("the device of these tests does not compile with this PyTorch")
    assert done.returncode == 0, done.stderr
    temporary.rename(library)
