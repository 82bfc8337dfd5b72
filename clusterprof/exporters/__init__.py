"""A recording for other programs: traces, tables and metrics, written as they are read."""
