"""Allocate idle time of a device to what its host did meanwhile."""
