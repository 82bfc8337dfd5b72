"""A simulated `pyhlml` behind the interface of habana-pyhlml 1.24: what FAKEHLML (JSON) says.

    {"count": 2, "values": {"GetPowerUsage": [225000, {"error": "HLML_ERROR_TIMEOUT"}]}}

A value is one for all devices, or a list with one per device. {"error": NAME} raises as the binding
does, {"signal": N} ends the process, {"hang": true} hangs for as long as the file says so.
"flavour": as old versions were: "old-errors" raises none, "old-handles" has one handle for all.
"""

from pyhlml import hlml_types
from pyhlml.main import HLMLError, call, check_return

__all__ = ["HLMLError", "check_return", "hlml_types"]


def __getattr__(name):
    if not name.startswith("hlml"):
        raise AttributeError(name)
    return call(name)
