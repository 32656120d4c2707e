"""Tasks beside the demo's: users who type corrections, and nine turns in which a sign determines the right door.

A base that has seen such messages can use them. In its warm-up, half of the conversations contain one, after a wrong
answer or at another point. The teacher of `hindsight` sees the correction without the wrong answer.

The right answer is not given every time, because a base that is given the answer repeats it without calling a tool, and
a student of that teacher would learn to guess.

Only the end of a run shows whether all doors were right. A base that takes the right door in every other room reaches
the exit in four of a thousand runs. The reward of a run therefore has little information about its single turns.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from email_agent import build_base, demonstrations, mailbox
from email_agent.demonstrations import ROUTES, Message, demonstrate
from email_agent.mailbox import DEFINITIONS, Kind, Mailtools, Task, stream
from email_agent.rewards import same_answer
from example_parts import base_model
from example_parts.base_model import Lesson
from example_parts.react import ERROR, Agent, WrongCall, definition, only_argument

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CORRECTED_SHARE = 0.5
ROOMS = 8
DOORS = ("left", "ahead", "right")
SIGNS = ("moon", "star", "tree", "wave", "bird", "key", "crown", "leaf", "bell", "ship", "lamp", "rose")
DOOR_OF = {sign: DOORS[index % len(DOORS)] for index, sign in enumerate(SIGNS)}
EXIT = "exit"
TOOL, PARAMETER = "take_door", "door"
DOOR_DEFINITIONS = [definition(TOOL, "Go through a door of this room.", PARAMETER, f"One of {', '.join(DOORS)}.")]
AGENT = Agent("Find the way out. Take the door that the sign tells.", DOOR_DEFINITIONS, ROOMS + 1)
RIGHT_SHARE = 0.5
"""Share of right doors in the warm-up."""


def correction(kind: Kind, expected: str, messages: Sequence[Any]) -> str:
    """Return the correction of a wrong answer after `messages`."""
    calls = sum(message["role"] == "tool" for message in messages)
    route = ROUTES[kind]
    remedy = f"Use {route[calls]}" if calls < len(route) else f"It is {expected}"
    return f"No, that is wrong. {remedy}."


def conversations(schedule: demonstrations.Schedule, seed: int) -> list[list[Message]]:
    """Return all conversations of the warm-up, in order."""
    rng = random.Random(f"corrections {seed}")
    questions = [question for number in range(schedule.mailboxes) for question in _questions(schedule, seed, number)]
    result = []
    for position, (task, tools) in enumerate(rng.sample(questions, schedule.shown)):
        lapses = schedule.lapses if position >= schedule.shown_right else 0.0
        result.append(_with_correction(demonstrate(task, tools, rng, lapses), task, tools, rng))
    return result


def _questions(schedule: demonstrations.Schedule, seed: int, number: int) -> list[tuple[Task, Mailtools]]:
    """Return questions about one mailbox of the warm-up, with its tools."""
    box = mailbox.generate(-1 - seed * schedule.mailboxes - number)
    tools, each = Mailtools(box.open()), -(-schedule.shown // schedule.mailboxes)
    both = itertools.cycle((stream(box, "train", seed), stream(box, "held_out", seed)))
    return [(next(source), tools) for source in itertools.islice(both, each)]


def _with_correction(conversation: list[Message], task: Task, tools: Mailtools, rng: random.Random) -> list[Message]:
    """Return a conversation that continues with a correction and the right steps, or the conversation itself.

    The correction follows the wrong steps, or an equal number of right steps.
    """
    if rng.random() >= _CORRECTED_SHARE:
        return conversation
    right = demonstrate(task, tools, rng, 0.0)
    wrong = not same_answer(conversation[-1]["content"], task.expected)
    is_complete = sum(message["role"] == "tool" for message in conversation) == len(ROUTES[task.kind])
    if wrong and rng.random() < 0.5 and (is_complete or conversation[:-1] == right[: len(conversation) - 1]):
        before, rest = conversation, right[-1:] if is_complete else right[len(conversation) - 1 :]
    else:
        steps = rng.choice((2, 4, len(right) - 1))
        before, rest = right[:steps], right[steps:]
    user_message = {"role": "user", "content": correction(task.kind, task.expected, before)}
    return [*before, user_message, *rest]


LESSON = Lesson(
    name="e-mail with corrections",
    folder=Path(demonstrations.__file__).parent,
    modules=(
        "mailbox", "demonstrations", "rewards", "build_base",
        "../../benchmarks/_corrections",
    ),
    definitions=DEFINITIONS,
    schedule=demonstrations.Schedule(),
    conversations=conversations,
    tokenizer=build_base.train_tokenizer,
)  # fmt: skip


@dataclass(frozen=True)
class Walk:
    """The signs of the rooms, in order."""

    signs: tuple[str, ...]
    kind: str = "walk"

    @property
    def id(self) -> str:
        return "-".join(self.signs)

    @property
    def question(self) -> str:
        return f"The sign is {self.signs[0]}"


class Rooms:
    """The rooms of a run. Every door leads to the next room."""

    def __init__(self, walk: Walk) -> None:
        self._signs = iter((*walk.signs[1:], EXIT))

    def call(self, name: str, arguments: str) -> str:
        """Return the next sign. For an invalid call return a text that begins with `ERROR`; the run moves to the next
        room as well."""
        sign = next(self._signs, EXIT)
        try:
            chosen = only_argument(arguments, PARAMETER)
        except WrongCall as problem:
            return f"{ERROR}{problem}"
        return sign if name == TOOL and chosen in DOORS else f"{ERROR}no such door"


def walks(split: str, seed: int) -> Iterator[Walk]:
    """Yield walks without end. The last sign of a walk belongs to one split only, so that splits share no walk."""
    rng = random.Random(f"corridor {split} {seed}")
    last_signs = SIGNS[8:] if split == "audit" else SIGNS[:8]
    while True:
        yield Walk((*rng.sample(SIGNS, ROOMS - 1), rng.choice(last_signs)))


def doors(messages: Sequence[Any]) -> list[str | None]:
    """Return the door that the agent took in each turn, or None for an invalid call."""
    chosen_doors: list[str | None] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            try:
                chosen_doors.append(only_argument(call["function"]["arguments"], PARAMETER))
            except WrongCall:
                chosen_doors.append(None)
    return chosen_doors


def right_doors(walk: Walk, messages: Sequence[Any]) -> list[bool]:
    """Return for each room that the agent left whether the door was right."""
    return [chosen == DOOR_OF[sign] for sign, chosen in zip(walk.signs, doors(messages), strict=False)]


@dataclass(frozen=True)
class Schedule(base_model.Schedule):
    """Warm-up schedule with wrong doors from the beginning, because there are no right answers to copy that must be
    learned first."""

    steps: int = 160
    right_share: float = 0.0
    doors_right: float = RIGHT_SHARE


def corridor_conversations(schedule: Schedule, seed: int) -> list[list[dict[str, Any]]]:
    """Return all conversations of the warm-up, in order."""
    rng, source = random.Random(f"corridor warm-up {seed}"), walks("train", -1 - seed)
    return [_conversation(next(source), rng, schedule.doors_right) for _ in range(schedule.shown)]


def _conversation(walk: Walk, rng: random.Random, doors_right: float) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": AGENT.system},
        {"role": "user", "content": walk.question},
    ]
    rooms = Rooms(walk)
    for sign in walk.signs:
        right = DOOR_OF[sign]
        chosen = right if rng.random() < doors_right else rng.choice([other for other in DOORS if other != right])
        function = {"name": TOOL, "arguments": json.dumps({PARAMETER: chosen})}
        call = {"id": "call", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        answer = rooms.call(TOOL, function["arguments"])
        messages.append({"role": "tool", "tool_call_id": "call", "content": answer})
    return [*messages, {"role": "assistant", "content": "out"}]


def _tokenizer(texts: Iterable[str]) -> Tokenizer:
    words = (*DOORS, *SIGNS, EXIT, "out", *AGENT.system.replace(".", "").split(), "sign", "is", TOOL)
    return base_model.train_tokenizer(texts, words, (base_model.call_opening(TOOL, PARAMETER), '"}}', TOOL), 420)


CORRIDOR = Lesson(
    name="corridor",
    folder=Path(__file__).parent,
    modules=("_corrections",),
    definitions=DOOR_DEFINITIONS,
    schedule=Schedule(),
    conversations=corridor_conversations,
    tokenizer=_tokenizer,
)
