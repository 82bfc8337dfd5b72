"""The bootstrap: starts the probe in every Python of the job, then removes itself.

Python imports the first `sitecustomize` on its path; `record` puts this folder there
through PYTHONPATH. The folder is removed from sys.path at once, and the sitecustomize
that the job would have had without the probe is imported instead, with its own result
or error.

The syntax is that of Python 2.7 and up: a Python too old for the probe must still run.
"""

import sys


class _FrameRemover(object):
    """Removes the frame of this file from a traceback before it is printed.

    importlib deletes a module whose import failed from sys.modules and with it this object,
    exactly when the exception has left this frame and has not been inspected yet.
    """

    def __init__(self, filename):
        # type: (str) -> None
        self.filename = filename

    def __del__(self):
        # type: () -> None
        try:
            entry = sys.exc_info()[2]
            while entry is not None and entry.tb_next is not None:
                if entry.tb_next.tb_frame.f_code.co_filename == self.filename:
                    entry.tb_next = entry.tb_next.tb_next
                else:
                    entry = entry.tb_next
        except BaseException:
            pass


def _start_probe(folder):
    # type: (str) -> None
    """Load the package next to this file under its own name, if enabled for this process."""
    try:
        if folder in sys.path_importer_cache:
            del sys.path_importer_cache[folder]
        name = "_clusterprof_probe"
        if sys.version_info < (3, 8) or name in sys.modules:
            return
        import os

        if os.environ.get("CLUSTERPROF_DISABLE") == "1":
            return
        run_dir = os.path.dirname(folder)
        if os.stat(run_dir).st_uid != os.geteuid():
            return
        config = _read_config(folder + "/config.json")
        if config["format"] != 1 or sys.version_info[:2] < tuple(config["minimum_python"]):
            return
        path = folder + "/" + name
        file = path + "/__init__.py"
        own_spec = globals()["__spec__"]  # its classes are used so that no import is needed
        loader = type(own_spec.loader)(name, file)
        spec = type(own_spec)(name, loader, origin=file, is_package=True)
        spec.submodule_search_locations = [path]
        spec.has_location = True
        module = type(sys)(name)
        module.__spec__ = spec
        module.__loader__ = loader
        module.__file__ = file
        module.__path__ = [path]
        module.__package__ = name
        sys.modules[name] = module
        try:
            loader.exec_module(module)
            module.start(run_dir, config)
        except BaseException:
            sys.modules.pop(name, None)
            raise
    except BaseException:
        pass


def _read_config(path):
    # type: (str) -> dict
    """Read config.json as install_probe() writes it: one key and one plain value per line.

    Importing the json module would cost every Python of the job more than the rest of this
    file.
    """
    values = {}  # type: dict
    words = {"true": True, "false": False}
    with open(path) as file:
        lines = file.read().splitlines()
    for line in lines:
        key, colon, value = line.strip(" ,").partition(": ")
        if not colon:
            continue
        if value in words:
            values[key.strip('"')] = words[value]
        elif value.startswith("["):
            values[key.strip('"')] = [int(number) for number in value.strip("[]").split(",")]
        else:
            values[key.strip('"')] = int(value)
    return values


_folder = __file__.rpartition("/")[0]
while _folder in sys.path:
    sys.path.remove(_folder)
_start_probe(_folder)

# The import machinery returns the entry of sys.modules at this point: the user's module.
_this = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401
except BaseException:
    sys.modules["sitecustomize"] = _FrameRemover(__file__)  # type: ignore
    raise
