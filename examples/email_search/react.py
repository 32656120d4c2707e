"""The agent: its system prompt and its tools. The agent ends after one call, because users read the result of the
tool."""

from __future__ import annotations

from email_search.tools import DEFINITIONS
from example_parts.react import Agent

SYSTEM = "Find the six newest mails. Call one tool, once."
AGENT = Agent(SYSTEM, DEFINITIONS, turns_max=1)
