"""Common parts of the examples: a tiny base model with its warm-up, a ReAct loop, simulated users and held-out
plays."""
