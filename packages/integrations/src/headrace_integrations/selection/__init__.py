"""Improve an agent without training: select the best of several models, or the best system prompt. Part of
`headrace.tuner`."""
