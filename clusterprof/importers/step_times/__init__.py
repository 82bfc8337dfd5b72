"""Tables of step times: who took how long for which step."""

from __future__ import annotations

from clusterprof.importers.step_times.importer import StepTimes as StepTimes
