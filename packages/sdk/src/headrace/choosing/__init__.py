"""Choosing instead of training: the best of several models, the best system prompt. Part of `headrace.tuner`."""
