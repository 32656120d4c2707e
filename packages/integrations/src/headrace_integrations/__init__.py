"""Interfaces of other systems on Headrace, and what they share: stacks, training on tasks, evaluation, training copies.

Programs import them under `headrace`, for example `from headrace.tuner import tune`: the modules of this distribution's
folder `headrace` re-export the names.
"""
