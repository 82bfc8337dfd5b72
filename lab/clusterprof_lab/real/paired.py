"""Real jobs that contain their own clean run: the fault is switched on and off in blocks of steps.

python -m clusterprof_lab.real.paired --split dev --out DIR       finished trials are kept

On a busy machine two jobs differ by more than their fault. Therefore one job trains blocks of steps
without the fault, with it, with it, without it, and so on (`scripts/turns`). Both halves then have
the same processes and the same minutes, and a slow drift of the machine affects both alike. The
fault is switched by options of the script, by the path of the data (both disks or servers exist),
or by a switch outside the job, which is set before the first step of each block. Every trial leaves
`DIR/<trial>/recording`, its stopwatches, and `paired.json`, the input of
`python -m clusterprof_lab whatif --paired DIR`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import psutil

from clusterprof_lab.real import launch
from clusterprof_lab.real import trial as trials
from clusterprof_lab.real.cable import Link
from clusterprof_lab.real.fault_strength import AIMS, FaultAim, FaultOptions
from clusterprof_lab.real.faults.base import Options, Place
from clusterprof_lab.real.launch import Placement
from clusterprof_lab.real.layout import Layout, read_layout
from clusterprof_lab.real.stopwatches import read_stopwatches
from clusterprof_lab.scenario import SEVERITIES, Scenario, Split, Trial, load_corpus

FILE, FORMAT, SCHEMA = "paired.json", "clusterprof-paired", 1
BLOCK_STEPS, BLOCKS, WARM_UP, AFTER = 28, 4, 8, 2
_CLEAN_STEPS = 16
"""Of the job that only says how strong the fault must be."""
Switch = Callable[[bool], None]


@dataclass
class _Fault:
    """What is wrong in its turn."""

    switches: list[Switch] = field(default_factory=list)
    period_steps: int = 1
    """Steps after which the fault repeats."""

    def __call__(self, on: bool) -> None:
        for switch in self.switches:
            switch(on)


def run_trial(
    trial: Trial, out: Path, block_steps: int = BLOCK_STEPS, blocks: int = BLOCKS
) -> Path:
    """Run one trial with its fault in turns; return its folder."""
    scenario, real = trial.scenario, trial.scenario.real or {}
    layout, random = _remove_step_count(read_layout(real)), trial.draw()
    low, high = scenario.lost[trial.severity]
    share = float(random.uniform(low, high))
    culprits = trials.draw_culprits(scenario, layout, random)
    short = replace(layout, words=(*layout.words, f"--steps={_CLEAN_STEPS}"))
    clean_ns = trials.measure_clean_step_ns(short, out)
    folder = out / trial.name
    stopwatches = folder / "stopwatches"
    stopwatches.mkdir(parents=True)
    aim = FaultAim(share, clean_ns / 1e6, layout.world, culprits, random, real)
    steps = WARM_UP + block_steps * blocks + AFTER
    turns = [f"--steps={steps}", f"--in-turns={block_steps}", f"--warm-up={WARM_UP}"]
    with ExitStack() as stack:
        placements = stack.enter_context(
            trials.make_placements(layout, stopwatches, trials.make_records(out))
        )
        fault = _apply_fault(stack, layout, placements, out, folder, aim)
        if fault.switches:
            turns.append("--switched=1")
            fault(False)
            stack.enter_context(_Switching(fault, stopwatches, layout.world))
        for placement in placements:
            at = placement.words.index("--fault")
            placement.words = (*placement.words[:at], *turns, *placement.words[at:])
        ended = trials.run_recorded_job(stack, placements, folder, stopwatches, False, real)
    lives = read_stopwatches(stopwatches)
    if [life.steps for life in lives] != [steps] * layout.world:
        raise RuntimeError(
            f"{trial.name}: not all ranks trained: {launch.get_failure_output(stopwatches)}"
        )
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "scenario": scenario.id,
        "severity": trial.severity,
        "split": trial.split,
        "seed": trial.seed,
        "share": round(share, 4),
        "culprits": culprits,
        "clean_step_ns": round(clean_ns),
        "in_turns": block_steps,
        "blocks": blocks,
        "warm_up": WARM_UP,
        "period_steps": fault.period_steps,
        "disturbed_ratio": round(ended.disturbed_ratio, 4),
    }
    (folder / FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return folder


def _remove_step_count(layout: Layout) -> Layout:
    kept = tuple(word for word in layout.words if not word.startswith("--steps="))
    return replace(layout, words=kept)


def _apply_fault(
    stack: ExitStack,
    layout: Layout,
    placements: Sequence[Placement],
    out: Path,
    folder: Path,
    aim: FaultAim,
) -> _Fault:
    """Make the fault; each seat's words are then those of both halves, `--fault` between them."""
    fault = _Fault()
    known = aim.given["fault"] in AIMS
    made = AIMS[aim.given["fault"]](aim) if known else FaultOptions()
    fault.period_steps = compute_period_steps(made.script)
    cable = trials.connect_nodes(stack, layout, placements, replace(made, flow_mbit=0.0), out)
    nodes = [placement.node for placement in placements if placement.node is not None]
    if cable is not None and (made.links or made.one_way):

        def network(on: bool) -> None:
            for node in nodes:
                cable.set_link(node.index, made.links.get(node.index, Link()) if on else Link())
                cable.set_downlink_rate(node.index, made.one_way.get(node.index, 0) if on else 0)

        fault.switches.append(network)
    if made.flow_mbit:
        sender = trials.start_flow(nodes, made.flow_mbit)
        fault.switches.append(lambda on: _stop_or_continue(sender.pid, not on))
    for number, placement in enumerate(placements):
        calm, faulty = Options(), Options(made.script)
        if not known:
            calm, faulty = _apply_environment_fault(stack, placements, number, folder, aim)
        if faulty.switch is not None:
            fault.switches.append(faulty.switch)
        placement.words = (*placement.words, *calm.script, "--fault", *faulty.script)
        group = faulty.cgroup or calm.cgroup
        placement.groups = (*placement.groups, *([group] if group is not None else []))
        placement.environment = {**placement.environment, **calm.environment, **faulty.environment}
    return fault


