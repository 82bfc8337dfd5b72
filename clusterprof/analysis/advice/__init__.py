"""Recommendations for each cause, filled in with facts of the run."""
