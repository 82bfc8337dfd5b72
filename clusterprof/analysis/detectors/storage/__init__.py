"""Causes in storage: disks, network file systems, object stores, the page cache."""
