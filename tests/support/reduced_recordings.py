"""Jobs of several ranks, recorded in full and with parts of the recording removed.

Every step of a rank: a worker reads, then decodes; the device computes; then all ranks leave a
collective together, `TRANSFER_S` after the last has come to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from clusterprof.report.model import Report
from tests.support.builders import ns
from tests.support.recordings import MAIN, WORKER, Script, write_recording
from tests.support.report_laws import check_conservation

SM, POWER = "gpu.sm_active_ratio", "gpu.power_watts"
PCIE, COPIED = "gpu.pcie_receive_bytes_per_second", 10e9
TRANSFER_S = 0.1
BEGIN_S = 1.0
_SM = {"compute": 0.9, "spin": 0.05}
_POWER = {"compute": 600.0, "spin": 150.0, "idle": 70.0}


@dataclass(frozen=True)
class Step:
    """What one rank does in one step, in seconds."""

    read: float = 0.0
    decode: float = 0.0
    compute: float = 0.3
    launch: float = 0.05
    """Of the computing, at its beginning: the main thread is on a CPU."""
    save: float = 0.0
    """Between the data and the work the main thread writes a checkpoint, blocked on the disk."""
    host: float = 0.0
    """After that it computes on its CPU."""
    copy: float = 0.0
    """After that it sleeps while 10 GB a second are copied to the device."""

    @property
    def wait_end(self) -> float:
        """Between the data and the work."""
        return self.save + self.host + self.copy

    @property
    def own(self) -> float:
        """Until it comes to the collective."""
        return self.read + self.decode + self.wait_end + self.compute


def make_cluster(
    *ranks: Sequence[Step], on_device: bool = False, world_size: int = 0
) -> list[Script]:
    """Return one script per rank; `on_device`: the collective runs on the device, which spins."""
    lengths = [max(step.own for step in steps) + TRANSFER_S for steps in zip(*ranks)]
    return [
        _make_script(number, steps, lengths, on_device, world_size or len(ranks))
        for number, steps in enumerate(ranks)
    ]


def _make_script(
    rank: int, steps: Sequence[Step], lengths: Sequence[float], on_device: bool, world_size: int
) -> Script:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": "a job",
        "LOCAL_RANK": "0",
    }
    script = Script(end=0.0, busy=[], variables=variables)
    main, worker, busy = [f"U{BEGIN_S}"], [f"I{BEGIN_S}"], []
    sm: list[tuple[float, float, float]] = []
    power: list[tuple[float, float, float]] = []
    copies: list[tuple[float, float, float]] = []
    script.worker_spans.append((layout.WORKER_START, 0.5, 0.5, 0, 1, MAIN))
    at = BEGIN_S
    for number, (item, length) in enumerate(zip(steps, lengths)):
        wait, leave = round(item.read + item.decode, 6), round(at + length, 6)
        fed, come = round(at + wait, 6), round(at + item.own, 6)
        if wait:
            cpu = [ns(item.decode), 0]
            size = 1 << 20 if item.read else 0
            script.worker_spans.append((layout.FETCH, at, fed, 8, *cpu, size))
        first = number == 0
        script.main_spans += [
            (layout.DATA_WAIT, at, fed, number, WORKER, 1, first),
            (layout.COLLECTIVE, come, leave, 7, number, 1000, layout.ALL_REDUCE),
            (layout.STEP, at, leave, number),
        ]
        begin = round(fed + item.wait_end, 6)
        if item.save:
            saved = round(fed + item.save, 6)
            script.main_spans.append((layout.CHECKPOINT, fed, saved, 1 << 20))
            script.writes = [*script.writes, (fed, saved)]
        if item.copy:
            copies.append((round(begin - item.copy, 6), begin, COPIED))
        busy.append((begin, leave if on_device else come))
        sm.append((begin, come, _SM["compute"]))
        power += [(at, begin, _POWER["idle"]), (begin, come, _POWER["compute"])]
        power.append((come, leave, _POWER["spin" if on_device else "idle"]))
        if on_device:
            sm.append((come, leave, _SM["spin"]))
        rest = round(length - wait - item.wait_end - item.launch, 6)
        main += [f"I{wait}", f"D{item.save}", f"U{item.host}", f"I{item.copy}"]
        main += [f"U{item.launch}", f"I{rest}"]
        worker += [f"D{item.read}", f"U{item.decode}", f"I{round(length - wait, 6)}"]
        at = leave
    script.main = " ".join(part for part in main if part[1:] != "0.0")
    script.worker = " ".join(part for part in worker if part[1:] != "0.0")
    script.busy, script.end = busy, round(at + 1.0, 6)
    script.gauges = {SM: sm, POWER: power, **({PCIE: copies} if copies else {})}
    return script


def remove_signals(scripts: list[Script], *what: str) -> list[Script]:
    """Remove from recordings "collectives", "spans", "threads", "device", or a gauge."""
    for script in scripts:
        if "collectives" in what:
            kinds = (layout.COLLECTIVE, layout.EXPOSED_COLLECTIVE)
            script.main_spans = [span for span in script.main_spans if span[0] not in kinds]
        if "spans" in what:
            script.main_spans, script.worker_spans = [], []
        if "threads" in what:
            script.sampled = False
        if "device" in what:
            script.busy, script.gauges = None, {}
        script.gauges = {name: held for name, held in script.gauges.items() if name not in what}
    return scripts


def record_and_analyze(scripts: list[Script], folder: Path) -> Report:
    """Write the scripts, each as a node, and analyze them together."""
    for number, script in enumerate(scripts):
        write_recording(script, folder / f"node-{number}")
    report = analyze(folder)
    check_conservation(report)
    return report
