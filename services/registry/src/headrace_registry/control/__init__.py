"""Control loops: one for the models, one for each rollout, and the readers of live traffic."""
