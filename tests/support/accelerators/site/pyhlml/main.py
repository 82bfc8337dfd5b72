"""The calls of the simulated library."""

import ctypes
import json
import os
import signal
import time
from types import SimpleNamespace

from pyhlml.hlml_types import HLML_RETURN

_SHARED = ctypes.c_void_p()
_TEXT = ("GetUUID", "GetName", "hlmlGetDriverVersion")


class HLMLError(Exception):
    def __init__(self, value):
        super().__init__(f"HLML Error with code {value}")
        self.value = value


def _load_scenario():
    with open(os.environ["FAKEHLML"]) as file:
        return json.load(file)


def check_return(code):
    if code != HLML_RETURN.HLML_SUCCESS and _load_scenario().get("flavour") != "old-errors":
        raise HLMLError(code)
    return code


def call(name):
    short = name.removeprefix("hlmlDevice")
    values = _load_scenario()["values"]
    own = ("hlmlInit", "hlmlShutdown", "hlmlDeviceGetCount", "hlmlDeviceGetHandleByIndex")
    if name not in own and short not in values and f"{short}:0" not in values:
        raise AttributeError(name)

    def function(*arguments):
        print("noise on stdout, as old bindings make", flush=True)
        if name == "hlmlDeviceGetCount":
            return _load_scenario()["count"]
        if name == "hlmlDeviceGetHandleByIndex":
            handle = (
                _SHARED if _load_scenario().get("flavour") == "old-handles" else ctypes.c_void_p()
            )
            handle.value = 1000 + arguments[0]
            return handle
        key = short
        if short == "GetTotalECCErrors":
            key = f"{short}:{arguments[1]}"
        index = arguments[0].value - 1000 if arguments else 0
        while isinstance(value := _read_value(key, index), dict) and value.get("hang"):
            time.sleep(0.02)
        if isinstance(value, dict) and "signal" in value:
            signal.raise_signal(value["signal"])  # in this thread, as a fault would be
        if isinstance(value, dict) and "error" in value:
            check_return(getattr(HLML_RETURN, value["error"]))
            return 0
        if isinstance(value, dict):
            return SimpleNamespace(**value)
        return value.encode() if isinstance(value, str) and short in _TEXT else value

    return function


def _read_value(key, index):
    value = _load_scenario()["values"].get(key, 0)
    return value[index] if isinstance(value, list) else value
