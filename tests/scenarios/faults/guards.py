"""Guards: what in the source keeps a promise. With it removed, its fault must be noticed.

A guard is a text in a file of the package and what stands there without it. The package and its
tests are copied, the text is replaced in the copy, and the fault is injected there: a fault that
breaks no promise now would never have noticed anything.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.scenarios.faults.results import ROOT, load_results, write_results

COPIED = ("clusterprof", "lab", "tests", "bench", "pyproject.toml", "README.md")
TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Guard:
    """A guard, and the fault that notices its absence."""

    fault: str
    file: str
    """Below the package."""
    name: str
    """What it does, in words."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    trials: int = 4
    """So many injections notice the absence of the guard surely."""
    also: tuple[tuple[str, str, str], ...] = ()
    """(file, old, new) of guards behind it, which keep the promise alone and go with it."""


_TAKE_LAST = (
    "            records.extend(ring.take(now_ns))\n"
    "            records.extend(_take_definitions(ring, now_ns))\n"
    "            under_way"
)
_TAKE_BEFORE_END = (
    "            if not ring.ended:\n"
    "                records.extend(ring.take(now_ns))\n"
    "            records.extend(_take_definitions(ring, now_ns))\n"
    "            under_way"
)
_LAUNCH_ERRORS = "    except Exception as error:  # whatever it is"