def compute_period_steps(script: Sequence[str]) -> int:
    """Return the number of steps after which the script's fault repeats, of all its turns."""
    numbers = {}
    for word in script:
        name, _, value = word.removeprefix("--").partition("=")
        if name == "turns" or name.endswith("-every"):
            numbers[name] = int(value)
    if "turns" in numbers:
        return numbers["turns"] * numbers.get("turn-every", 1)
    return max(numbers.values(), default=1)


def _apply_environment_fault(
    stack: ExitStack, placements: Sequence[Placement], number: int, folder: Path, aim: FaultAim
) -> tuple[Options, Options]:
    """Apply a fault of the environment to a seat; return what it gets without and with it."""
    placement, first = placements[number], sum(other.ranks for other in placements[:number])
    fault = trials.load_environment_faults()[aim.given["fault"]]
    nodes = [other.node for other in placements if other.node is not None]
    where = folder / (f"fault-{placement.node.name}" if placement.node is not None else "fault")
    where.mkdir()
    place = Place(
        placement.node,
        where,
        aim.random,
        aim.share,
        round(aim.step_ms * 1e6),
        {"items": 8, **aim.given, "ranks": placement.ranks},
        nodes,
    )
    if first not in aim.culprits:
        return stack.enter_context(fault.apply(replace(place, clean=True))), Options()
    faulty = stack.enter_context(fault.apply(place))
    if faulty.switch is not None:
        return replace(faulty, switch=None), faulty
    calm = replace(place, clean=True, label="-calm")
    return stack.enter_context(fault.apply(calm)), faulty


def _stop_or_continue(pid: int, stop: bool) -> None:
    """Stop or continue what an nsenter runs.

    nsenter stops by itself with its child, and again if it is continued while that is not.
    """
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for child in top.children(recursive=True):
            child.send_signal(signal.SIGSTOP if stop else signal.SIGCONT)
        if not stop:
            top.send_signal(signal.SIGCONT)


class _Switching(threading.Thread):
    """Switches the fault when all ranks have come to the first step of a turn."""

    def __init__(self, fault: _Fault, folder: Path, world: int) -> None:
        super().__init__()
        self.fault, self.folder, self.world = fault, folder, world
        self.over, self.on = threading.Event(), False
        self.done: set[str] = set()

    def run(self) -> None:
        while not self.over.wait(0.005):
            came: dict[str, int] = {}
            for path in self.folder.glob("came-*"):
                step = path.name.split("-")[1]
                came[step] = came.get(step, 0) + 1
            for step in sorted(set(came) - self.done, key=int):
                if came[step] == self.world:
                    self.on = not self.on
                    self.fault(self.on)
                    (self.folder / f"switched-{step}").touch()
                    self.done.add(step)

    def __enter__(self) -> _Switching:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.join()
        self.fault(True)  # as its makers left it, for them to undo


def check_scenario(scenario: Scenario) -> str:
    """Return why a scenario cannot be run with its fault in turns here, "" when it can."""
    wanted, real = scenario.wanted, scenario.real
    if real is None or not wanted.family or wanted.outside_steps:
        return "no real fault inside steps"
    return trials.why_not_here(scenario)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for, one job after another; 0 all run, 1 one failed, 4 none could be."""
    options = _parse(argv)
    corpus = {scenario.id: scenario for scenario in load_corpus()}
    names = options.scenario or list(corpus)
    unknown = sorted(set(names) - set(corpus))
    if unknown:
        print(f"paired: no scenario {', '.join(unknown)}", file=sys.stderr)
        return 2
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    began, failed, done = time.monotonic(), 0, 0
    for name in names:
        for seed in range(options.seeds):
            trial = Trial(corpus[name], options.severity, seed, options.split)
            reason = check_scenario(trial.scenario)
            if reason:
                if options.scenario:
                    print(f"{trial.name}: not run: {reason}", flush=True)
                continue
            if (out / trial.name / FILE).exists():
                done += 1
                continue
            _move_unfinished(out / trial.name)
            then = time.monotonic()
            try:
                run_trial(trial, out, options.block_steps, options.blocks)
            except (RuntimeError, OSError) as error:
                failed += 1
                print(f"{trial.name}: {error}", file=sys.stderr, flush=True)
                continue
            done += 1
            now = time.monotonic()
            print(
                f"{trial.name}: {now - then:.0f} s, {(now - began) / 60:.1f} min in all", flush=True
            )
    print(f"{done} there, {failed} failed")
    return 1 if failed else 0 if done else 4


def _move_unfinished(folder: Path) -> None:
    """Move what an earlier attempt left unfinished."""
    if folder.exists():
        folder.rename(folder.with_name(f"unfinished-{time.time_ns()}-{folder.name}"))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m clusterprof_lab.real.paired",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scenario", nargs="+", default=[], metavar="ID", help="all without any")
    parser.add_argument("--severity", choices=SEVERITIES, default=SEVERITIES[1])
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N - 1")
    parser.add_argument("--split", choices=get_args(Split), default="dev")
    parser.add_argument("--block-steps", type=int, default=BLOCK_STEPS, metavar="N")
    parser.add_argument(
        "--blocks", type=int, default=BLOCKS, metavar="N", help="of four: a multiple"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder; what is there is kept")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
