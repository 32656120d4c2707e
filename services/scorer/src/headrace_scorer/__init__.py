"""The scorer, which turns trajectories, rewards and feedback into experiences."""
