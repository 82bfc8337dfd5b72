"""Jobs with known faults, real and synthetic, and the score of those who explain them."""
