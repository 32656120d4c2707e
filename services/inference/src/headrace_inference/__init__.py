"""Serves several immutable versions of language models side by side, and says exactly what it sampled."""
