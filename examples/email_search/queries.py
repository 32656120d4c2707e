"""Users' queries (six mails with a common property, in sets without a common question), and the tools that answer them.

The agent: its system prompt and its tools. The agent ends after one call, because users read the result of the
tool.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from email_agent.mailbox import Mailbox
from example_parts.react import ERROR, Agent, WrongCall, definition, named_arguments

LIMIT, LIMIT_MAX = "limit", 20
_MAILS = "SELECT number, sender, mails.subject FROM mails JOIN threads ON threads.id = thread WHERE "
_NEWEST = " ORDER BY number DESC LIMIT ?"
Kind = Literal["sender", "folder", "topic", "day", "file"]
Split = Literal["warm_up", "train", "gate", "audit"]
"""Sets of queries: the base model's warm-up, the agent's own traffic, the gate, which decides about versions, and the
audit, which only measures."""
SPLITS: tuple[Split, ...] = Split.__args__  # type: ignore[attr-defined]

RELEVANT = 6
"""Number of mails of each query: the newest ones. Properties of fewer mails are not used."""
TOOL_OF: Mapping[Kind, str] = {
    "sender": "search_sender",
    "folder": "search_folder",
    "topic": "search_topic",
    "day": "search_meetings",
    "file": "search_files",
}
OPENINGS = (
    "", "Please help. ", "Quick question. ", "Good morning. ", "One more thing. ", "I am in a hurry. ", "Hello again. ",
    "Before lunch. ", "Thank you. ", "Sorry to ask. ",
)  # fmt: skip
WORDINGS: Mapping[Kind, tuple[str, ...]] = {
    "sender": ("Which mails did {} write?", "Find the mails from {}.", "What did {} send?", "I need the mails by {}."),
    "folder": ("Which mails are in {}?", "Find the mails of folder {}.", "What is new in {}?", "Open folder {}."),
    "topic": (
        "Which mails are about any {}?", "Find the mails on every {}.", "What do they say of the {}?",
        "I need all of {}.",
    ),
    "day": (
        "Which mails call a meeting on {}?", "Find the invitations for {}.", "Who wants to meet on {}?",
        "What calls us in on {}?", "I need the meetings of {}.",
    ),
    "file": ("Which mails came with the {}?", "Find the mails with a file {}.", "Who attached the {}?"),
}  # fmt: skip


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


@dataclass(frozen=True)
class Query:
    """One question, with the call that answers it and the mails that it must find."""

    id: str
    kind: Kind
    about: str
    question: str
    relevant: frozenset[int]
    """Numbers of the relevant mails."""

    @property
    def tool(self) -> str:
        return TOOL_OF[self.kind]

    @property
    def arguments(self) -> dict[str, Any]:
        return {TOOLS[self.tool].parameter: self.about, LIMIT: RELEVANT}

    @property
    def split(self) -> Split:
        """Split of the query, determined by the question alone, so that splits share no question."""
        return SPLITS[int(self.id, 16) % len(SPLITS)]


def queries(mailbox: Mailbox, split: Split) -> list[Query]:
    """Return every query of a split."""
    return [query for query in _queries(mailbox) if query.split == split]


def stream(mailbox: Mailbox, split: Split, seed: int) -> Iterator[Query]:
    """Yield queries without end: kinds alternate, and each kind's queries come in random order without repetition until
    all were used."""
    rng = random.Random(f"queries {mailbox.seed} {split} {seed}")
    by_kind: dict[Kind, list[Query]] = defaultdict(list)
    for query in queries(mailbox, split):
        by_kind[query.kind].append(query)
    return itertools.chain.from_iterable(zip(*(_shuffled(several, rng) for several in by_kind.values()), strict=True))


def _shuffled(several: list[Query], rng: random.Random) -> Iterator[Query]:
    while True:
        yield from rng.sample(several, len(several))


def _queries(mailbox: Mailbox) -> Iterator[Query]:
    matching: dict[tuple[Kind, str], list[int]] = defaultdict(list)
    for kind, about, number in _properties(mailbox):
        matching[kind, about].append(number)
    for (kind, about), numbers in sorted(matching.items()):
        if len(numbers) < RELEVANT:
            continue
        for opening, wording in itertools.product(OPENINGS, WORDINGS[kind]):
            question = opening + wording.format(about)
            name = hashlib.sha256(question.encode()).hexdigest()[:12]
            yield Query(name, kind, about, question, frozenset(sorted(numbers)[-RELEVANT:]))


def _properties(mailbox: Mailbox) -> Iterator[tuple[Kind, str, int]]:
    """Yield kind, property and number of each mail. Meetings and files belong to the first mail of a thread."""
    for thread in mailbox.threads:
        yield "day", thread.day, thread.mails[0].number
        yield "file", thread.attachment[: -len("1.pdf")], thread.mails[0].number
        for mail in thread.mails:
            yield "sender", mail.sender.name, mail.number
            yield "folder", thread.folder, mail.number
            yield "topic", thread.subject.removeprefix(f"{thread.folder} "), mail.number
