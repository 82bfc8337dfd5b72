"""Remedies: what to do about a cause, chosen by what was measured, and when to say nothing."""
