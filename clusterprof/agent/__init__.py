"""The recording wing: runs on every training node, writes the recording, never imports analysis."""
