"""Causes in the host CPU: preprocessing, contention, throttling, GIL, garbage collection."""
