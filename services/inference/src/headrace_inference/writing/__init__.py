"""Conversations that people wrote become tokens, by the code that makes prompts and reads answers in traffic."""
