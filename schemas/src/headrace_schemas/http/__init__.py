"""Requests and responses between services, the SDK and the command."""
