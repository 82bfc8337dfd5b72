"""Collectors: each samples one source at its own rate and returns values in base units."""
