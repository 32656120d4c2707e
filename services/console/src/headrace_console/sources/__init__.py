"""Readers of the HTTP interfaces of other services."""
