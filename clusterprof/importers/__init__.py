"""One file per foreign format: its bytes in, values of ours out; nothing of it is ever run."""
