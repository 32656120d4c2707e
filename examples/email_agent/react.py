"""The agent: its system prompt and its tools, with the loop that all examples share."""

from __future__ import annotations

from email_agent.tools import DEFINITIONS
from example_parts.react import Agent, Episode

SYSTEM = "Answer questions about a mailbox. Use the tools, then give the bare answer."
TURNS_MAX = 5
AGENT = Agent(SYSTEM, DEFINITIONS, TURNS_MAX)

play, go_on = AGENT.play, AGENT.go_on

__all__ = ["AGENT", "SYSTEM", "TURNS_MAX", "Episode", "go_on", "play"]
