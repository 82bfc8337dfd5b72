"""The last minute of a running job: settled on every node, merged in the viewer."""
