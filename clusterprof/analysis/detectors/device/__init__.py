"""Causes in feeding the device: copies, launches, allocation, throttling."""
