"""Jobs with known faults, real and synthetic, and scores of the tools that diagnose them."""
