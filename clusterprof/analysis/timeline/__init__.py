"""One node as typed columns on one clock: spans, series, operations between ranks."""
