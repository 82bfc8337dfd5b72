"""Verdicts of the gate and comparisons of runs, written for people and for CI systems."""
