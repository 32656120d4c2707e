"""Conversations for the warm-up: a clerk who knows the way to every answer, and has bad habits.

The habits decide where the base model starts. It copies them as faithfully as the right way, and learns from its own
traffic which of the two pays.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any, Literal

from email_agent.react import SYSTEM
from email_agent.tasks import Kind, Task
from email_agent.tools import PARAMETER_OF, Mailtools
from example_parts.tools import ERROR

Message = dict[str, Any]

Habit = Literal["vague", "careless", "hasty", "wrong_tool", "malformed"]
"""Searches for half of it; takes the wrong thing from what was found; gives up early; asks the wrong tool; forgets to
close the JSON."""

ROUTES: dict[Kind, tuple[str, str]] = {
    "meeting_day": ("search_mail", "read_mail"),
    "attachment": ("search_mail", "list_attachments"),
    "extension": ("search_mail", "find_contact"),
    "last_writer": ("search_mail", "list_thread"),
    "newest_meeting": ("list_folder", "read_mail"),
    "mail_count": ("find_contact", "count_mail"),
}
"""The two calls that lead to the answer."""

WRONG_ROUTES: dict[Kind, tuple[str, str]] = {
    "attachment": ("search_mail", "read_mail"),
    "extension": ("search_mail", "read_mail"),
    "last_writer": ("search_mail", "read_mail"),
    "newest_meeting": ("search_mail", "read_mail"),
}
HABITS: dict[Kind, tuple[Habit, ...]] = {
    "meeting_day": ("vague", "careless", "hasty", "malformed"),
    "attachment": ("vague", "hasty", "wrong_tool", "malformed"),
    "extension": ("vague", "careless", "hasty", "wrong_tool"),
    "last_writer": ("vague", "hasty", "wrong_tool", "malformed"),
    "newest_meeting": ("careless", "hasty", "wrong_tool", "malformed"),
    "mail_count": ("vague", "careless", "hasty", "malformed"),
}
GIVES_UP = "unknown"


def demonstrate(task: Task, tools: Mailtools, rng: random.Random, lapses: float) -> list[Message]:
    """A whole conversation about `task`. With probability `lapses` it shows one of the bad habits."""
    habit = rng.choice(HABITS[task.kind]) if rng.random() < lapses else None
    first, second = WRONG_ROUTES[task.kind] if habit == "wrong_tool" else ROUTES[task.kind]
    conversation = _Conversation(task, tools)

    found = conversation.call(first, rng.choice(task.about.split()) if habit == "vague" else task.about)
    if habit == "hasty" or found.startswith(ERROR):
        return conversation.answer(GIVES_UP)
    argument = _pick(found, second, careless=habit == "careless")
    if habit == "malformed":
        return conversation.answer(f"<tool_call>{_call_json(second, argument).rstrip('}')}</tool_call>")
    return conversation.answer(_reading(task, conversation.call(second, argument)) or GIVES_UP)


class _Conversation:
    def __init__(self, task: Task, tools: Mailtools) -> None:
        self._tools = tools
        self._messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": task.question},
        ]

    def call(self, name: str, argument: str) -> str:
        """Ask a tool as a model would, and return what it answers."""
        arguments = json.dumps({PARAMETER_OF[name]: argument})
        answer = self._tools.call(name, arguments)
        call = {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
        self._messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
        return answer

    def answer(self, text: str) -> list[Message]:
        return [*self._messages, {"role": "assistant", "content": text}]


def _call_json(name: str, argument: str) -> str:
    return json.dumps({"name": name, "arguments": {PARAMETER_OF[name]: argument}})


def _pick(found: str, tool: str, *, careless: bool) -> str:
    """The argument for `tool`, from the first line of `found`; careless: from the second, or the wrong part of it."""
    lines = found.splitlines()
    line = lines[1] if careless and len(lines) > 1 else lines[0]
    short_id, rest = line.split(" ", 1)
    name = " ".join(rest.split()[:2]).rstrip(":")
    wants_name = tool == "find_contact" or (careless and len(lines) == 1)
    return name if wants_name else short_id


def _reading(task: Task, text: str) -> str | None:
    """What `text`, the answer of a tool, says about the question; None when it says nothing about it."""
    day, room = r" on (\w+day)", r"room (\d+)"
    pattern = {
        "meeting_day": day,
        "attachment": r"^(\w+\.pdf)$",
        "extension": r"extension (\d+)",
        "last_writer": r"\A(\w+ \w+)$",
        "newest_meeting": day if "day" in task.question else room,
        "mail_count": r"^(\d+) mails",
    }[task.kind]
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else None
