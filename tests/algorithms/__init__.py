"""Independent results for each algorithm, and the comparison with ours."""
