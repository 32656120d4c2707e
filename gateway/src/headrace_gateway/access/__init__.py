"""Access to the gateway: API keys, limits, and the errors of refused requests."""
