"""Which versions of which frameworks the probe is run against: the oldest and newest, and between.

A row is one environment: a Python, a PyTorch (or none) and the library. Versions that nobody else
pins are left to pip, but for those in `also`: what the library of its day did not yet forbid.
"""

from __future__ import annotations

from dataclasses import dataclass

NEWEST_TORCH = "2.15.0"
OLD_TORCH = "2.4.1"  # under old versions of the others
OLD_PYTHON = "3.12"
PINNED_TORCH = "2.13.0"  # what CI and `make test` install
OLD_NUMPY = "numpy<2"
OLD_SETUPTOOLS = "setuptools<81"  # has the pkg_resources that old packages import

_TORCH_TESTS = (
    "hooks/test_dataloader",
    "hooks/test_batch",
    "hooks/test_compiling",
    "hooks/test_distributed",
    "hooks/test_distributed_guest",
    "hooks/test_coalescing",
    "hooks/test_functional",
    "hooks/test_ddp",
    "hooks/test_ddp_guest",
    "hooks/test_distributed_sharded",
)
_PYTHON_TESTS = (
    "test_ring",
    "test_annotations",
    "test_import_hooks",
    "test_sitecustomize",
    "test_sitecustomize_chaining",
    "hooks/test_cuda",
    "hooks/test_sync",
    "test_injection",
)
_FRAMEWORK_TESTS = {
    "lightning": "hooks/test_frameworks_lightning",
    "transformers": "hooks/test_frameworks_transformers",
    "torchdata": "hooks/test_stateful",
    "webdataset": "hooks/test_dataloader_webdataset",
    "streaming": "hooks/test_dataloader_streaming",
    "spdl": "hooks/test_loaders_spdl",
    "deepspeed": "hooks/test_frameworks_deepspeed",
    "megatron": "hooks/test_frameworks_megatron",
    "dali": "hooks/test_loaders_dali",
    "jax": "hooks/test_jax_compiling",
    "tfdata": "hooks/test_loaders_tfdata",
}

PACKAGES: dict[str, tuple[str, ...]] = {  # library -> packages whose hooks must stand
    "Python": (),
    "PyTorch": ("torch",),
    "Lightning": ("lightning", "pytorch_lightning", "lightning_fabric"),
    "Transformers": ("transformers", "accelerate", "safetensors"),
    "torchdata": ("torchdata",),
    "WebDataset": (),
    "Mosaic Streaming": (),
    "SPDL": ("spdl",),
    "DeepSpeed": ("deepspeed",),
    "Megatron-Core": ("megatron",),
    "NVIDIA DALI": ("nvidia",),
    "JAX": ("jax",),
    "tf.data": ("tensorflow",),
}


@dataclass(frozen=True)
class Row:
    """One environment: `pins[0]` is what it is about; tests: files below tests/probe."""

    library: str
    pins: tuple[str, ...]
    tests: tuple[str, ...]
    python: str = "3.11"
    torch: str = ""  # "" = without PyTorch
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What `--only` matches, and the name of the environment's folder."""
        parts = [self.pins[0] if self.pins else "python", f"py{self.python}"]
        if self.torch and not self.pins[0].startswith("torch=="):
            parts.append(f"torch{self.torch}")
        return "-".join(parts).replace("==", "-")


def _get_python(version: str) -> Row:
    return Row("Python", (), _PYTHON_TESTS, version)


def _make_torch_pins(version: str, python: str, *also: str) -> Row:
    return Row("PyTorch", (f"torch=={version}",), _TORCH_TESTS, python, version, also)


def _make_row(library: str, test: str, torch: str, *pins: str, also: tuple[str, ...] = ()) -> Row:
    python = OLD_PYTHON if torch == OLD_TORCH else "3.11"
    return Row(library, pins, (_FRAMEWORK_TESTS[test],), python, torch, also)


_OLD = (OLD_NUMPY, OLD_SETUPTOOLS)

