"""Reward models, which learn from people's ratings of a few runs and score all runs as a source of their own."""
