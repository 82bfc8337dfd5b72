"""Tests of the benchmarks that state truths."""