ROWS: tuple[Row, ...] = (
    *(_get_python(version) for version in ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13")),
    _make_torch_pins("1.13.1", "3.10", OLD_NUMPY),
    _make_torch_pins("2.0.1", "3.8", OLD_NUMPY),
    _make_torch_pins("2.1.2", "3.10", OLD_NUMPY),
    _make_torch_pins("2.2.2", "3.11", OLD_NUMPY),
    _make_torch_pins("2.4.1", "3.12", OLD_NUMPY, "setuptools"),
    _make_torch_pins("2.6.0", "3.13"),
    _make_torch_pins("2.7.1", "3.9"),
    _make_torch_pins("2.9.1", "3.13"),
    _make_torch_pins(PINNED_TORCH, "3.11"),
    _make_torch_pins(NEWEST_TORCH, "3.13"),
    _make_row(
        "Lightning",
        "lightning",
        OLD_TORCH,
        "lightning==2.0.9",
        "pytorch-lightning==2.0.9",
        also=_OLD,
    ),
    _make_row(
        "Lightning",
        "lightning",
        OLD_TORCH,
        "lightning==2.2.5",
        "pytorch-lightning==2.2.5",
        also=_OLD,
    ),
    _make_row(
        "Lightning", "lightning", PINNED_TORCH, "lightning==2.4.0", "pytorch-lightning==2.4.0"
    ),
    _make_row(
        "Lightning", "lightning", PINNED_TORCH, "lightning==2.5.6", "pytorch-lightning==2.5.6"
    ),
    _make_row(
        "Lightning", "lightning", PINNED_TORCH, "lightning==2.6.6", "pytorch-lightning==2.6.6"
    ),
    _make_row(
        "Transformers",
        "transformers",
        OLD_TORCH,
        "transformers==4.41.2",
        "accelerate==0.30.1",
        also=_OLD,
    ),
    _make_row(
        "Transformers", "transformers", PINNED_TORCH, "transformers==4.49.0", "accelerate==1.4.0"
    ),
    _make_row(
        "Transformers", "transformers", PINNED_TORCH, "transformers==4.57.6", "accelerate==1.15.0"
    ),
    _make_row(
        "Transformers", "transformers", PINNED_TORCH, "transformers==5.0.0", "accelerate==1.10.1"
    ),
    _make_row(
        "Transformers", "transformers", PINNED_TORCH, "transformers==5.23.0", "accelerate==1.15.0"
    ),
    _make_row("torchdata", "torchdata", OLD_TORCH, "torchdata==0.8.0", also=_OLD),
    _make_row("torchdata", "torchdata", PINNED_TORCH, "torchdata==0.10.1"),
    _make_row("torchdata", "torchdata", PINNED_TORCH, "torchdata==0.11.0"),
    _make_row("WebDataset", "webdataset", OLD_TORCH, "webdataset==0.2.86", also=_OLD),
    _make_row("WebDataset", "webdataset", PINNED_TORCH, "webdataset==0.2.111"),
    _make_row("WebDataset", "webdataset", PINNED_TORCH, "webdataset==1.0.2"),
    _make_row(
        "Mosaic Streaming", "streaming", PINNED_TORCH, "mosaicml-streaming==0.7.6", also=_OLD
    ),
    _make_row("Mosaic Streaming", "streaming", PINNED_TORCH, "mosaicml-streaming==0.10.0"),
    _make_row("Mosaic Streaming", "streaming", PINNED_TORCH, "mosaicml-streaming==0.13.0"),
    _make_row("SPDL", "spdl", PINNED_TORCH, "spdl==0.1.7"),
    _make_row("SPDL", "spdl", PINNED_TORCH, "spdl==0.4.0"),
    _make_row("SPDL", "spdl", PINNED_TORCH, "spdl==0.8.0"),
    _make_row("DeepSpeed", "deepspeed", OLD_TORCH, "deepspeed==0.14.5", also=_OLD),
    _make_row("DeepSpeed", "deepspeed", PINNED_TORCH, "deepspeed==0.16.9"),
    _make_row("DeepSpeed", "deepspeed", PINNED_TORCH, "deepspeed==0.19.8"),
    _make_row("Megatron-Core", "megatron", OLD_TORCH, "megatron-core==0.12.3", also=_OLD),
    _make_row("Megatron-Core", "megatron", PINNED_TORCH, "megatron-core==0.14.0"),
    _make_row("Megatron-Core", "megatron", PINNED_TORCH, "megatron-core==0.16.1"),
    _make_row("NVIDIA DALI", "dali", PINNED_TORCH, "nvidia-dali-cuda120==1.53.0"),
    _make_row("NVIDIA DALI", "dali", PINNED_TORCH, "nvidia-dali-cuda120==2.4.0", "jax==0.10.2"),
    _make_row("JAX", "jax", "", "jax==0.4.30", "jaxlib==0.4.30", also=_OLD),
    _make_row("JAX", "jax", "", "jax==0.6.2"),
    _make_row("JAX", "jax", "", "jax==0.10.2"),
    _make_row("tf.data", "tfdata", "", "tensorflow-cpu==2.15.1", also=_OLD),
    _make_row("tf.data", "tfdata", "", "tensorflow-cpu==2.18.1"),
    _make_row("tf.data", "tfdata", "", "tensorflow-cpu==2.21.0"),
)
