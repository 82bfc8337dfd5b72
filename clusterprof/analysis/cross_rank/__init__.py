"""Passes over all ranks of a recording, in the order of `CROSS_RANK_PASSES`."""
