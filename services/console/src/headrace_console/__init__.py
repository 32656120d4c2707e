"""Web console: what the stack learns and why, and decisions about versions."""
