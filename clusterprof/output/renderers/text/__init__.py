"""Wording and text blocks that several report formats share."""
