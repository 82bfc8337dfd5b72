"""Formats of the vendors of accelerators, read on the timeline that Kineto traces use."""
