"""The agent itself: what it is told and what it may call. One call ends it: users read what the tool has found."""

from __future__ import annotations

from email_search.tools import DEFINITIONS
from example_parts.react import Agent

SYSTEM = "Find the six newest mails. Call one tool, once."
AGENT = Agent(SYSTEM, DEFINITIONS, turns_max=1)
