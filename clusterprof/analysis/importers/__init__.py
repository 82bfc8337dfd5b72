"""Traces of other tools: one module per format turns its bytes into tables of a recording."""
