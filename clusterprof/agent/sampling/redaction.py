"""Replace names of hosts, jobs and paths in a recording: `record --redact`.

Each name becomes 8 hex digits of BLAKE2b, keyed with the name of the job, so that all nodes of a
job write the same word for the same name and two jobs do not. Somebody who knows the job's name and
has a list of candidates can still test them; nobody can read a name.

    gpu-17.example.org             h5f0c2a91
    /scratch/alice/train/data.bin     /h81d3b02c
    10.1.2.3                       h0d94e7aa

Kept: kernel paths (/proc, /sys, /dev), names of threads and programs (15 characters; scripts are
hidden), names of functions, spans, devices and interfaces, numbers, job ids that are numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from clusterprof.trace.schema import Columns, Event, Gap, Header, Record, Rows

_KEPT_FOLDERS = ("proc", "sys", "dev")
_PATH = re.compile(r"(?<![\w.)/])/(?!/)[^\s:,;'\"()|]*[^\s:,;'\"()|.]")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{0,4}){3,7}\b")
_PUBLIC_JOB = re.compile(r"[\d.]+(-restart\d+)?|launch-\d+|\d+-\d{6,}")
"""Numbers of a resource manager, and names that were made up here."""
_NUMBER = re.compile(r"-?\d{0,19}")
_RESTART = re.compile(r"-restart\d+$")
_MIN_HOST_CHARACTERS = 3
"""A shorter host name may be part of any word; it is replaced only where it stands alone."""


class Redactor:
    """Replaces the names in the records of one recorder."""

    def __init__(self, job: str, hostnames: Sequence[str] | None = None) -> None:
        """job: name of the job. hostnames: names of this machine; None = those of the kernel."""
        self._key = blake2b(job.encode(errors="replace"), digest_size=32).digest()
        names = (os.uname().nodename,) if hostnames is None else hostnames
        words = {
            name for host_name in names for name in (host_name, host_name.partition(".")[0]) if name
        }
        long = [re.escape(word) for word in words if len(word) >= _MIN_HOST_CHARACTERS]
        pattern = "|".join(sorted(long, key=len, reverse=True))
        self._host = re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])") if pattern else None

    def hide_name(self, name: str) -> str:
        """Return the word that stands for a name; "" for ""."""
        if not name:
            return ""
        digest = blake2b(name.encode(errors="replace"), key=self._key, digest_size=4)
        return f"h{digest.hexdigest()}"

    def hide_job(self, job: str) -> str:
        """Return the job's name without the words that people chose; numbers and times stay."""
        if not job or _PUBLIC_JOB.fullmatch(job):
            return job
        name, separator, suffix = job.partition("@")
        if separator:
            return f"{self.hide_name(name)}@{suffix}"
        restart = _RESTART.search(job)
        end = restart[0] if restart else ""
        return self.hide_name(job.removesuffix(end)) + end

    def hide_text(self, text: str) -> str:
        """Return a text with its paths, addresses and names of this host replaced."""
        if "/" in text:
            text = _PATH.sub(self._replace_path, text)
        if "." in text or ":" in text:
            text = _ADDRESS.sub(lambda match: self.hide_name(match[0]), text)
        return text if self._host is None else self._host.sub(self._replace_name, text)

    def redact(self, record: Record) -> Record:
        """Return the record with its names replaced; numbers are those of the record."""
        if isinstance(record, Header):
            return self.redact_header(record)
        if isinstance(record, Event):
            return replace(record, attributes=self._hide_values(record.attributes))
        if isinstance(record, Gap):
            return replace(
                record,
                device=self.hide_text(record.device),
                message=self.hide_text(record.message),
                remedy=self.hide_text(record.remedy),
            )
        if isinstance(record, Columns):
            return replace(record, devices=[self.hide_text(name) for name in record.devices])
        if isinstance(record, Rows) and record.strings:
            strings: dict[str, Sequence[str]] = {
                column: [self._hide_script(self.hide_text(word)) for word in words]
                for column, words in record.strings.items()
            }
            return replace(record, strings=strings)
        return record

    def _hide_script(self, name: str) -> str:
        """Return the name of a process without that of the script that its Python runs."""
        program, _, script = name.partition(" ")
        if not script or not program.startswith("python"):
            return name
        return f"{program} {self.hide_name(script)}"

    def redact_header(self, header: Header) -> Header:
        """Return the header with the names of host, job, mounts and rendezvous replaced."""
        node = dict(header.node)
        hostname = self.hide_name(node.get("hostname", ""))
        # <host>-<boot>-<start>-<pid>: the host's name may hold dashes, the rest has three
        key_parts = node.get("key", "").rsplit("-", 3)[1:]
        node |= {
            "hostname": hostname,
            "display": self.hide_name(node.get("display", "")),
            "key": "-".join([hostname, *key_parts]),
        }
        host = dict(header.host)
        if isinstance(host.get("mounts"), list):
            host["mounts"] = [self._hide_mount(mount) for mount in host["mounts"]]
        launcher = dict(header.launcher)
        launcher["job"] = self.hide_job(str(launcher.get("job", "")))
        launcher["variables"] = self.hide_variables(launcher.get("variables", {}))
        return replace(
            header,
            node=node,
            host={**self._hide_values(host), "mounts": host.get("mounts", [])},
            devices=[self._hide_values(device) for device in header.devices],
            launcher=launcher,
            profile=self._hide_values(header.profile),
        )

    def hide_variables(self, variables: Mapping[str, Any]) -> dict[str, str]:
        """Return launcher variables with every value but numbers replaced."""
        return {
            name: str(value) if _NUMBER.fullmatch(str(value)) else self.hide_name(str(value))
            for name, value in variables.items()
        }

    def _hide_mount(self, mount: Mapping[str, Any]) -> dict[str, Any]:
        """Hide where and from where a file system is mounted; its type and device are kept."""
        source = str(mount.get("source", ""))
        is_remote = source.startswith("//") or ":" in source
        hidden = self.hide_name(source) if is_remote else self.hide_text(source)
        return {**mount, "point": self.hide_text(str(mount.get("point", ""))), "source": hidden}

    def _hide_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        hidden = {name: self._hide_value(value) for name, value in values.items()}
        if isinstance(values.get("job"), str):
            hidden["job"] = self.hide_job(values["job"])
        if isinstance(values.get("variables"), Mapping):
            hidden["variables"] = self.hide_variables(values["variables"])
        return hidden

    def _hide_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.hide_text(value)
        if isinstance(value, Mapping):
            return self._hide_values(value)
        if isinstance(value, list | tuple):
            return [self._hide_value(item) for item in value]
        return value

    def _replace_name(self, match: re.Match[str]) -> str:
        return self.hide_name(match[0])

    def _replace_path(self, match: re.Match[str]) -> str:
        path = match[0]
        if path.split("/", 2)[1] in _KEPT_FOLDERS:
            return path
        return f"/{self.hide_name(path)}"
