"""Every baseline under its name: a recording in, an `Answer` out.

    from baselines.registry import RULES        # with `bench` on the import path
    answer = RULES["xprof"](folder / "recording", truth.read(folder))

A rule may use the recording and `truth.clocks`, so that it has the common clock its authors assume;
nothing else of the truth. What a tool does not claim is None. A recording that lacks what a rule
needs makes it say nothing (`causes` and `culprits` None), which is never right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baselines import hta, nvrx, sagemaker, thumb, xprof
from clusterprof_lab.answer import Answer
from clusterprof_lab.truth import Truth

Rule = Callable[[Path, Truth], Answer]
RULES: dict[str, Rule] = {
    **thumb.RULES,
    **hta.RULES,
    **nvrx.RULES,
    **sagemaker.RULES,
    **xprof.RULES,
}
