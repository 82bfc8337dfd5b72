"""Keep a ledger over the jobs of a cluster: one row per job in a SQLite file, and its tables."""
