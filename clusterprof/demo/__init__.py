"""The demo: emulated accelerators, a real training loop, injected faults and the truth."""
