"""The sampling service: what is sampled when, and what each collector costs."""
