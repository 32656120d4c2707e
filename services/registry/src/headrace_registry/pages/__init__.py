"""REST pages of the registry."""
