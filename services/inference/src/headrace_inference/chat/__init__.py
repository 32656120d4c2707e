"""Conversion of messages to prompt tokens (templates, exact prompts) and of tokens to answers (parsers)."""
