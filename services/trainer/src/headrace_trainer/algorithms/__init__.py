"""Advantages, losses and the algorithms that name them, as registries and pure functions."""
