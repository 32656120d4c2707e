"""Algorithms, one a file, each with its paper, its equations and what it needs. Announced in `pyproject.toml`;
light."""
