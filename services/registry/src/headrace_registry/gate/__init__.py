"""The gate: plays of versions on held-out tasks, and their verdicts."""
