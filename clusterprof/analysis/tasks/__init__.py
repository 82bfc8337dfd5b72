"""Run the tasks of an analysis: in this process, in several, or on the workers of a cluster."""