GUARDS = (
    Guard(
        "file-cut",
        "trace/reader.py",
        "a frame that was being written is no damage",
        "torn = size == _UNFINISHED",
        "torn = False",
        1,
    ),
    Guard(
        "bit-flipped",
        "trace/frame.py",
        "the checksum of a frame is compared",
        "return bool(zlib.crc32(covered) == crc)",
        "return True",
        1,
    ),
    Guard(
        "block-overwritten",
        "trace/reader.py",
        "what is skipped between two frames is counted",
        "                    self._count.damaged_bytes += skipped\n                    skipped = 0",
        "                    skipped = 0",
        1,
    ),
    Guard(
        "recording-altered",
        "trace/writer.py",
        "the digest of a closed segment is listed",
        "            self._folder.append_digest(self._segment, self._digest.hexdigest())\n",
        "            pass\n",
        1,
    ),
    Guard(
        "recording-altered",
        "trace/reader.py",
        "segments that are gone are counted",
        "            count.add_altered(find_missing_segments(digests, [path.name for path in "
        "segments]))\n",
        "            pass\n",
        1,
    ),
    Guard(
        "recording-altered",
        "gate/preconditions.py",
        "a recording that was changed is no ground for a verdict",
        "    if altered:\n",
        "    if False:\n",
        1,
    ),
    Guard(
        "recording-forged",
        "trace/decoder.py",
        "types and ranges of events and headers are checked",
        "            record, problems = check_record(record)\n",
        "            problems = []\n",
        24,
    ),
    Guard(
        "kill-recorder",
        "agent/sampling/scheduler.py",
        "frames are written every 0.8 s",
        "FLUSH_INTERVAL_NS = 800_000_000",
        "FLUSH_INTERVAL_NS = 30_000_000_000",
    ),
    Guard(
        "kill-both",
        "agent/sampling/scheduler.py",
        "frames are written every 0.8 s",
        "FLUSH_INTERVAL_NS = 800_000_000",
        "FLUSH_INTERVAL_NS = 30_000_000_000",
    ),
    Guard(
        "end-recorder",
        "agent/__main__.py",
        "SIGTERM and SIGINT are handled",
        "        for number in (signal.SIGTERM, signal.SIGINT):\n",
        "        for number in ():\n",
    ),
    Guard(
        "call-fails",
        "trace/writer.py",
        "an error of the disk is kept, and the frames wait",
        "        except OSError as error:\n            self._fail(error, now_ns)\n\n    def _check",
        "        except ZeroDivisionError as error:\n"
        "            self._fail(error, now_ns)\n\n    def _check",
    ),
    Guard(
        "disk-full",
        "trace/writer.py",
        "an error of the disk is kept, and the frames wait",
        "        except OSError as error:\n            self._fail(error, now_ns)\n\n    def _check",
        "        except ZeroDivisionError as error:\n"
        "            self._fail(error, now_ns)\n\n    def _check",
    ),
    Guard(
        "clock-step",
        "agent/sampling/scheduler.py",
        "the clocks are read together every 10 s",
        "CLOCK_INTERVAL_NS = 10_000_000_000",
        "CLOCK_INTERVAL_NS = 60_000_000_000",
        1,
    ),
    Guard(
        "kill-job",
        "agent/processes/registry.py",
        "the exit of a process is recorded",
        "        self._add_exit_event(pending_exit.ended_ns, pending_exit.pid, "
        "pending_exit.ticks, status)\n",
        "",
        1,
    ),
    Guard(
        "driver-lies",
        "agent/collectors/gpu/nvml_queries.py",
        "a utilization lies between 0 and 100 %",
        "if not 0 <= value <= 100:",
        "if False:",
        16,
    ),
    Guard(
        "planted-files",
        "agent/launch/election.py",
        "the run directory is a folder of this user with mode 0700",
        "if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:",
        "if False:",
    ),
    Guard(
        "secrets",
        "agent/launch/launcher.py",
        "of an environment, the launcher's variables alone are kept",
        "variables = identity.select_launcher_variables(environ)",
        "variables = dict(environ)",
        1,
        (
            (
                "agent/processes/registry.py",
                "for name in LAUNCHER_VARIABLES\n",
                "for name in raw_variables or {}\n",
            ),
        ),
    ),
    Guard(
        "redacted",
        "agent/sampling/service.py",
        "the names in a header are replaced",
        "return header if self._redactor is None else self._redactor.redact_header(header)",
        "return header",
        1,
    ),
    Guard(
        "recording-damaged",
        "trace/live_tail.py",
        "only files are opened as segments",
        "            names = [entry.name for entry in entries if entry.is_file()]",
        "            names = [entry.name for entry in entries]",
        28,
    ),
    Guard(
        "importers-fuzzed",
        "analysis/importers/workloads/pipeline_stages.py",
        "ranks without gaps have no joint wait",
        "    if not gaps:\n        return {}\n",
        "",
        12,
    ),
    Guard(
        "kill-helper",
        "agent/isolation/collector.py",
        "a helper that died is started again",
        "        if self._helper is None and self._rest.is_over(now_ns):\n",
        "        if False:\n",
        also=(
            (
                "agent/isolation/collector.py",
                "may_start = is_killed and self._rest.is_over(now_ns)",
                "may_start = False",
            ),
        ),
    ),
    Guard(
        "kill-worker",
        "agent/processes/span_rings.py",
        "what a process wrote last is taken after its end",
        _TAKE_LAST,
        _TAKE_BEFORE_END,
    ),
    Guard(
        "freeze-job",
        "agent/processes/span_rings.py",
        "what a process wrote last is taken after its end",
        _TAKE_LAST,
        _TAKE_BEFORE_END,
    ),
    Guard(
        "freeze-recorder",
        "agent/processes/span_rings.py",
        "spans that were overwritten in the ring are counted",
        "        self._drop(first - self.last_taken - 1)\n",
        "",
    ),
    Guard(
        "exit-status",
        "agent/launch/launcher.py",
        "signals that Python ignores are not ignored in the command",
        "    signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n",
        "",
        1,
    ),
    Guard(
        "any-call-fails",
        "agent/linux/files.py",
        "a file that cannot be opened is a value with its reason",
        "            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)\n"
        "        except OSError as error:\n",
        "            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)\n"
        "        except ZeroDivisionError as error:\n",
        40,
        (
            (
                "agent/sampling/collector_runner.py",
                '        except BaseException as error:\n            self.status = "failed"\n',
                '        except ZeroDivisionError as error:\n            self.status = "failed"\n',
            ),
        ),
    ),
    Guard(
        "disk-slow",
        "agent/sampling/scheduler.py",
        "ticks that were missed are counted, and not made up for",
        "        return due_ns + (missed + 1) * interval_ns\n",
        "        return due_ns + interval_ns\n",
        3,
    ),
    Guard(
        "shm-full",
        "agent/launch/launcher.py",
        "whatever fails before the command starts is reported, and the command runs",
        _LAUNCH_ERRORS,
        "    except ZeroDivisionError as error:  # whatever it is",
    ),
    Guard(
        "run-dir-removed",
        "agent/processes/registry.py",
        "a run directory that disappears is reported",
        "        if self._is_gone or self._folder.read_mtime_ns() is not None:\n",
        "        if True:\n",
        2,
    ),
    Guard(
        "driver-hangs",
        "agent/isolation/collector.py",
        "a device that does not answer within a second is left out",
        "self._hung or now_ns - self._sent_ns < DEADLINE_NS:",
        "self._hung or True:",
    ),
    Guard(
        "driver-crashes",
        "agent/isolation/collector.py",
        "a device that crashed its helper rests",
        "        for device in named:\n            device.park(now_ns)\n",
        "",
        6,
    ),
    Guard(
        "device-release",
        "agent/__main__.py",
        "SIGUSR2 is handled",
        "        signal.signal(signal.SIGUSR2, self._note_device_request)\n",
        "",
        1,
    ),
    Guard(
        "device-release",
        "agent/sampling/collector_runner.py",
        "the collector is closed, and so its helper ends",
        "        self._close()  # in every status: a helper may still be looking for its devices\n",
        "",
        1,
    ),
    Guard(
        "device-release",
        "agent/sampling/scheduler.py",
        "a collector whose device was released is left alone",
        "if now_ns >= runner.due_ns and not runner.is_released:",
        "if now_ns >= runner.due_ns:",
        1,
    ),
    Guard(
        "device-release",
        "agent/sampling/collector_runner.py",
        "the reason for the missing values is recorded",
        "            self._reasons.set_for_collector(now_ns, DEVICES_RELEASED)\n",
        "",
        1,
        (
            (
                "agent/sampling/collector_runner.py",
                "            self._batch.add(now_ns, [DEVICES_RELEASED] * len(self._columns))\n",
                "",
            ),
        ),
    ),
    Guard(
        "device-release",
        "agent/isolation/helper.py",
        "a helper does not exit during a driver call",
        "        while process.list_unfinished_calls(self._page):\n",
        "        while False:\n",
    ),
    Guard(
        "device-release",
        "analysis/findings/coverage.py",
        "the report says when devices were released",
        "    for collector, times in periods.items():\n",
        "    for collector, times in {}.items():\n",
        1,
    ),
    Guard(
        "device-lost",
        "agent/collectors/gpu/nvml_library.py",
        "a call that fails is a value with its reason",
        "        except Exception as error:\n            reason = explain",
        "        except ZeroDivisionError as error:\n            reason = explain",
        6,
    ),
    Guard(
        "fork-storm",
        "probe/ring.py",
        "a forked child opens a ring of its own",
        "os.register_at_fork(after_in_child=_clear_after_fork)\n",
        "",
        1,
    ),
    Guard(
        "crowd",
        "agent/collectors/threads.py",
        "threads that do not run are looked at rarely",
        "            elif now_ns - thread.ran_ns > _QUIET_NS and thread.state not in "
        "(_RUNNING, _BLOCKED):\n",
        "            elif False:\n",
        1,
        (
            (
                "agent/collectors/threads.py",
                "        for _ in range(min(due, len(self._idle), _MAX_IDLE_READS)):\n",
                "        for _ in range(len(self._idle)):\n",
            ),
        ),
    ),
    Guard(
        "few-descriptors",
        "agent/launch/launcher.py",
        "whatever fails before the command starts is reported, and the command runs",
        _LAUNCH_ERRORS,
        "    except ZeroDivisionError as error:  # whatever it is",
        6,
    ),
    Guard(
        "little-memory",
        "agent/launch/launcher.py",
        "whatever fails before the command starts is reported, and the command runs",
        _LAUNCH_ERRORS,
        "    except ZeroDivisionError as error:  # whatever it is",
    ),
    Guard(
        "small-files",
        "trace/writer.py",
        "a frame that no file has room for is dropped and counted",
        "        if limit != resource.RLIM_INFINITY and self._first_bytes + len(frame) > limit:\n"
        "            return False\n",
        "",
    ),
    Guard(
        "stderr-lost",
        "cli/recording.py",
        "a message that cannot be printed does not keep the command from running",
        "    with suppress(OSError, ImportError, MemoryError):\n",
        "    with suppress(ZeroDivisionError):\n",
    ),
    Guard(
        "sockets",
        "agent/sampling/live_helpers.py",
        "without `--metrics` nothing listens",
        "    if request.plan.metrics:\n        targets = name_textfiles(\n"
        "            request.plan.metrics,\n",
        "    if True:\n        targets = name_textfiles(\n"
        '            ("127.0.0.1:29640-29659",),\n',
        2,
    ),
    Guard(
        "two-users",
        "agent/launch/election.py",
        "the run directory is named after the user",
        "{RUN_DIR_PREFIX}{os.geteuid()}-",
        "{RUN_DIR_PREFIX}-",
        1,
    ),
    Guard(
        "written-day",
        "trace/writer.py",
        "the oldest segments are dropped above the limit",
        "        while self._folder.total_bytes + self._segment_bytes > self._max_bytes:\n",
        "        while False:\n",
        1,
    ),
    Guard(
        "many-steps",
        "agent/sampling/collector_runner.py",
        "readings are dropped once they are parsed",
        "        self._readings.clear()  # in place: `add_reading` is bound to this list\n",
        "",
        1,
    ),
)


