"""Empty CUDA libraries, so that a PyTorch built for CUDA imports on a machine without a GPU.

PyTorch asks for gigabytes of libraries of which a job on the CPU calls not one function. A shell
has the name, the versions and the symbols that PyTorch looks for, and each function of it fails.

python tests/tools/cuda_shells.py FOLDER_OF_TORCH
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# What is not there without CUDA's packages; what begins a symbol of each.
OWNERS = {
    "libcublasLt": ("cublasLt",),
    "libcublas": ("cublas",),
    "libcudnn": ("cudnn",),
    "libcufft": ("cufft",),
    "libcufile": ("cuFile",),
    "libcupti": ("cupti",),
    "libcurand": ("curand",),
    "libcusolver": ("cusolver",),
    "libcusparseLt": ("cusparseLt",),
    "libcusparse": ("cusparse",),
    "libnccl": ("nccl", "pnccl"),
    "libnvJitLink": ("nvJitLink", "__nvJitLink"),
    "libnvrtc": ("nvrtc",),
    "libnvshmem_host": ("nvshmem", "nvshmemi"),
    "libnvToolsExt": ("nvtx",),
}
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_SYMBOL = re.compile(r"^\s*\d+:\s+\w+\s+\d+\s+(\w+)\s+(\w+)\s+\w+\s+UND\s+([\w.]+)(?:@+(\S+))?")


def main(arguments: list[str]) -> int:
    made = make_shells(Path(arguments[0]) / "lib")
    print(f"{len(made)} shells: {', '.join(made)}")
    return 0


def make_shells(libraries: Path) -> list[str]:
    """Write the libraries that torch/lib needs and no package provides; return their names.

    Needs `readelf` and a C compiler. Raises CalledProcessError when one of them fails.
    """
    needed: set[str] = set()
    versioned: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    plain: set[str] = set()
    for path in sorted(libraries.glob("*.so*")):
        needed |= set(_NEEDED.findall(_read_symbols("-dW", path)))
        for line in _read_symbols("--dyn-syms", "-W", path).splitlines():
            result = _SYMBOL.match(line)
            if result and result[4]:
                versioned[result[4]][result[1]].add(result[3])
            elif result:
                plain.add(result[3])
    made = []
    for name in sorted(needed):
        stem = name.partition(".so")[0]
        if stem in OWNERS and not _is_installed(libraries, name):
            symbols = {symbol for symbol in plain if _find_library(symbol) == stem}
            versions = {
                version: set().union(*kinds.values())
                for version, kinds in versioned.items()
                if _is_version_of(version, name, kinds)
            }
            _compile(libraries / name, symbols, versions)
            made.append(name)
    return made


def _read_symbols(*arguments: object) -> str:
    command = ["readelf", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _is_installed(libraries: Path, name: str) -> bool:
    """Return whether the library is there: PyTorch's own folder, or a package of CUDA's."""
    packages = libraries.parent.parent / "nvidia"
    return (libraries / name).exists() or any(packages.glob(f"*/lib/{name}"))


def _find_library(symbol: str) -> str:
    owners = [
        (len(start), stem)
        for stem, starts in OWNERS.items()
        for start in starts
        if symbol.startswith(start)
    ]
    return max(owners)[1] if owners else ""


def _is_version_of(version: str, name: str, kinds: dict[str, set[str]]) -> bool:
    """A version is its library's name, or one of its own that only its symbols bear."""
    if version.startswith("lib"):
        return version == name
    return {_find_library(symbol) for symbols in kinds.values() for symbol in symbols} == {
        name.partition(".so")[0]
    }


def _compile(target: Path, symbols: set[str], versions: dict[str, set[str]]) -> None:
    everything = sorted(symbols.union(*versions.values()))
    source = "".join(f"int {symbol}(void) {{ return 100; }}\n" for symbol in everything)
    script = "".join(
        f"{version} {{ global: {' '.join(f'{symbol};' for symbol in sorted(named))} }};\n"
        for version, named in sorted(versions.items())
    )
    command = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", f"-Wl,-soname,{target.name}"]
    if versions:
        map_file = target.with_suffix(".map")
        map_file.write_text(script)
        command.append(f"-Wl,--version-script={map_file}")
    subprocess.run([*command, "-o", str(target)], input=source, text=True, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
