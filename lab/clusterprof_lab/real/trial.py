"""One trial as a real job: a clean job, the recorded job with its fault, and the truth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof_lab import truth
from clusterprof_lab.real import launch, node, stopwatch_truth
from clusterprof_lab.real.cable import Cable, Link, build_cable
from clusterprof_lab.real.fault_strength import AIMS, FaultAim, FaultOptions
from clusterprof_lab.real.launch import MachineLoad, Placement
from clusterprof_lab.real.layout import Layout, read_layout
from clusterprof_lab.real.node import Node
from clusterprof_lab.real.stopwatches import read_stopwatches
from clusterprof_lab.scenario import Scenario, Trial

RECORDS_BYTES = 64 << 20
_FLOW = Path(__file__).with_name("flow.py")


def why_not_here(scenario: Scenario) -> str:
    """Return why a scenario cannot be run for real on this machine, "" when it can."""
    real = scenario.real
    if real is None:
        return "no real processes can make it: see its file"
    try:
        import torch  # noqa: F401
    except ImportError:
        return "torch is not installed (pip install torch==2.13.0)"
    if read_layout(real).nodes:
        reason = node.why_not_here()
        if reason:
            return reason
    if real["fault"] in AIMS:
        return ""
    fault = load_environment_faults().get(real["fault"])
    if fault is None:
        return f"there is no fault {real['fault']!r} yet"
    return str(fault.why_not_here())


def load_environment_faults() -> Mapping[str, Any]:
    """Return the faults of `real/faults/` by name, none where they are not installed."""
    try:
        from clusterprof_lab.real.faults.registry import FAULTS
    except ImportError:
        return {}
    return FAULTS


def draw_culprits(scenario: Scenario, layout: Layout, random: np.random.Generator) -> list[int]:
    """Draw the culprits as ranks; of a node all its ranks (numbered node by node)."""
    real, world = scenario.real or {}, layout.world
    if "culprits" in real:
        return [rank % world for rank in real["culprits"]]
    kind = scenario.wanted.culprit
    if kind == "node":
        first = int(random.integers(max(layout.nodes, 1))) * layout.ranks
        return list(range(first, first + layout.ranks))
    count = 1 if kind == "rank" else world
    if scenario.wanted.also:
        count = 1 + len(scenario.wanted.also)
    return [int(rank) for rank in random.permutation(world)[:count]]


def run_trial(trial: Trial, out: Path) -> Path:
    """Run one trial; return its folder with `recording` and `truth.json`."""
    scenario, real = trial.scenario, trial.scenario.real or {}
    layout, random = read_layout(real), trial.draw()
    low, high = scenario.lost[trial.severity]
    share = float(random.uniform(low, high))
    culprits = draw_culprits(scenario, layout, random)
    clean_ns = measure_clean_step_ns(layout, out)
    folder = out / trial.name
    stopwatches = folder / "stopwatches"
    stopwatches.mkdir(parents=True)
    aim = FaultAim(share, clean_ns / 1e6, layout.world, culprits, random, real)
    parameters: dict[str, Any] = {"share": round(share, 4), "culprits": culprits}
    with ExitStack() as stack:
        placements = stack.enter_context(make_placements(layout, stopwatches, make_records(out)))
        made = AIMS[real["fault"]](aim) if real["fault"] in AIMS else FaultOptions()
        cable = connect_nodes(stack, layout, placements, made, out)
        if real["fault"] not in AIMS:
            links = _apply_environment_fault(stack, placements, folder, aim)
            for index, link in links.items() if cable is not None else ():
                cable.set_link(index, link)
        for placement in placements:
            placement.words = (*placement.words, *made.script)
            placement.restarts = made.restarts
        parameters["script"] = list(placements[0].words)
        ended = run_recorded_job(stack, placements, folder, stopwatches, made.ends_badly, real)
    lives = read_stopwatches(stopwatches)
    if not any(life.steps for life in lives):
        raise RuntimeError(
            f"{trial.name}: no rank trained: {launch.get_failure_output(stopwatches)}"
        )
    run_truth = stopwatch_truth.build_truth(
        trial,
        lives,
        _renumber_culprits(scenario, culprits, layout, lives),
        parameters,
        clean_ns,
        ended.disturbed_ratio,
        ended.ended_ns if made.ends_badly else 0,
    )
    truth.write_truth(run_truth, folder)
    return folder


def _renumber_culprits(
    scenario: Scenario, culprits: Sequence[int], layout: Layout, lives: Sequence[Any]
) -> list[int]:
    """Return culprits as the ranks were numbered: torchrun may number the nodes either way."""
    if scenario.wanted.culprit != "node" or not layout.nodes:
        return list(culprits)
    host = f"node{culprits[0] // layout.ranks}"
    return sorted({life.rank for life in lives if life.host == host})


def run_recorded_job(
    stack: ExitStack,
    placements: Sequence[Placement],
    folder: Path,
    stopwatches: Path,
    ends_badly: bool,
    real: Mapping[str, Any],
) -> launch.JobResult:
    """Run the recorded job to its end."""
    recording, run_id = folder / "recording", f"lab-{folder.name}"
    late = real.get("capture") == "mid-run"
    if real.get("second-job"):
        other = folder / "second"
        other.mkdir()
        words = [word for word in placements[0].words if not word.startswith("--folder")]
        second = [Placement(None, 1, (*words, f"--folder={other}"))]
        neighbor = launch.start_job(second, None, f"{run_id}-second", other)
        stack.callback(launch.wait_for_job, neighbor, other, False)
    machine = MachineLoad()
    running = launch.start_job(placements, None if late else recording, run_id, stopwatches)
    if late:
        _attach_recorder(running[0].pid, recording, stopwatches)
    codes = launch.wait_for_job(running, stopwatches, ends_badly)
    ended = launch.JobResult(codes, time.monotonic_ns(), machine.disturbed_ratio())
    if any(codes) and not ends_badly:
        raise RuntimeError(
            f"{folder.name}: the job failed: {launch.get_failure_output(stopwatches)}"
        )
    launch.wait_for_recording(recording, len(placements))
    return ended


def _attach_recorder(pid: int, recording: Path, stopwatches: Path) -> None:
    """Begin to record when the job has trained some steps."""
    end = time.monotonic() + 60
    while sum(path.read_text().count('"step"') for path in stopwatches.glob("rank-*")) < 10:
        if time.monotonic() > end:
            raise RuntimeError(f"the job does not train: {launch.get_failure_output(stopwatches)}")
        time.sleep(0.1)
    command = [
        sys.executable,
        "-m",
        "clusterprof",
        "record",
        "-o",
        str(recording),
        "--pid",
        str(pid),
    ]
    subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def make_records(out: Path) -> Path:
    """Write the file that loaders read, if it is not there; return its path."""
    path = out / "clean" / "records.bin"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            for _ in range(RECORDS_BYTES >> 20):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
        partial.rename(path)
    return path


@contextmanager
def make_placements(layout: Layout, stopwatches: Path, records: Path) -> Iterator[list[Placement]]:
    """Make the nodes of a layout, and a placement on each."""
    base = (*layout.words, f"--folder={stopwatches}", f"--data={records}")
    with ExitStack() as stack:
        if not layout.nodes:
            groups = stack.enter_context(node.make_priority_group("local"))
            yield [Placement(None, layout.ranks, base, groups)]
            return
        names = [f"node{index}" for index in range(layout.nodes)]
        places = [stack.enter_context(Node(index, names)) for index in range(layout.nodes)]
        yield [Placement(place, layout.ranks, base) for place in places]


def connect_nodes(
    stack: ExitStack, layout: Layout, placements: Sequence[Placement], made: FaultOptions, out: Path
) -> Cable | None:
    """Connect the nodes by a cable, if there are any, and apply the faults to their links."""
    if not layout.nodes:
        return None
    program = out / "clean" / "cable"
    nodes = [placement.node for placement in placements if placement.node is not None]
    if not program.exists():
        build_cable(program.parent)
    jumbo = not any(link.loss_ratio for link in made.links.values())
    cable = stack.enter_context(Cable(program, nodes, 9000 if jumbo else 1500))
    for linked_node in nodes:
        cable.set_link(linked_node.index, made.links.get(linked_node.index, Link()))
        cable.set_downlink_rate(linked_node.index, made.one_way.get(linked_node.index, 0))
    if made.flow_mbit:
        start_flow(nodes, made.flow_mbit)
    return cable


def start_flow(nodes: Sequence[Node], megabits: float) -> subprocess.Popen[Any]:
    """Send from the first node to the last for as long as they live; return the sender."""
    nodes[-1].start(sys.executable, "-I", str(_FLOW), "take")
    return nodes[0].start(sys.executable, "-I", str(_FLOW), nodes[-1].address, str(megabits))


def _apply_environment_fault(
    stack: ExitStack, placements: Sequence[Placement], folder: Path, aim: FaultAim
) -> dict[int, Link]:
    """Apply a fault of the environment to the seats of the culprits; return links by node."""
    links = {}
    from clusterprof_lab.real.faults.base import Place

    fault = load_environment_faults()[aim.given["fault"]]
    nodes = [placement.node for placement in placements if placement.node is not None]
    each = {"items": 8, **aim.given}
    first = 0
    for placement in placements:
        hit = first in aim.culprits
        first += placement.ranks
        where = (
            folder / "fault" if placement.node is None else folder / f"fault-{placement.node.name}"
        )
        where.mkdir()
        place = Place(
            placement.node,
            where,
            aim.random,
            aim.share,
            round(aim.step_ms * 1e6),
            {**each, "ranks": placement.ranks},
            nodes,
            clean=not hit,
        )
        given = stack.enter_context(fault.apply(place))
        placement.words = (*placement.words, *given.script)
        if given.cgroup is not None:
            placement.groups = (*placement.groups, given.cgroup)
        placement.environment = {**placement.environment, **given.environment}
        if placement.node is not None and getattr(given, "link", None):
            links[placement.node.index] = Link(**given.link)
    return links


def measure_clean_step_ns(layout: Layout, out: Path) -> float:
    """Return the mean step of a layout's job without any fault, measured once per folder."""
    file = out / "clean" / f"{layout.key}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as name, ExitStack() as stack:
            folder = Path(name)
            records = make_records(out)
            placements = stack.enter_context(make_placements(layout, folder, records))
            connect_nodes(stack, layout, placements, FaultOptions(), out)
            machine = MachineLoad()
            codes = launch.wait_for_job(
                launch.start_job(placements, None, f"lab-{folder.name}", folder),
                folder,
                hangs=False,
            )
            lives = read_stopwatches(folder)
            if any(codes) or not any(life.steps for life in lives):
                raise RuntimeError(f"the clean job failed: {launch.get_failure_output(folder)}")
            length = sum(life.ended_ns - life.began_ns for life in lives)
            step_ns = length / sum(life.steps for life in lives)
            measured = {"step_ns": step_ns, "disturbed_ratio": machine.disturbed_ratio()}
            file.write_text(json.dumps(measured) + "\n")
    return float(json.loads(file.read_text())["step_ns"])
