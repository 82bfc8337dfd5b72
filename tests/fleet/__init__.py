"""The ledger of a cluster."""
