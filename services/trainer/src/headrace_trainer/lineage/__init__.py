"""A lineage: its state, the operations on it, and its durable saves. No module here touches tensors."""
