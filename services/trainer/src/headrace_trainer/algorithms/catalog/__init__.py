"""Algorithms, one family per file, each with its paper, its equations and its needs. Announced in `pyproject.toml`;
none of these modules imports torch when it is loaded."""
