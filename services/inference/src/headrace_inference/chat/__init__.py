"""Turns messages into prompt tokens (templates, exact prompts), and tokens into answers (parsers). Knows no engine."""
