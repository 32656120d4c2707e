"""Statistics that decide: e-processes, confidence sequences, intervals, Student's t. They need no other package."""
