"""What the examples have in common: a tiny base model and its warm-up, a ReAct loop, users at work, held-out plays."""
