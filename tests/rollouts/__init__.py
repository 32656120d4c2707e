"""Processes that die in the middle of a rollout, and versions whose content differs from their manifest."""
