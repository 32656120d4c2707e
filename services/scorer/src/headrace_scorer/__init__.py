"""The scorer: trajectories, rewards and feedback to experiences."""
