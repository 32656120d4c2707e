"""Users that know the right steps and name the next call in their message, and a warm-up for a base that follows them.

The demo's base has never seen a user reply to an answer, so that typed messages are useless to it. This base has seen
replies after wrong answers and in place of answers, and follows them. The base has the same bad habits.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from email_agent import demonstrations, mailbox
from email_agent.build_base import LESSON
from email_agent.demonstrations import Message, demonstrate
from email_agent.mailbox import PARAMETER_OF, Mailtools, Task, stream

_MODULES = (*LESSON.modules, "directions")


@dataclass(frozen=True)
class Schedule(demonstrations.Schedule):
    """Schedule of the demo, with the share of directed conversations."""

    directed: float = 0.5


def direction(
    task: Task, tools: Mailtools, messages: Sequence[Message], draw: random.Random
) -> tuple[str, list[Message]]:
    """Return a user's direction, and the right continuation of the conversation.

    The direction names the first right call that the agent has not made, or else the last one.
    """
    right = demonstrate(task, tools, draw, lapses=0.0)
    earlier_calls = [_tool_and_argument(call) for message in messages for call in message.get("tool_calls") or ()]
    indices = [index for index, message in enumerate(right) if message.get("tool_calls")]
    next_call = next(
        (index for index in indices if _tool_and_argument(right[index]["tool_calls"][0]) not in earlier_calls),
        indices[-1],
    )
    name, argument = _tool_and_argument(right[next_call]["tool_calls"][0])
    return f"No, that is wrong. Call {name} with {argument}.", right[next_call:]


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """Return all conversations of the warm-up, in order. Agents never use its mailboxes."""
    draw = random.Random(f"directions {seed}")
    sources = [_tasks_and_tools(-1 - seed * schedule.mailboxes - number, seed) for number in range(schedule.mailboxes)]
    result = []
    for position in range(schedule.shown):
        source, tools = sources[position % len(sources)]
        task = next(source)
        messages = demonstrate(task, tools, draw, schedule.lapses if position >= schedule.shown_right else 0.0)
        result.append(_with_direction(task, tools, messages, draw) if draw.random() < schedule.directed else messages)
    return result


def _tasks_and_tools(number: int, seed: int) -> tuple[Iterator[Task], Mailtools]:
    """Return the tasks of a mailbox, alternating between the splits, and its tools."""
    box = mailbox.generate(number)
    both = itertools.cycle([stream(box, "train", seed), stream(box, "held_out", seed)])
    return (next(split) for split in both), Mailtools(box.open())


def _with_direction(task: Task, tools: Mailtools, messages: list[Message], draw: random.Random) -> list[Message]:
    """Add a direction to a conversation: after the first call of a right one, and after, or in place of, the answer of
    a wrong one."""
    is_right = messages == demonstrate(task, tools, draw, lapses=0.0)
    before = messages[:4] if is_right else messages if draw.random() < 0.5 else messages[:-1]
    text, rest = direction(task, tools, before, draw)
    return [*before, {"role": "user", "content": text}, *rest]


def _tool_and_argument(call: Any) -> tuple[str, str]:
    """Return a tool and its argument, or the raw arguments if they cannot be parsed."""
    function = call["function"]
    try:
        return function["name"], str(json.loads(function["arguments"])[PARAMETER_OF[function["name"]]])
    except (ValueError, KeyError, TypeError, RecursionError):
        return function["name"], function["arguments"]


DIRECTED_LESSON = replace(
    LESSON, name="email_agent_directed", modules=_MODULES, schedule=Schedule(), conversations=conversations
)
