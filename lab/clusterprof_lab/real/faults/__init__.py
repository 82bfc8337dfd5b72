"""Real faults of the environment: one module each, as context managers that undo what they did."""
