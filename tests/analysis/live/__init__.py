"""The live view."""
