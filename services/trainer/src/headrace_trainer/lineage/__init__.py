"""A lineage: its state, what may happen to it, and how all of it becomes durable at once. No tensors in here."""
