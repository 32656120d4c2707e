"""Holds answers to a form: `forms` writes a request's grammar, `compiler` makes guides of it, `guides` has them.

The library is llguidance, which vLLM has, too: both engines hold answers to the same text (docs/decisions/0023).
"""
