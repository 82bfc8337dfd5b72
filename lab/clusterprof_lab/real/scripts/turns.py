"""Switch the fault of a job on and off in blocks of steps: the job contains its own clean run.

    train.py OPTIONS --in-turns=16 --warm-up=8 --fault OPTIONS-OF-THE-FAULT

Blocks are off, on, on, off, and so on again: a slow drift of the machine affects both halves alike.
A fault outside the job is switched from there (`--switched`): every rank announces that it has come
to the step, with nothing under way on its device, and goes on when the file `switched-STEP` exists.
"""

from __future__ import annotations

import argparse
import os
import time

from options import apply_rank_options, parse_words

MARK = "--fault"
_ORDER = (False, True, True, False)
_ENOUGH_S = 20.0


class Turns:
    """What the options are in each step; without `--in-turns` always the same."""

    def __init__(self, words: list[str]) -> None:
        at = words.index(MARK) if MARK in words else len(words)
        self.calm = parse_words(words[:at])
        self.faulty = parse_words([*words[:at], *words[at + 1 :]])
        self.calm.features = self.faulty.features  # there is one model: only what is sent differs

    def apply_rank_options(self, rank: int) -> None:
        """Put the options of this rank in the place of everybody's."""
        apply_rank_options(self.calm, rank)
        apply_rank_options(self.faulty, rank)

    def is_on(self, step: int) -> bool:
        """Return whether the fault is on in a step; in all of them without turns."""
        length, first = self.faulty.in_turns, self.faulty.warm_up
        if not length:
            return True
        block = (step - first) // length
        last = step >= self.faulty.steps - 2  # behind the last step the job is over
        return step >= first and not last and _ORDER[block % len(_ORDER)]

    def get_options(self, step: int) -> argparse.Namespace:
        """Return the options of a step."""
        return self.faulty if self.is_on(step) else self.calm

    def begins_turn(self, step: int) -> bool:
        """Return whether a step is the first of a turn."""
        return step > 0 and self.is_on(step) != self.is_on(step - 1)

    @property
    def loader_options(self) -> list[argparse.Namespace]:
        """The options of each loader that is needed: one if the fault is not of the loader."""
        same = all(
            getattr(self.calm, name) == getattr(self.faulty, name)
            for name in ("workers", "prefetch")
        )
        return [self.faulty] if same or not self.faulty.in_turns else [self.faulty, self.calm]

    def wait_until_switched(self, step: int, rank: int) -> None:
        """Wait until what is outside the job has been switched for this step."""
        if not self.faulty.switched:
            return
        folder = self.faulty.folder
        with open(os.path.join(folder, f"came-{step}-{rank}"), "w"):
            pass
        end = time.monotonic() + _ENOUGH_S
        while not os.path.exists(os.path.join(folder, f"switched-{step}")):
            if time.monotonic() > end:
                raise TimeoutError(f"nobody switched the fault for step {step}")
            time.sleep(0.002)
