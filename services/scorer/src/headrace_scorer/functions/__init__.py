"""Reward functions of users, run in processes of their own."""
