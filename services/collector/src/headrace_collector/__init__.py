"""The collector: turns to trajectories."""
