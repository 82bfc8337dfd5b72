"""The lost time of one rank: device activity, host phases, claims, history."""
