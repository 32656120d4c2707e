"""Reward functions of users, which run in separate processes."""
