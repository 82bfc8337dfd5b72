"""Readers of kernel interfaces: one module per domain of /proc, /sys and netlink."""
