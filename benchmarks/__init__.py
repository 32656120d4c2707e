"""What is measured rather than tested: `make bench`, or one of them as `python -m benchmarks.<name>`."""
