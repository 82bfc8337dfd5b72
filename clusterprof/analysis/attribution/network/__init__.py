"""The transfer time of operations: split between sending, links and faults."""
