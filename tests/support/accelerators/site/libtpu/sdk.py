"""`from libtpu.sdk import tpumonitoring`."""

import json
import os
import time
from types import SimpleNamespace


class _Monitoring:
    def get_metric(self, name):
        while (data := self._list_values(name)) == "hang":
            time.sleep(0.02)
        if isinstance(data, str):
            raise RuntimeError(data)
        return SimpleNamespace(data=lambda: data)

    def _list_values(self, name):
        with open(os.environ["FAKETPU"]) as file:
            return json.load(file)[name]


tpumonitoring = _Monitoring()
