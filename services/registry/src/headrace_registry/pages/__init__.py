"""REST endpoints of the registry."""
