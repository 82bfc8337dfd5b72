"""Traces of the PyTorch profiler (Kineto JSON), read as a stream."""
