"""What a reward is worth: advantages, losses and the algorithms that name them. Registries, and pure functions."""
