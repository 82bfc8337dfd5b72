"""Runs a hook after a module was imported by the job, and imports nothing for the job itself."""

import sys
from _thread import get_ident

from . import failed, load, without_our_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Dict, List, Sequence, Set, Tuple

_hooks: "Dict[str, List[Tuple[int, str]]]" = {}
notes: "List[Tuple[int, int]]" = []
"""(hook number, 1 = hooked or 0 = could not): what the ring tells the recorder when it opens."""


class Finder:
    """Stands first in sys.meta_path, finds what the others find, and wraps its loader once."""

    def __init__(self) -> None:
        self.searching: "Set[Tuple[str, int]]" = set()

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in _hooks:
            return None
        search = (name, get_ident())
        if search in self.searching:
            return None  # a finder that asks everybody, as we do, asks us back
        try:
            self.searching.add(search)
            return self._find(name, path, target)
        except BaseException:
            return None  # Python asks the other finders itself, and meets the same error
        finally:
            self.searching.discard(search)

    def _find(self, name: str, path: "Any", target: "Any") -> "Any":
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _wrap(spec.loader)
                return spec
        return None


def _wrap(loader: "Any") -> None:
    """Let one exec_module() of a loader be followed by our hooks; the loader stays the loader."""
    if isinstance(loader, type) or not hasattr(loader, "exec_module"):
        return
    original = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        loader.__dict__.pop("exec_module", None)
        try:
            original(module)
        except BaseException as error:
            without_our_frame(error)
            raise
        run_hooks(module.__name__, module)

    loader.exec_module = exec_module


def watch(hooks: "Sequence[Tuple[str, str]]") -> None:
    """Run `hooks.<file>.install(module)` for each (module name, file) as soon as it is imported."""
    for number, (name, file) in enumerate(hooks):
        _hooks.setdefault(name, []).append((number, file))
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    for name in list(_hooks):
        module = sys.modules.get(name)
        if module is not None:
            run_hooks(name, module)


def run_hooks(name: str, module: "ModuleType") -> None:
    """Install the hooks that wait for this module; one that cannot is noted, not raised."""
    for number, file in _hooks.get(name, ()):
        hooked = 0
        try:
            load()
            full = __name__.rpartition(".")[0] + ".hooks." + file
            __import__(full)
            hooked = int(sys.modules[full].install(module))
        except (AttributeError, TypeError, ValueError, LookupError, StopIteration):
            pass  # another version of the framework: this seam is not where we know it
        except BaseException as error:
            failed(error)
        notes.append((number, hooked))
