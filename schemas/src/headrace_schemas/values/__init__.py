"""Types, bounds and text rules that all schemas are built from."""
