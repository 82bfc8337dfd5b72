"""All baselines by name: a recording in, an `Answer` out.

    from baselines.registry import RULES        # with `bench` on the import path
    answer = RULES["xprof"](folder / "recording", truth.read(folder))

A rule may use the recording and `truth.clocks`, the common clock that its authors assume; nothing
else of the truth. What a tool does not claim is None. If a recording lacks what a rule needs, the
rule makes no claim (`causes` and `culprits` None), which is never right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baselines import hta, nvrx, rules_of_thumb, sagemaker, xprof
from clusterprof_lab.answer import Answer
from clusterprof_lab.truth import Truth

Rule = Callable[[Path, Truth], Answer]
RULES: dict[str, Rule] = {
    **rules_of_thumb.RULES,
    **hta.RULES,
    **nvrx.RULES,
    **sagemaker.RULES,
    **xprof.RULES,
}
