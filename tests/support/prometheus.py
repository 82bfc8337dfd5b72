"""A real Prometheus for tests: Debian's package, on a node of its own network or on loopback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterprof_lab.real.node import Node

WHY_NOT = (
    ""
    if shutil.which("prometheus") and shutil.which("promtool")
    else "no Prometheus here; Debian: apt-get install --no-install-recommends prometheus"
)
PORT = 9090
_ASK = """
import json, sys, urllib.parse, urllib.request
words = urllib.parse.urlencode(json.loads(sys.argv[2]))
with urllib.request.urlopen(f"http://127.0.0.1:9090/api/v1/{sys.argv[1]}?{words}") as answer:
    sys.stdout.write(answer.read().decode())
"""


def run_promtool(*words: str) -> str:
    """Run promtool; return its output, fail when it fails."""
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    """A Prometheus that scrapes every second, on a node."""

    def __init__(
        self, node: Node, folder: Path, targets: Mapping[str, Sequence[str]], token: str, rules: str
    ) -> None:
        """targets: the addresses of each scrape job. rules: the content of a file of rules."""
        self._node = node
        (folder / "rules.yml").write_text(rules)
        scrapes = [
            {
                "job_name": name,
                "authorization": {"credentials": token},
                "static_configs": [{"targets": list(addresses)}],
            }
            for name, addresses in targets.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yml")],
            "scrape_configs": scrapes,
        }
        path = folder / "prometheus.yml"
        path.write_text(json.dumps(config))  # JSON is YAML
        run_promtool("check", "config", str(path))
        self.process = node.start(
            "prometheus",
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{PORT}",
            "--log.level=warn",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def get(self, path: str, **words: str) -> Any:
        """Return the data of an answer of its HTTP API."""
        answer = json.loads(self._node.run(sys.executable, "-c", _ASK, path, json.dumps(words)))
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the value of each series of an instant query."""
        result = self.get("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        alerts = self.get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def stop(self) -> None:
        """Stop the server."""
        self.process.terminate()
        self.process.wait(10)
