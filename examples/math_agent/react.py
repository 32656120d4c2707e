"""The agent: its system prompt and its tool, with the loop that all examples share."""

from __future__ import annotations

from example_parts.react import Agent
from math_agent.calculator import DEFINITIONS

SYSTEM = "Solve the problem: one thought, one call, again. End with Answer and the number."
TURNS_MAX = 8
"""Limit of model calls: three calls, each repeated, an answer, and one invalid call."""
AGENT = Agent(SYSTEM, DEFINITIONS, TURNS_MAX)
