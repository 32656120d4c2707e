"""The agent itself: what it is told and what it may call. The loop is that of all examples."""

from __future__ import annotations

from example_parts.react import Agent
from math_agent.calculator import DEFINITIONS

SYSTEM = "Solve the problem: one thought, one call, again. End with Answer and the number."
TURNS_MAX = 8
"""Three calls, each of them made again, an answer, and one that went wrong."""
AGENT = Agent(SYSTEM, DEFINITIONS, TURNS_MAX)
