"""Builds batches as arrays from waiting experiences, with the same bytes every time."""
