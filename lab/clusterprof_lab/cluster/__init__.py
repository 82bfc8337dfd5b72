"""Recordings of whole clusters with known truth: `python -m clusterprof_lab cluster --help`."""
