"""Versions and their roles: registration, choice of the candidate, promotion, and routing."""
