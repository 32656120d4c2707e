"""The gate, which tests a candidate on held-out tasks before it serves users: running the gate's program, and the
statistical test."""
