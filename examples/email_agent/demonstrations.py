"""Conversations for the warm-up: a clerk that knows the steps to every answer, first without, then with bad habits.

The habits determine where the base model starts. The model imitates them as well as the right steps, and learns from
its own traffic which of them are rewarded.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import dataclass
from typing import Any, Literal

from email_agent import mailbox
from email_agent.mailbox import PARAMETER_OF, SYSTEM, Kind, Mailtools, Task, stream
from example_parts import base_model
from example_parts.react import ERROR

Message = dict[str, Any]

Habit = Literal["vague", "careless", "hasty", "wrong_tool", "malformed"]
"""Bad habits: searching for half of the subject, picking the wrong item of a result, giving up early, calling the wrong
tool, and leaving the JSON of a call incomplete."""

ROUTES: dict[Kind, tuple[str, str]] = {
    "meeting_day": ("search_mail", "read_mail"),
    "attachment": ("search_mail", "list_attachments"),
    "extension": ("search_mail", "find_contact"),
    "last_writer": ("search_mail", "list_thread"),
    "newest_meeting": ("list_folder", "read_mail"),
    "mail_count": ("find_contact", "count_mail"),
}
"""The two calls that lead to the answer, by kind of question."""

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
    """Return a whole conversation about `task`. With probability `lapses` it shows one of the bad habits."""
    habit = rng.choice(HABITS[task.kind]) if rng.random() < lapses else None
    first, second = WRONG_ROUTES[task.kind] if habit == "wrong_tool" else ROUTES[task.kind]
    conversation = _Conversation(task, tools)

    result = conversation.call(first, rng.choice(task.about.split()) if habit == "vague" else task.about)
    if habit == "hasty" or result.startswith(ERROR):
        return conversation.answer(GIVES_UP)
    argument = _pick(result, second, careless=habit == "careless")
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
        """Call a tool as a model does, and return its result."""
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


def _pick(result: str, tool: str, *, careless: bool) -> str:
    """Return the argument for `tool` from the first line of a result. If `careless`, from the second line, or the wrong
    part."""
    lines = result.splitlines()
    line = lines[1] if careless and len(lines) > 1 else lines[0]
    short_id, rest = line.split(" ", 1)
    name = " ".join(rest.split()[:2]).rstrip(":")
    wants_name = tool == "find_contact" or (careless and len(lines) == 1)
    return name if wants_name else short_id


def _reading(task: Task, text: str) -> str | None:
    """Return the answer to the question in the result of a tool, or None."""
    day_pattern, room_pattern = r" on (\w+day)", r"room (\d+)"
    pattern = {
        "meeting_day": day_pattern,
        "attachment": r"^(\w+\.pdf)$",
        "extension": r"extension (\d+)",
        "last_writer": r"\A(\w+ \w+)$",
        "newest_meeting": day_pattern if "day" in task.question else room_pattern,
        "mail_count": r"^(\d+) mails",
    }[task.kind]
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else None


@dataclass(frozen=True)
class Schedule(base_model.Schedule):
    """The common schedule, with the settings of the e-mail agent."""

    lapses: float = 0.62
    """Share of conversations with a bad habit, once they occur."""
    mailboxes: int = 16


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """Return all conversations of the warm-up, in order. Its mailboxes have negative seeds, which agents never use."""
    rng = random.Random(f"warm-up {seed}")
    each = -(-schedule.shown // schedule.mailboxes)
    questions = []
    for number in range(schedule.mailboxes):
        box = mailbox.generate(-1 - seed * schedule.mailboxes - number)
        tools = Mailtools(box.open())
        streams = (stream(box, "train", seed), stream(box, "held_out", seed))
        questions += [(next(source), tools) for source in itertools.islice(itertools.cycle(streams), each)]
    return [
        demonstrate(task, tools, rng, schedule.lapses if position >= schedule.shown_right else 0.0)
        for position, (task, tools) in enumerate(rng.sample(questions, schedule.shown))
    ]
