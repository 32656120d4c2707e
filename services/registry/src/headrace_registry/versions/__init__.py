"""Versions and their roles: registration, candidates, promotion, routing."""
