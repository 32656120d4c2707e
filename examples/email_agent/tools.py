"""The seven tools of the agent, as OpenAI function definitions and as SQL queries.

The agent: its system prompt and its tools, with the loop that all examples share.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

from example_parts.react import ERROR, Agent, WrongCall, definition, only_argument

HITS = 2
"""Maximum number of threads in a result."""

_THREADS = "SELECT thread, sender, mails.subject FROM mails JOIN threads ON threads.id = thread "


class Mailtools:
    """Tools of one mailbox. Calls are fast, and must not be made from several threads."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def call(self, name: str, arguments: str) -> str:
        """Execute a model's call. For an invalid call return a text that begins with `ERROR`."""
        try:
            tool, parameter = self._resolve(name)
            return tool(only_argument(arguments, parameter))
        except WrongCall as problem:
            return f"{ERROR}{problem}"

    def _resolve(self, name: str) -> tuple[Callable[[str], str], str]:
        if name not in PARAMETER_OF:
            raise WrongCall(f"no tool {name}")
        tool: Callable[[str], str] = getattr(self, name)
        return tool, PARAMETER_OF[name]

    def search_mail(self, query: str) -> str:
        terms = " OR ".join('"' + word.replace('"', "") + '"' for word in query.split())
        rows = self._rows(
            _THREADS + "JOIN mail_words ON mail_words.rowid = number WHERE mail_words MATCH ? AND position = 0 "
            "ORDER BY bm25(mail_words), number LIMIT ?",
            terms or '""', HITS,
        )  # fmt: skip
        return _listing(rows)

    def list_folder(self, folder: str) -> str:
        rows = self._rows(_THREADS + "WHERE folder = ? AND position = 0 ORDER BY number DESC LIMIT ?", folder, HITS)
        if not rows:
            raise WrongCall("no such folder")
        return _listing(rows)

    def read_mail(self, thread: str) -> str:
        rows = self._in_thread(
            "SELECT sender, mails.subject, body FROM mails WHERE thread = ? AND position = 0", thread
        )
        ((sender, subject, body),) = rows
        return f"From: {sender}\nSubject: {subject}\n{body}"

    def list_thread(self, thread: str) -> str:
        rows = self._in_thread("SELECT sender FROM mails WHERE thread = ? ORDER BY position DESC", thread)
        return "\n".join(sender for (sender,) in rows)

    def list_attachments(self, thread: str) -> str:
        ((attachment,),) = self._in_thread("SELECT attachment FROM threads WHERE id = ?", thread)
        return str(attachment)

    def find_contact(self, name: str) -> str:
        rows = self._rows("SELECT id, name, extension FROM contacts WHERE name = ?", name)
        if not rows:
            raise WrongCall("no such contact")
        ((contact, name, extension),) = rows
        return f"{contact} {name} extension {extension}"

    def count_mail(self, contact: str) -> str:
        if not self._rows("SELECT id FROM contacts WHERE id = ?", contact):
            raise WrongCall("no such contact id")
        ((count,),) = self._rows(
            "SELECT count(*) FROM mails JOIN contacts ON contacts.name = sender WHERE contacts.id = ?", contact
        )
        return f"{count} mails"

    def _in_thread(self, query: str, thread: str) -> list[tuple[Any, ...]]:
        rows = self._rows(query, thread)
        if not rows:
            raise WrongCall("no such thread")
        return rows

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._database.execute(query, values).fetchall()


def _listing(rows: list[tuple[Any, ...]]) -> str:
    return "\n".join(f"{thread} {sender}: {subject}" for thread, sender, subject in rows) or "nothing found"


_THREAD_ID = "Id of the thread, as a search or a folder shows it."
_TOOLS = (
    ("search_mail", "Search mail; shows the best threads.", "query", "Words to look for, e.g. a subject."),
    ("list_folder", "Show the newest threads of a folder, newest first.", "folder", "Name of the folder."),
    ("read_mail", "Read the mail that opened a thread.", "thread", _THREAD_ID),
    ("list_thread", "Show who wrote in a thread, newest mail first.", "thread", _THREAD_ID),
    ("list_attachments", "Name the file attached to a thread.", "thread", _THREAD_ID),
    ("find_contact", "Look up a person: contact id, name and extension.", "name", "First and last name."),
    ("count_mail", "Count the mails that a contact has sent.", "contact", "Id of the contact, from find_contact."),
)
PARAMETER_OF = {name: parameter for name, _, parameter, _ in _TOOLS}
"""Parameter of each tool, which takes exactly one string."""


DEFINITIONS = [definition(*tool) for tool in _TOOLS]
"""Definitions of the tools for the model, in OpenAI's format."""


SYSTEM = "Answer questions about a mailbox. Use the tools, then give the bare answer."
TURNS_MAX = 5
AGENT = Agent(SYSTEM, DEFINITIONS, TURNS_MAX)

play, go_on = AGENT.play, AGENT.go_on
