"""Signals of what recording costs."""

from __future__ import annotations

from clusterprof.signals.made import declare as _signal

# --- self: what recording costs -----------------------------------------------------------------
SELF_CPU = _signal("self.cpu_ns_total", "process", "CPU time used by the recorder or a helper.")
SELF_RSS = _signal("self.rss_bytes", "process", "Memory of the recorder or a helper.")
SELF_LATE = _signal("self.late_ns_total", "", "Sum of time by which samples were taken late.")
SELF_TICKS_MISSED = _signal("self.ticks_missed_total", "", "Samples that were not taken at all.")
