"""Collectors of accelerators, and the bindings of the vendor libraries that they call."""
