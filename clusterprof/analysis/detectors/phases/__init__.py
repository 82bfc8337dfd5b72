"""Causes that are phases of a job: start-up, checkpoints, evaluation, unexplained input waits."""
