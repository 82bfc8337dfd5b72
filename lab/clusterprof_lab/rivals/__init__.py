"""Other tools, run on the real jobs of the corpus; each result is an `Answer`."""
