"""Users who know the way: their next message says what to call. And a warm-up for a base that can use that.

The demo's base never saw a user reply to an answer, so what users type is worth nothing to it. This one has read
replies, behind a wrong answer and in place of one, and follows them. Bad habits it has as well.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from email_agent import mailbox, warm_up
from email_agent.build_base import LESSON
from email_agent.demonstrations import Message, demonstrate
from email_agent.tasks import Task, stream
from email_agent.tools import PARAMETER_OF, Mailtools

_MODULES = (*LESSON.modules, "directions")


@dataclass(frozen=True)
class Schedule(warm_up.Schedule):
    """That of the demo, and how many conversations a user directs."""

    directed: float = 0.5


def direction(task: Task, tools: Mailtools, said: Sequence[Message], draw: random.Random) -> tuple[str, list[Message]]:
    """What somebody replies who knows the way, and how it goes on from there: the first call on the way that was not
    made yet, or else the last one."""
    right = demonstrate(task, tools, draw, lapses=0.0)
    made = [_called(call) for one in said for call in one.get("tool_calls") or ()]
    places = [place for place, one in enumerate(right) if one.get("tool_calls")]
    place = next((one for one in places if _called(right[one]["tool_calls"][0]) not in made), places[-1])
    name, argument = _called(right[place]["tool_calls"][0])
    return f"No, that is wrong. Call {name} with {argument}.", right[place:]


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """All that the warm-up shows, in order, in mailboxes that no agent meets; users direct some of it."""
    draw = random.Random(f"directions {seed}")
    places = [_place(-1 - seed * schedule.mailboxes - number, seed) for number in range(schedule.mailboxes)]
    shown = []
    for position in range(schedule.shown):
        source, tools = places[position % len(places)]
        task = next(source)
        told = demonstrate(task, tools, draw, schedule.lapses if position >= schedule.shown_right else 0.0)
        shown.append(_directed(task, tools, told, draw) if draw.random() < schedule.directed else told)
    return shown


def _place(number: int, seed: int) -> tuple[Iterator[Task], Mailtools]:
    """What is asked in a mailbox, about everything in turns, and its tools."""
    box = mailbox.generate(number)
    both = itertools.cycle([stream(box, "train", seed), stream(box, "held_out", seed)])
    return (next(one) for one in both), Mailtools(box.open())


def _directed(task: Task, tools: Mailtools, told: list[Message], draw: random.Random) -> list[Message]:
    """A right conversation is cut behind its first call; a wrong one is kept, or loses its answer."""
    right = told == demonstrate(task, tools, draw, lapses=0.0)
    before = told[:4] if right else told if draw.random() < 0.5 else told[:-1]
    text, rest = direction(task, tools, before, draw)
    return [*before, {"role": "user", "content": text}, *rest]


def _called(call: Any) -> tuple[str, str]:
    """A tool and its argument; of what cannot be read the text."""
    function = call["function"]
    try:
        return function["name"], str(json.loads(function["arguments"])[PARAMETER_OF[function["name"]]])
    except (ValueError, KeyError, TypeError, RecursionError):
        return function["name"], function["arguments"]


DIRECTED_LESSON = replace(
    LESSON, name="email_agent_directed", modules=_MODULES, schedule=Schedule(), conversations=conversations
)
