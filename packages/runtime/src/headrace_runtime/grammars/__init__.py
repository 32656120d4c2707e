"""Token masks of grammars, computed with llguidance: for each position, the tokens that may be sampled. Replicas sample
with them, and the trainer computes the same masks again.

The extra `grammars` of this distribution installs the dependencies.
"""
