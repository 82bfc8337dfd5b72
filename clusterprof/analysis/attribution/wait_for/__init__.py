"""Waits between ranks: who was waited for, wait-for chains, hangs."""
