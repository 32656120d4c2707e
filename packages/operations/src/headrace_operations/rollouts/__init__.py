"""Text charts and summaries of rollouts."""
