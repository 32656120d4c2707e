"""Reward models: what people say of a few runs, learned well enough to speak for the others, as a source of its own."""
