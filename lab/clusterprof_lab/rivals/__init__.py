"""Other tools, run for real on the jobs of the corpus; each answers as an `Answer`."""
