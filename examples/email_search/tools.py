"""The agent's tools. Each finds mails by one property, newest first, except one that finds people.

The agent: its system prompt and its tools. The agent ends after one call, because users read the result of the
tool.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from example_parts.react import ERROR, Agent, WrongCall, definition, named_arguments

LIMIT, LIMIT_MAX = "limit", 20
_MAILS = "SELECT number, sender, mails.subject FROM mails JOIN threads ON threads.id = thread WHERE "
_NEWEST = " ORDER BY number DESC LIMIT ?"


@dataclass(frozen=True)
class Tool:
    """One tool. A tool takes `parameter` and the limit."""

    does: str
    parameter: str
    meaning: str
    sql: str
    """Query with the value of `parameter` and the limit as its arguments."""


TOOLS: Mapping[str, Tool] = {
    "search_sender": Tool(
        "Find the newest mails of a person.", "name", "First and last name.",
        f"{_MAILS} sender = ? {_NEWEST}",
    ),
    "search_folder": Tool(
        "Find the newest mails in a folder.", "folder", "Name of the folder.",
        f"{_MAILS} folder = ? {_NEWEST}",
    ),
    "search_topic": Tool(
        "Find the newest mails on a topic, in all folders.", "topic", "One word.",
        f"{_MAILS} substr(mails.subject, -1 - length(?1)) = ' ' || ?1 {_NEWEST}",
    ),
    "search_meetings": Tool(
        "Find the newest mails that call a meeting on a day.", "day", "Day of the week.",
        f"{_MAILS} position = 0 AND substr(body, 1, 12 + length(?1)) = 'We meet on ' || ?1 || ' ' {_NEWEST}",
    ),
    "search_files": Tool(
        "Find the newest mails with a kind of file.", "file", "Name of the file without number and ending.",
        f"{_MAILS} position = 0 AND substr(attachment, 1, length(attachment) - 5) = ? {_NEWEST}",
    ),
    "find_contact": Tool(
        "Look up people by their name.", "name", "First and last name.",
        "SELECT id, name, 'extension ' || extension FROM contacts WHERE name = ? LIMIT ?",
    ),
}  # fmt: skip
DEFINITIONS = [
    definition(name, tool.does, tool.parameter, tool.meaning, {LIMIT: {"type": "integer", "maximum": LIMIT_MAX}})
    for name, tool in TOOLS.items()
]
"""Definitions of the tools for the model, in OpenAI's format."""
_NUMBER = re.compile(r"^(\d+) ", re.MULTILINE)


class Searchtools:
    """Tools of one mailbox. Calls are fast, and must not be made from several threads."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def call(self, name: str, arguments: str) -> str:
        """Execute a model's call. For an invalid call return a text that begins with `ERROR`."""
        try:
            if name not in TOOLS:
                raise WrongCall(f"no tool {name}")
            return self._run_query(TOOLS[name], arguments)
        except WrongCall as problem:
            return f"{ERROR}{problem}"

    def _run_query(self, tool: Tool, arguments: str) -> str:
        values = named_arguments(arguments, (tool.parameter, LIMIT))
        limit = values[LIMIT]
        if type(limit) is not int or not 1 <= limit <= LIMIT_MAX:
            raise WrongCall(f"{LIMIT} is a number from 1 to {LIMIT_MAX}")
        rows = self._database.execute(tool.sql, (str(values[tool.parameter]), limit)).fetchall()
        if not rows:
            raise WrongCall(f"no such {tool.parameter}")
        return "\n".join(f"{number} {name}: {text}" for number, name, text in rows)


def mails_in(answer: str) -> set[int]:
    """Return the numbers of the mails in a tool's result."""
    return set(map(int, _NUMBER.findall(answer)))


SYSTEM = "Find the six newest mails. Call one tool, once."
AGENT = Agent(SYSTEM, DEFINITIONS, turns_max=1)
