"""Runs hooks after the job has imported a module; never imports a module for the job itself."""

import sys
from _thread import get_ident

from . import handle_error, load, remove_own_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Dict, List, Sequence, Set, Tuple

_hooks: "Dict[str, List[Tuple[int, str]]]" = {}
notes: "List[Tuple[int, int]]" = []
"""(hook number, 1 = installed or 0 = not possible), written to the ring when it opens."""


class HookFinder:
    """First entry of sys.meta_path: uses the other finders and wraps their loader once."""

    def __init__(self) -> None:
        self.searching: "Set[Tuple[str, int]]" = set()

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in _hooks:
            return None
        search_key = (name, get_ident())
        if search_key in self.searching:
            return None  # another finder that queries all finders has called us back
        try:
            self.searching.add(search_key)
            return self._find(name, path, target)
        except BaseException:
            return None  # Python queries the other finders itself and meets the error there
        finally:
            self.searching.discard(search_key)

    def _find(self, name: str, path: "Any", target: "Any") -> "Any":
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _wrap_loader(spec.loader)
                return spec
        return None


def _wrap_loader(loader: "Any") -> None:
    """Run our hooks after one exec_module() of a loader; the loader object stays unchanged."""
    if isinstance(loader, type) or not hasattr(loader, "exec_module"):
        return
    original = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        loader.__dict__.pop("exec_module", None)
        try:
            original(module)
        except BaseException as error:
            remove_own_frame(error)
            raise
        run_hooks(module.__name__, module)

    loader.exec_module = exec_module


def watch_imports(hooks: "Sequence[Tuple[str, str]]") -> None:
    """Run the hooks of each (module name, file) as soon as the module is imported."""
    for number, (name, hook_file) in enumerate(hooks):
        _hooks.setdefault(name, []).append((number, hook_file))
    if not any(isinstance(finder, HookFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, HookFinder())  # type: ignore[arg-type]
    for name in list(_hooks):
        module = sys.modules.get(name)
        if module is not None:
            run_hooks(name, module)


def run_hooks(name: str, module: "ModuleType") -> None:
    """Install the hooks registered for this module; a failure is noted, not raised."""
    for number, hook_file in _hooks.get(name, ()):
        hooked = 0
        try:
            load()
            full = __name__.rpartition(".")[0] + ".hooks." + hook_file
            __import__(full)
            hooked = int(sys.modules[full].install(module))
        except (AttributeError, TypeError, ValueError, LookupError, StopIteration):
            pass  # another version of the framework, without the function to wrap
        except BaseException as error:
            handle_error(error)
        notes.append((number, hooked))
