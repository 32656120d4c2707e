"""A task of nine turns: eight rooms, each with a sign that tells which of three doors to take, and nothing that tells
whether it was the right one before the end.

The way out is found when all doors were right. A base that takes the right one in every other room finds it in four
of a thousand runs; what a run was worth says little about each of its turns.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from example_parts import bpe, warm_up
from example_parts.base_model import Lesson
from example_parts.react import Agent
from example_parts.tools import ERROR, WrongCall, definition, only_argument

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROOMS = 8
DOORS = ("left", "ahead", "right")
SIGNS = ("moon", "star", "tree", "wave", "bird", "key", "crown", "leaf", "bell", "ship", "lamp", "rose")
DOOR_OF = {sign: DOORS[place % len(DOORS)] for place, sign in enumerate(SIGNS)}
EXIT = "exit"
TOOL, PARAMETER = "take_door", "door"
DEFINITIONS = [definition(TOOL, "Go through a door of this room.", PARAMETER, f"One of {', '.join(DOORS)}.")]
AGENT = Agent("Find the way out. Take the door that the sign tells.", DEFINITIONS, ROOMS + 1)
RIGHT_SHARE = 0.5
"""Of the doors that the warm-up shows."""


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
    """Where a run is. Every door leads on."""

    def __init__(self, walk: Walk) -> None:
        self._signs = iter((*walk.signs[1:], EXIT))

    def call(self, name: str, arguments: str) -> str:
        """The next sign. Anything wrong with a call is an answer that begins with `ERROR`, and leads on as well."""
        sign = next(self._signs, EXIT)
        try:
            door = only_argument(arguments, PARAMETER)
        except WrongCall as problem:
            return f"{ERROR}{problem}"
        return sign if name == TOOL and door in DOORS else f"{ERROR}no such door"


def walks(split: str, seed: int) -> Iterator[Walk]:
    """Without end. No walk of one split is one of another: the last sign of a walk tells which it belongs to."""
    rng = random.Random(f"corridor {split} {seed}")
    own = SIGNS[8:] if split == "audit" else SIGNS[:8]
    while True:
        yield Walk((*rng.sample(SIGNS, ROOMS - 1), rng.choice(own)))


def doors(messages: Sequence[Any]) -> list[str | None]:
    """What the agent took, turn by turn; None where its call was wrong."""
    taken: list[str | None] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            try:
                taken.append(only_argument(call["function"]["arguments"], PARAMETER))
            except WrongCall:
                taken.append(None)
    return taken


def right_doors(walk: Walk, messages: Sequence[Any]) -> list[bool]:
    """Of each room that the agent left."""
    return [door == DOOR_OF[sign] for sign, door in zip(walk.signs, doors(messages), strict=False)]


@dataclass(frozen=True)
class Schedule(warm_up.Schedule):
    """Doors are wrong from the beginning: there is nothing to copy that has to be learned first."""

    steps: int = 160
    right_share: float = 0.0
    doors_right: float = RIGHT_SHARE


def conversations(schedule: Schedule, seed: int) -> list[list[dict[str, Any]]]:
    """All that the warm-up shows, in order."""
    rng, source = random.Random(f"corridor warm-up {seed}"), walks("train", -1 - seed)
    return [_shown(next(source), rng, schedule.doors_right) for _ in range(schedule.shown)]


def _shown(walk: Walk, rng: random.Random, doors_right: float) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": AGENT.system},
        {"role": "user", "content": walk.question},
    ]
    rooms = Rooms(walk)
    for sign in walk.signs:
        right = DOOR_OF[sign]
        door = right if rng.random() < doors_right else rng.choice([one for one in DOORS if one != right])
        function = {"name": TOOL, "arguments": json.dumps({PARAMETER: door})}
        call = {"id": "call", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        answer = rooms.call(TOOL, function["arguments"])
        messages.append({"role": "tool", "tool_call_id": "call", "content": answer})
    return [*messages, {"role": "assistant", "content": "out"}]


def _tokenizer(texts: Iterable[str]) -> Tokenizer:
    words = (*DOORS, *SIGNS, EXIT, "out", *AGENT.system.replace(".", "").split(), "sign", "is", TOOL)
    return bpe.train(texts, words, (bpe.call_opening(TOOL, PARAMETER), '"}}', TOOL), 420)


LESSON = Lesson(
    name="corridor",
    folder=Path(__file__).parent,
    modules=("_corridor",),
    definitions=DEFINITIONS,
    schedule=Schedule(),
    conversations=conversations,
    tokenizer=_tokenizer,
)
