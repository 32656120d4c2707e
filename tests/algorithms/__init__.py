"""Independent results for each algorithm, and the comparison with Headrace's."""
