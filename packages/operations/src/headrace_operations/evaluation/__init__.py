"""Evaluation of one exact version on tasks, for `headrace evaluate` and for gate programs."""
