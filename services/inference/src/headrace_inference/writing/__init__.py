"""Tokenization of written conversations, by the same code that builds prompts and parses answers in traffic."""
