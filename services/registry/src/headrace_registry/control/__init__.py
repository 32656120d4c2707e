"""Control loops that make the registry's decisions: one for all models, one for all rollouts, and the readers of live
traffic."""
