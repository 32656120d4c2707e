"""Serves several immutable versions of language models at once, and reports the exact tokens that it sampled."""
