"""Token masks of grammars with llguidance. Replicas sample with them, and the trainer computes the same masks again.

The extra `grammars` installs its dependencies.
"""
