"""One node's recording: selection, setup, attribution of its ranks, observations."""
