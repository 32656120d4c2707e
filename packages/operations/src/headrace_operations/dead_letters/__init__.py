"""Listing, retrying and discarding dead letters. Nothing is removed from the log.

A letter is open until a decision about it is on `dead-letter-decisions`, which is kept forever. A record that is
refused again after a retry is a new letter, because it is at a new offset.
"""

from headrace_operations.dead_letters.actions import Plan, discard, plan, retry
from headrace_operations.dead_letters.reading import Letter, Selection, State, read

__all__ = ["Letter", "Plan", "Selection", "State", "discard", "plan", "read", "retry"]
