"""Import, export and comparison of versions."""
