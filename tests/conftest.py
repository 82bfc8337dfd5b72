"""Puts this folder on the import path: any test may say `from builders import …`."""
