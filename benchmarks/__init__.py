"""Benchmarks: `make bench`, or a single one as `python -m benchmarks.<name>`."""
