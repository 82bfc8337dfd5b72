"""Which ranks belong to one job, restarts, and a common clock of its nodes."""
