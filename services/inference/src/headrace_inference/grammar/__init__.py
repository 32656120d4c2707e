"""Constrained answers: `forms` writes the grammar of a request, `compiler` compiles it to guides (`guides`).

The library is llguidance, which vLLM uses, too. So both engines read the same grammars (docs/decisions/0023).
"""
