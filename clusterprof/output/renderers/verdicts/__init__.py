"""Verdicts of `gate` and `compare`: text, JSON, Markdown, JUnit, CI annotations."""