UNGUARDED = {
    "host-crash": "what reaches the disk is up to the kernel; `file-cut` guards what is cut",
    "upgrade": "all versions so far write frames of one schema: the reader has no branch to remove",
    "downgrade": "the guard is in the older version, which is tried as it is",
    "many-ranks": "traces are read in blocks everywhere: there is no single place to remove",
    "many-ranks-large": "that of `many-ranks`",
    "million-steps": "that of `many-steps`",
}
"""Faults without a guard that could be removed, and why."""


def try_guards(names: Sequence[str], store: Path) -> int:
    """Remove each guard of these faults, all without names; 1 = an absence was not noticed."""
    unseen = 0
    for guard in GUARDS:
        if names and guard.fault not in names:
            continue
        values = try_guard(guard)
        document = load_results(store)
        document.setdefault("guards", {})[f"{guard.fault}: {guard.name}"] = values
        write_results(store, document)
        unseen += not (values["noticed"] or values["not_possible"])
        words = values["words"] or values["not_possible"] or "NOT NOTICED"
        print(f"{guard.fault}: {guard.name}: {words}", flush=True)
    return int(unseen > 0)


def try_guard(guard: Guard) -> dict[str, Any]:
    """Inject the fault into a copy of the package without the guard."""
    with tempfile.TemporaryDirectory(prefix="clusterprof-guards-") as name:
        tree = Path(name)
        tree.chmod(0o755)  # some faults run it as another user
        for part in COPIED:
            if (ROOT / part).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / part, tree / part, symlinks=True, ignore=ignored)
            elif (ROOT / part).is_file():
                shutil.copy(ROOT / part, tree / part)
        remove_guard(guard, tree / "clusterprof")
        store = tree / "faults.json"
        command = [sys.executable, "-m", "tests.scenarios.faults", guard.fault]
        subprocess.run(
            [*command, "--trials", str(guard.trials), "--store", str(store)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": f"{tree}:{tree / 'lab'}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=False,
        )
        values = json.loads(store.read_text())["faults"][guard.fault] if store.is_file() else {}
    return describe_outcome(guard, values)


def describe_outcome(guard: Guard, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a guard: whether its absence was noticed, when, and by which words."""
    words = values["examples"][0].partition(": ")[2][:120] if values.get("examples") else ""
    return {
        "fault": guard.fault,
        "file": guard.file,
        "name": guard.name,
        "date": datetime.date.today().isoformat(),
        "noticed": bool(values.get("broken")),
        "tried": values.get("trials", 0),
        "broken": values.get("broken", 0),
        "words": words,
        "not_possible": values.get("not_possible", ""),
    }


def remove_guard(guard: Guard, package: Path) -> None:
    """Remove a guard, and those behind it, from a copy of the package.

    Raises: ValueError when a text does not stand in its file exactly once.
    """
    for file, old, new in ((guard.file, guard.old, guard.new), *guard.also):
        path = package / file
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ValueError(f"{file} has {text.count(old)} times: {old}")
        path.write_text(text.replace(old, new), encoding="utf-8")
